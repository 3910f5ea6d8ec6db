"""The journal: what is written is read back, and nothing about a disk ever reaches the training loop."""

import dataclasses
import json
import math
import warnings
from contextlib import contextmanager
from types import UnionType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egeria import EgeriaWarning, JournalError, events, read_journal
from egeria.journal import FILE_NAME, Recorder

VALUES = {
    int: 3,
    float: 0.1 + 0.2,
    bool: True,
    str: "“line”\nbreak",
    list[bool]: [True],
    dict[str, float]: {"accuracy": 0.5},
    dict[str, events.Plain]: {"torch": "2.11.0", "threads": 2.5, "data": None},
    dict[str, dict[str, events.Plain]]: {"plasticity": {"window": 3}},
    list[events.ModuleFacts]: [{"name": "stem", "num_parameters": 2, "num_trainable": 1, "share": 0.5}],
}
"""By the type of a field."""


def example(kind):
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    return kind(**{name: None if isinstance(found, UnionType) else VALUES[found] for name, found in fields.items()})


EXAMPLES = [example(kind) for kind in events.EVENT_TYPES.values()]
READ, FROZEN = example(events.PlasticityRead), example(events.ModuleFrozen)
OPENED = {"event": "journal_opened", "schema_version": events.SCHEMA_VERSION, "time": 1.0}


@contextmanager
def warned():
    """Collects what the recorder says went wrong."""
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(entry.message) for entry in caught]


def logged(**values):
    return events.MetricLogged(step=1, values=values)


def write(directory, *course):
    with warned() as failures:
        recorder = Recorder(directory)
        for event in course:
            recorder.write(event)
        recorder.close()
    assert failures == []


def write_lines(directory, *lines):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (directory / FILE_NAME).write_text(text, encoding="utf-8")


def test_a_journal_gives_its_events_in_order_and_by_kind(tmp_path):
    write(tmp_path / "made" / "on the way", *EXAMPLES)
    journal = read_journal(tmp_path / "made" / "on the way")
    assert tuple(journal) == journal.events == tuple(EXAMPLES) and len(journal) == len(EXAMPLES)
    assert journal.of(events.ModuleFrozen) == [FROZEN]
    assert journal.first(events.ModuleFrozen) == FROZEN
    assert read_journal(journal.directory / FILE_NAME) == journal
    assert journal.num_damaged == 0


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_torn_last_line_costs_one_event_and_the_next_writer_starts_afresh(kept, tmp_path):
    write(tmp_path, logged(a=1.0), logged(a=2.0))
    path = tmp_path / FILE_NAME
    whole, last = path.read_bytes().rstrip(b"\n").rsplit(b"\n", 1)
    path.write_bytes(whole + b"\n" + last[:kept])
    torn = read_journal(tmp_path)
    assert ([event.values["a"] for event in torn], torn.num_damaged) == ([1.0], 1)
    write(tmp_path, logged(a=3.0))
    reopened = read_journal(tmp_path)
    assert ([event.values["a"] for event in reopened], reopened.num_damaged) == ([1.0, 3.0], 1)


def test_fields_that_a_later_version_added_are_passed_over(tmp_path):
    write_lines(tmp_path, OPENED, {**FROZEN.to_dict(), "mood": "good"})
    assert read_journal(tmp_path).events == (FROZEN,)


def test_a_newer_schema_is_refused(tmp_path):
    for version in [events.SCHEMA_VERSION + 1, "2", None, 1.5]:
        write_lines(tmp_path, {**OPENED, "schema_version": version}, logged(a=1.0).to_dict())
        with pytest.raises(JournalError) as refusal:
            read_journal(tmp_path)
        message = str(refusal.value)
        assert f"up to schema {events.SCHEMA_VERSION}" in message
        assert f"has schema {version!r}" in message and "newer one" in message


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_cannot_hold_come_back_as_numbers(number, tmp_path):
    course = [logged(accuracy=number, loss=0.5), dataclasses.replace(READ, value=number, slope=number)]
    write(tmp_path, *course)
    assert [repr(event) for event in read_journal(tmp_path)] == [repr(event) for event in course]


@given(number=st.floats(allow_nan=False), text=st.text(), slope=st.none() | st.floats(allow_nan=False))
def test_numbers_and_texts_keep_every_digit_and_letter(number, text, slope, tmp_path_factory):
    event = dataclasses.replace(READ, value=number, name=text, slope=slope)
    directory = tmp_path_factory.mktemp("run")
    write(directory, event, logged(**{text: number}))
    assert read_journal(directory).events == (event, logged(**{text: number}))


def test_an_event_that_is_no_plain_value_raises_nothing(tmp_path):
    with warned() as failures:
        recorder = Recorder(tmp_path)
        recorder.write(logged(a=1.0))
        recorder.write(logged(a=object()))
        recorder.close()
    assert len(failures) == 1
    assert read_journal(tmp_path).events == (logged(a=1.0),)


def test_what_is_declined_again_is_written_once_by_each_process():
    for echoes in (False, True):
        recorder, seen = Recorder(None, echoes=echoes), []
        recorder.listen(seen.append)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EgeriaWarning)
            for _ in range(3):
                recorder.decline("looking ahead", "there is nothing to see")
        assert len(seen) == 1
