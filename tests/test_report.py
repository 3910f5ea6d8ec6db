"""The report: numbers worked out by hand, and a page that holds whatever the journal holds."""

import dataclasses
import html.parser
import math

import pytest
import torch
from torch import nn

import egeria
from egeria import events
from egeria.config import Config
from egeria.journal import Recorder
from egeria.report import Summary, report
from egeria.report.summary import backward_shares

NAMES = ("stem", "body", "head")
SECTIONS = ("pictures", "time", "events", "modules", "settings")
VOID = {"meta", "br", "hr", "img", "input", "link"}


def started(names=NAMES, shares=(0.5, 0.3, 0.2), **changes):
    sizes = (100, 300, 600)
    settings = {
        "step": 0,
        "config": Config.from_dict({"policy": {"name": "egeria"}}).to_dict(),
        "modules": [
            {"name": name, "num_parameters": size, "num_trainable": size, "share": share}
            for name, size, share in zip(names, sizes, shares, strict=True)
        ],
        "trainable": [True, True, True],
        "deepest_freeze": 2,
        "rule": "step",
        "total_steps": 100,
        "interval_steps": 10,
        "environment": {"torch": "2.11.0"},
    }
    return events.RunStarted(**{**settings, **changes})


def interval(step, *, frozen=0, wall=0.1, cpu=0.2, loss=1.0, rate=0.1, num_steps=10, overhead=(0.0, 0.0)):
    return events.IntervalMeasured(
        step=step,
        evaluation=step // 10,
        loss=loss,
        num_steps=num_steps,
        num_bad_losses=0,
        learning_rate=rate,
        frozen=frozen,
        iteration_wall_s=wall,
        iteration_cpu_s=cpu,
        overhead_wall_s=overhead[0],
        overhead_cpu_s=overhead[1],
    )


def reading(step, module=0, *, value=0.01, stationary=0, name=None, wall=0.01, cpu=0.02, **foreseen):
    return events.PlasticityRead(
        step=step,
        evaluation=step // 10,
        module=module,
        name=name or NAMES[module],
        value=value,
        smoothed=value,
        slope=None,
        tolerance=None,
        stationary=stationary,
        wall_s=wall,
        cpu_s=cpu,
        **foreseen,
    )


def frozen(step, module, share, name=None):
    return events.ModuleFrozen(
        step=step,
        module=module,
        name=name or NAMES[module],
        frozen=module + 1,
        reason="plasticity stationary for 10 evaluations",
        parameter_share=share,
    )


def stage(step):
    return events.StageChanged(step=step, stage="knowledge-guided", reason="the loss changed by 3.0%")


def closed(step, frozen=0, wall=0.05, cpu=0.08):
    return events.RunClosed(step=step, frozen=frozen, overhead_wall_s=wall, overhead_cpu_s=cpu)


def run_of_75_steps():
    """Two freezes and a thaw; unfrozen medians are 0.105 s of wall and 0.205 s of CPU time."""
    return [
        started(),
        interval(10, wall=0.10, cpu=0.20, loss=2.0),
        interval(20, wall=0.12, cpu=0.22),
        stage(20),
        events.ReferenceRefreshed(step=20, evaluation=2, builder="snapshot", wall_s=0.02, cpu_s=0.02),
        interval(30, wall=0.11, cpu=0.21),
        reading(30, 0, stationary=10),
        frozen(30, 0, 0.1),
        interval(40, frozen=1, wall=0.08, cpu=0.16),
        events.MetricLogged(step=40, values={"accuracy": 0.9, "val_loss": 0.5}),
        events.ReadingDropped(step=40, evaluation=4, module=1, reason="the reading is not finite"),
        interval(50, frozen=1, wall=0.08, cpu=0.16),
        reading(50, 1, stationary=10),
        frozen(50, 1, 0.4),
        interval(60, frozen=2, wall=0.05, cpu=0.10, rate=0.01),
        events.Thawed(step=60, frozen_before=2, reason="the learning rate has fallen", window=5),
        interval(70, wall=0.10, cpu=0.20, rate=0.01),
        events.MetricLogged(step=70, values={"accuracy": 0.8, "val_loss": 0.4}),
        closed(75),
    ]


def write(directory, *processes):
    for process in processes:
        writer = Recorder(directory)
        for event in process:
            writer.write(event)
        writer.close()
    return directory


def summary_of(directory, *processes):
    return Summary.from_events(egeria.read_journal(write(directory, *processes)), directory)


