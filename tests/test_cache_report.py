"""What the report's page says of the activation cache, from a hand-made journal."""

from __future__ import annotations

import html.parser

import egeria
from egeria.events import CacheDecided, CacheUsed
from test_report import closed, interval, started, write

NUMBERS = {"iteration_s": 0.25, "prefix_s": 0.1, "serve_s": 0.002, "read_s": 0.0, "epochs_ahead": 12.0}


class Tables(html.parser.HTMLParser):
    """Reads the tables of a page: by label, a dictionary of cells by heading for each line."""

    def __init__(self, text):
        super().__init__()
        self.tables, self._label, self._cell, self._lines = {}, None, None, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._label = dict(attrs).get("aria-label", self._label)
        if tag == "tr":
            self._lines = self.tables.setdefault(self._label, [])
            self._lines.append([])
        self._cell = "" if tag in ("td", "th") else self._cell

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._lines[-1].append(self._cell)
            self._cell = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data.replace("\N{NO-BREAK SPACE}", " ")

    def rows(self, label):
        heading, *lines = self.tables[label]
        return [dict(zip(heading, line, strict=True)) for line in lines]


def decided(step, generation, mode, numbers=NUMBERS):
    return CacheDecided(
        step=step, boundary="stem", generation=generation, mode=mode, reason="it pays", numbers=dict(numbers)
    )


def used(step, generation, **changes):
    nothing = {"mismatches": 0, "stalls": 0, "stall_s": 0.0, "dropped_writes": 0, "checks": 0, "largest_error": 0.0}
    amounts = {"hits": 0, "misses": 0, "batches": 1, "bytes_read": 0, "bytes_written": 0, "size_bytes": 0}
    return CacheUsed(
        step=step, boundary="stem", generation=generation, **{**nothing, **amounts, "thread_cpu_s": 0.0, **changes}
    )


def tables_of(directory, *events):
    write(directory, [started(), interval(10), *events, closed(50)])
    return Tables(egeria.report(directory).path.read_text(encoding="utf-8"))


def test_a_stored_front_shows_what_decided_and_what_came_of_it(tmp_path):
    last = used(
        50, 1, hits=750, misses=250, damaged=3, mismatches=2, stalls=4, bytes_read=2**21, bytes_written=2**20, checks=5
    )
    page = tables_of(tmp_path, decided(20, 1, "stored"), used(30, 1, hits=10), last)
    (how,) = page.rows("Decisions about the frozen forward pass")
    assert (how["frozen up to"], how["from step"], how["forward pass"], how["why"]) == (
        "stem",
        "20",
        "stored",
        "it pays",
    )
    (weighed,) = page.rows("What decided")
    assert weighed["epochs ahead"] == "12.0" and "250" in weighed["iteration"] and "100" in weighed["frozen forward"]
    assert weighed["reading"] == weighed["filling"], "what was not measured is unknown, not 0"
    (traffic,) = page.rows("What came of it")
    assert (traffic["hits"], traffic["hit share"]) == ("750", "75.0 %"), "the last word counts"
    assert (traffic["damaged"], traffic["mismatches"], traffic["stalls"], traffic["checks"]) == ("3", "2", "4", "5")
    assert (traffic["read"], traffic["written"]) == ("2.0 MiB", "1.0 MiB")


def test_a_front_that_is_not_stored_has_no_traffic(tmp_path):
    page = tables_of(tmp_path, decided(20, 1, "inference", numbers={}))
    assert [row["forward pass"] for row in page.rows("Decisions about the frozen forward pass")] == ["inference"]
    assert "What came of it" not in page.tables and "What decided" not in page.tables


def test_a_run_without_the_cache_says_nothing_of_it(tmp_path):
    assert not [label for label in tables_of(tmp_path).tables if label and "forward pass" in label]


def test_what_another_host_had_stored_is_told_and_only_where_there_are_several(tmp_path):
    """4 epochs of 10 batches of 8: the first stores, and of the 240 samples behind it 120 were stored elsewhere."""
    course = {"hits": 120, "misses": 200, "batches": 40}
    for hosts, told in (({"num_hosts": 2.0}, True), ({}, False)):
        directory = tmp_path / str(told)
        environment = {"torch": "2.11.0", "steps_per_epoch": 10}
        begun = [started(environment=environment), interval(10), decided(10, 1, "stored", {**NUMBERS, **hosts})]
        write(directory, [*begun, used(50, 1, **course), closed(50)])
        assert ("120 samples that another host had stored" in str(egeria.report(directory))) is told
    assert "in 1.47" in str(egeria.report(tmp_path / "True"))  # 15 batches at 98 ms