class Page(html.parser.HTMLParser):
    """Checks that tags are balanced and collects what a page refers to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.references, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for key, value in attrs if key in ("href", "src", "xlink:href", "srcset")]
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page_of(made):
    return Page(made.path.read_text(encoding="utf-8"))


def test_time_saved_is_the_hand_worked_sum(tmp_path):
    summary = summary_of(tmp_path, run_of_75_steps())
    assert summary.wall.unfrozen_iteration_s == pytest.approx(0.105)
    assert summary.cpu.unfrozen_iteration_s == pytest.approx(0.205)
    assert summary.wall.training_s == pytest.approx(6.4)
    assert summary.wall.saved_s == pytest.approx(20 * 0.025 + 10 * 0.055 - 0.05)
    assert summary.cpu.saved_s == pytest.approx(20 * 0.045 + 10 * 0.105 - 0.08)
    assert summary.wall.unfrozen_s == pytest.approx(6.4 + 0.05 + 1.0)
    assert summary.wall.saved_share == pytest.approx(1.0 / 7.45)
    assert summary.wall.overhead_share == pytest.approx(0.05 / 6.4)
    assert (summary.step, summary.closed) == (75, True)


def test_weights_that_do_not_train_have_no_gradient_to_skip():
    """As beside LoRA: half of the forward pass, whose backward pass is for the inputs alone."""
    assert backward_shares([0.5, 0.5], [1.0, 0.0]) == pytest.approx([0.4, 0.2])
    assert backward_shares([0.5, 0.5], [0.0, 0.0]) == pytest.approx([0.25, 0.25])


def test_frozen_and_skipped_shares(tmp_path):
    summary = summary_of(tmp_path, run_of_75_steps())
    assert [(point.step, point.frozen, point.parameter_share) for point in summary.depths] == [
        (0, 0, 0.0),
        (30, 1, 0.1),
        (50, 2, 0.4),
        (60, 0, 0.0),
    ]
    assert summary.skipped_share == pytest.approx(2 / 3 * (20 * 0.5 + 10 * 0.8) / 75)
    assert summary.frozen == 0
    died_early = [started(), frozen(0, 0, 0.1)], [started(), events.Resumed(step=15, frozen=1, stage="")]
    assert summary_of(tmp_path / "died", *died_early).skipped_share <= 0.5, "it froze before any interval"


def with_overhead(course):
    """Tell the overhead in each interval: 1 ms of wall and 2 ms of CPU time a step."""
    return [
        dataclasses.replace(event, overhead_wall_s=1e-3 * event.step, overhead_cpu_s=2e-3 * event.step)
        if isinstance(event, events.IntervalMeasured)
        else event
        for event in course
    ]


def test_a_run_without_closing_counts_what_its_last_interval_tells(tmp_path):
    course = with_overhead(run_of_75_steps()[:-1])
    course.append(dataclasses.replace(reading(70), controller_cpu_s=0.5))
    made = report(write(tmp_path, course))
    assert not made.summary.closed and "overhead deducted" in str(made)
    assert made.summary.wall.overhead_s == pytest.approx(0.07)
    assert made.summary.cpu.overhead_s == pytest.approx(0.14 + 0.5)
    assert made.summary.wall.saved_s == pytest.approx(1.05 - 0.07)
    closing = [*course, closed(75)]
    assert summary_of(tmp_path / "closed", closing).wall.overhead_s == pytest.approx(0.05), "that is exact"


def test_the_pace_is_that_of_most_steps_and_not_of_most_intervals(tmp_path):
    """Intervals of a warm-up are short and slow; those behind it have most of the steps."""
    warm_up = [interval(step, wall=0.3, cpu=0.6, num_steps=1) for step in range(1, 11)]
    course = [started(), *warm_up, interval(30, num_steps=20), interval(50, num_steps=20), frozen(50, 0, 0.1)]
    course += [interval(step, frozen=1, wall=0.4, cpu=0.8, num_steps=1) for step in (51, 52, 53)]
    course += [interval(73, frozen=1, wall=0.06, cpu=0.1, num_steps=20), closed(75)]
    summary = summary_of(tmp_path, course)
    assert (summary.wall.unfrozen_iteration_s, summary.cpu.unfrozen_iteration_s) == (0.1, 0.2)
    assert [(pace.wall_s, pace.cpu_s) for pace in summary.paces] == [(0.1, 0.2), (0.06, 0.1)]
    assert summary.wall.saved_s == pytest.approx(3 * (0.1 - 0.4) + 20 * 0.04 - 0.05)
    assert summary.wall.unfrozen_s == pytest.approx(10 * 0.3 + 63 * 0.1)


def test_a_loss_of_time_is_shown_as_one(tmp_path):
    made = report(write(tmp_path, [*run_of_75_steps()[:-1], closed(75, wall=3.0)]))
    assert made.summary.wall.saved_s == pytest.approx(1.05 - 3.0)
    assert made.summary.wall.saved_share < 0
    assert "did not pay" in str(made)
    assert "\N{MINUS SIGN}" in str(made)


def test_the_most_memory_is_told_by_depth_where_there_is_an_accelerator(tmp_path):
    course = run_of_75_steps()
    assert "most memory" not in str(report(write(tmp_path / "cpu", course)))
    held = {0: 3 * 2**30, 1: 2 * 2**30, 2: 2**30}
    course = [
        dataclasses.replace(e, memory_bytes=held[e.frozen] + e.step) if isinstance(e, events.IntervalMeasured) else e
        for e in course
    ]
    made = report(write(tmp_path / "gpu", course))
    assert [pace.memory_bytes for pace in made.summary.paces] == [3 * 2**30 + 70, 2 * 2**30 + 50, 2**30 + 60]
    assert "3,072.0 MiB with nothing frozen, 2,048.0 MiB with 1 frozen" in str(made)
    assert any("1,024.0 MiB" in word for word in page_of(made).words)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")
def test_a_run_on_an_accelerator_tells_its_most_memory(tmp_path):
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"total_steps": 40, "plan": "0:99 0.5:0", "config": {"plasticity": {"interval_steps": 5}}}
    with egeria.attach(model, optimizer, directory=tmp_path, **options) as run:
        for _ in range(40):
            loss = model(torch.ones(4, 512, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
    unfrozen, frozen = report(tmp_path).summary.paces
    assert 0 < frozen.memory_bytes < unfrozen.memory_bytes


@pytest.mark.parametrize(("shares", "unfrozen_s"), [((0.5, 0.3, 0.2), 0.15), ((math.nan, 0.5, 0.5), None)])
def test_without_unfrozen_intervals_their_time_is_computed_from_the_shares_of_layer_modules(
    shares, unfrozen_s, tmp_path
):
    course = [started(shares=shares), events.Resumed(step=500, frozen=1, stage="knowledge-guided")]
    course += [interval(510, frozen=1, wall=0.1), closed(520, frozen=1)]
    made = report(write(tmp_path, course))
    assert made.summary.wall.unfrozen_iteration_s == (unfrozen_s and pytest.approx(unfrozen_s))
    assert (made.summary.first_step, made.summary.step) == (500, 520)
    assert ("is computed" if unfrozen_s else "not known") in str(made) and "begins at step 500" in str(made)
    page_of(made)


def test_a_resumed_run_leaves_out_what_it_went_back_on(tmp_path):
    crashed = with_overhead(run_of_75_steps()[:-4])
    crashed.append(events.FaultCaught(step=64, where="evaluating", error="OSError: gone", count=1))
    again = [
        started(),
        events.Resumed(step=40, frozen=1, stage="knowledge-guided"),
        interval(50, frozen=1, wall=0.06, cpu=0.12),
        interval(60, frozen=1, wall=0.06, cpu=0.12),
        closed(60, frozen=1, wall=0.03, cpu=0.03),
    ]
    summary = summary_of(tmp_path, crashed, again)
    assert (summary.num_resumed, summary.step, summary.frozen) == (1, 60, 1)
    assert [(point.step, point.frozen) for point in summary.depths] == [(0, 0), (30, 1)]
    # Unfrozen: 0.10, 0.12, 0.11; the crashed process has told its overhead up to step 40.
    assert summary.wall.unfrozen_iteration_s == pytest.approx(0.11)
    assert summary.wall.saved_s == pytest.approx(10 * 0.03 + 20 * 0.05 - 0.04 - 0.03)
    assert not summary.of(events.FaultCaught)


def test_what_a_session_thaws_for_good_is_not_frozen(tmp_path):
    course = [
        *run_of_75_steps()[:9],
        interval(40, frozen=1, wall=0.08),
        events.Declined(step=45, what="freezing", reason="ending an interval failed 3 times"),
        interval(50),
        closed(50),
    ]
    summary = summary_of(tmp_path, course)
    assert summary.frozen == 0
    assert (summary.depths[-1].step, summary.depths[-1].frozen) == (45, 0)


def declined(what, reason):
    return events.Declined(step=0, what=what, reason=reason)


def plan(text, reason="given by the user"):
    return events.PlanMade(step=1, plan=text, reason=reason, skipped_share=0.1)


WHY = {
    "up to step 20: the policy 'egeria' froze nothing; the bootstrapping stage did not end.": [
        started(),
        interval(20),
        closed(20),
    ],
    "the library declined freezing (the model has no blocks)": [
        started(modules=[], trainable=[], deepest_freeze=0),
        declined("freezing", "the model has no blocks"),
        interval(10),
    ],
    "freezing 2 layer modules was refused at step 10 (compiling took 2 s)": [
        started(),
        plan("0.5:2"),
        events.DepthRefused(step=10, asked=2, reason="compiling took 2 s"),
    ],
    "step 10: the plan is '0.5:1 epoch 3:2 0.7:b'": [
        started(config=Config().to_dict()),
        plan("0.5:1 epoch 3:2 0.7:b"),
        interval(10),
    ],
    "the model is trained from scratch": [started(), plan("", "the model is trained from scratch"), interval(10)],
    "2 readings, at most 4 of them stationary in a row": [started(), reading(20), reading(30, stationary=4)],
}


@pytest.mark.parametrize(("steps", "is_told"), [(100, False), (99, False), (60, True)])
def test_a_run_much_shorter_than_total_steps_asks_whether_they_were_right(tmp_path, steps, is_told):
    made = report(write(tmp_path, [started(total_steps=100), interval(10), closed(steps)]))
    assert (f"ended after {steps} of the 100 steps of total_steps" in str(made)) == is_told


@pytest.mark.parametrize("why", WHY)
def test_a_run_that_never_froze_says_why(tmp_path, why):
    made = report(write(tmp_path, WHY[why]))
    assert why in str(made)
    assert why in "".join(page_of(made).words)
    assert made.summary.wall.saved_s is None or made.summary.wall.saved_s <= 0


def test_the_page_is_well_formed_and_needs_nothing_else(tmp_path):
    made = report(write(tmp_path, run_of_75_steps()))
    text = made.path.read_text(encoding="utf-8")
    page = Page(text)
    assert made.path == tmp_path / "report.html"
    assert page.tags.count("img") == text.count(' alt="') == 3
    assert all(reference.startswith("data:image/svg+xml;base64,") for reference in page.references)
    assert len(page.ids) == len(set(page.ids))
    assert "http:" not in text and "https:" not in text and "script" not in page.tags
    assert set(SECTIONS) <= set(page.ids)
    assert len(text) < 150_000


def test_hostile_names_stay_text(tmp_path):
    hostile = ('<script>alert("x")</script>', "$\\frac{&'", "\x1b[31m[red]\ud800 模块")
    course = [
        started(names=hostile, environment={"<b>": "</table>"}, rule="<!-- -->"),
        interval(10),
        stage(10),
        interval(20),
        reading(20, name=hostile[0]),
        frozen(20, 0, 0.1, name=hostile[0]),
        interval(30, frozen=1),
        reading(30, 1, name=hostile[1]),
        frozen(30, 1, 0.4, name=hostile[1]),
        events.MetricLogged(step=30, values=dict.fromkeys(hostile, 0.5)),
        events.Declined(step=30, what='"><img src=x>', reason="</section>"),
        events.FaultCaught(step=30, where=hostile[2], error="</details>", count=1),
    ]
    made = report(write(tmp_path, course))
    page = page_of(made)
    assert "script" not in page.tags and all(reference.startswith("data:") for reference in page.references)
    assert hostile[0] in "".join(page.words)
    assert "[red]" in str(made) and "\x1b" not in str(made)


def test_values_that_are_not_finite_leave_gaps(tmp_path):
    course = [
        started(),
        interval(10, loss=math.inf, rate=math.nan),
        interval(20, loss=None),
        stage(20),
        reading(20, value=math.nan),
        reading(30, value=0.0),
        reading(40, value=0.02),
        events.MetricLogged(step=40, values={"accuracy": 0.7}),
        events.MetricLogged(step=50, values={"accuracy": math.nan, "other": math.nan}),
        closed(50),
    ]
    made = report(write(tmp_path, course))
    assert math.isnan(made.summary.metrics[0].values[-1]) and "nan" in str(made)
    page_of(made)


def used(step, generation, hits, misses):
    return events.CacheUsed(
        step=step, boundary="stem", generation=generation, hits=hits, misses=misses, repeats=hits, batches=1,
        size_bytes=0, checks=0, largest_error=0.0, damaged=0,
    )  # fmt: skip


def test_the_share_of_samples_from_the_cache_is_told_where_there_was_one(tmp_path):
    course = [started(), interval(10), used(30, 1, 10, 0), used(50, 1, 750, 150), used(60, 2, 0, 100), closed(60)]
    assert "750 of 1,000 samples served (75.0 %)" in str(report(write(tmp_path / "cached", course)))
    assert "samples served" not in str(report(write(tmp_path / "plain", run_of_75_steps())))
