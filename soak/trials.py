"""One trial: a training under egeria, with its fault, and all that must hold of it."""

import copy
import dataclasses
import io
import math
import os
import random
import resource
import signal
import statistics
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from laws.support import differences, outside
from ranks import run_ranks
from strays import nothing_left_behind
from test_interrupts import Interrupter
from torch import distributed

import egeria
from egeria import events
from egeria.policy import Plan
from egeria.report import Report, Summary
from soak.by_hand import ByHand
from soak.cases import Case
from soak.training import Attached, Boom, Course, Pilot, Training, damage_file

LONGEST_S = 120
"""After which a trial counts as hung."""


def check(case: Case) -> None:
    """Make the trial of a case; an AssertionError says what did not hold."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder, _not_for_ever():
            if case.ranks > 1:
                wrong = [line for found in run_ranks(_try_on_rank, case, folder) for line in found]
            else:
                wrong = _try_cleanly(case, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert wrong == [], "\n".join(wrong[:12])


def _try_cleanly(case: Case, folder: str) -> list[str]:
    """Return what was wrong; raise if a process, a thread or memory is left behind."""
    with nothing_left_behind():
        if case.framework:
            from soak.frameworks import try_in_framework  # noqa: PLC0415  (seconds to import)

            wrong = try_in_framework(case, Path(folder))
        else:
            wrong = try_out(case, Path(folder), distributed.get_rank() if case.ranks > 1 else 0)
    return wrong


def _try_on_rank(case: Case, folder: str) -> list[str]:
    warnings.simplefilter("ignore")  # the process ends that behind the job
    return [f"rank {distributed.get_rank()}: {line}" for line in _try_cleanly(case, folder)]


@contextmanager
def _not_for_ever() -> Iterator[None]:
    """Raise where the block takes too long."""

    def ring(*_: object) -> None:
        raise AssertionError(f"it hangs, {LONGEST_S} s so far:\n{''.join(traceback.format_stack()[-12:])}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def try_out(case: Case, folder: Path, rank: int = 0) -> list[str]:
    """Return what was wrong with a training."""
    ours, pilot = _train(case, folder, rank)
    wrong = journal_wrong(case, ours, pilot) if rank == 0 else []
    wrong += [f"still open: {name}" for name in pilot.still_open]
    if pilot.torn:
        plain = Training(case, Pilot(), rank)
        return wrong + [f"left behind: {name}" for name in _left(plain, ours) if name.startswith(("modes", "hooks"))]
    by_hand = Training(case, ByHand(pilot.course), rank)
    _finish(by_hand, case.steps if case.fault == "exception" else ours.end)
    wrong += compared("by hand", by_hand, ours)
    wrong += [f"left behind: {name}" for name in _left(by_hand, ours)]
    if case.fault in ("resume", "kill"):
        other = dataclasses.replace(case, fault="")
        whole = Attached(other, folder / "whole")
        training = Training(other, whole, rank)
        _finish(training, case.steps)
        wrong += compared("uninterrupted", training, ours)
        courses = [dataclasses.astuple(each.course)[1:] for each in (whole, pilot)]
        wrong += [f"decided {courses[1]}, uninterrupted {courses[0]}"] if courses[0] != courses[1] else []
    return wrong


def compared(what: str, first: Any, second: Any) -> list[str]:
    """Return what is not the same in two trainings."""
    wrong = [f"{what}: {name}" for name in sorted(differences(first.everything(), second.everything()))]
    pairs = zip(first.trace, second.trace, strict=False)
    odd = next((f"{what}: {a} is not {b}" for a, b in pairs if a != b), "")
    return wrong + ([odd] if odd else [])


def _left(first: Training, second: Training) -> list[str]:
    """Return in what two trainings differ that is no number: needs of gradients, modes, hooks, attributes."""
    found = list[str]()
    for optimizers in zip(first.optimizers, second.optimizers, strict=True):
        pair = zip((first.model, second.model), optimizers, strict=True)
        views = [outside(SimpleNamespace(model=model, optimizer=optimizer)) for model, optimizer in pair]
        found += differences(*({**view, "groups": None} for view in views))
    return sorted(found)


# --- the training of a case, with its fault ----------------------------------------------------------------------------


def _train(case: Case, folder: Path, rank: int) -> tuple[Any, Attached]:
    """Train to the end under egeria."""
    if case.fault == "kill":
        return _resume(case, folder, rank, _killed(case, folder))
    pilot = Attached(case, folder / "run", tracer=Interrupter(case.line) if case.fault == "interrupt" else None)
    training: Any = Training(case, pilot, rank)
    if case.fault == "resume":
        training.run(case.saved)
        checkpoint = _checkpoint(training, pilot)
        training.run(case.at)
        pilot.close()
        return _resume(case, folder, rank, checkpoint)
    _finish(training, case.at if case.fault == "break" else case.steps)
    return training, pilot


def _finish(training: Any, end: int) -> None:
    """Train to the end of a run, close it, and train on without."""
    try:
        training.run(end)
    except (Boom, KeyboardInterrupt):
        training.is_over = True
    training.end = training.step
    training.pilot.close()
    training.run(training.step + training.case.after)


def _checkpoint(training: Training, pilot: Attached) -> bytes:
    saved = {"training": training.save(), "run": pilot.run.state_dict(), "course": dataclasses.asdict(pilot.course)}
    torch.save(saved, buffer := io.BytesIO())
    return buffer.getvalue()


def _killed(case: Case, folder: Path) -> bytes:
    """Train in another process, which is killed at a line of ours; return the checkpoint that it has written."""
    path, told = folder / "checkpoint", folder / "told"
    if (child := os.fork()) == 0:
        try:
            signal.alarm(LONGEST_S // 2)
            pilot = Attached(case, folder / "run", tracer=Killer(case.line))
            training = Training(case, pilot)
            training.run(case.saved)
            path.write_bytes(_checkpoint(training, pilot))
            training.run(case.steps)
        except BaseException:
            told.write_text(traceback.format_exc())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert not told.exists(), told.read_text()
    return path.read_bytes()


class Killer(Interrupter):
    """Ends the process at a line of the library."""

    def _look(self, frame: Any, event: str, argument: Any) -> Any:
        try:
            return super()._look(frame, event, argument)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGKILL)


def _resume(case: Case, folder: Path, rank: int, checkpoint: bytes) -> tuple[Any, Attached]:
    """Attach anew, in the same directory or another one, and go on from a checkpoint."""
    saved = torch.load(io.BytesIO(checkpoint), weights_only=True)
    directory = folder / ("run" if case.goes_on else "another")
    if case.damage % 3 == 1 and case.ranks == 1:
        damage_file(folder / "run" / "journal.jsonl", case.damage)

    def anew() -> tuple[Any, Attached]:
        kept = copy.deepcopy(saved["course"])
        times = {name: {k: v for k, v in kept[name].items() if k < case.saved} for name in ("starts", "updates", "ends")}
        pilot = Attached(case, directory, Course(kept["modules"], **times))
        training = Training(case, pilot, rank)
        training.load(saved["training"])
        return training, pilot

    training, pilot = anew()
    if case.damage % 3 == 2:
        before = training.everything(), [outside(SimpleNamespace(model=training.model, optimizer=training.optimizers[0]))]
        try:
            pilot.run.load_state_dict(_damaged(saved["run"], case.damage))
        except egeria.StateError:
            now = training.everything(), [outside(SimpleNamespace(model=training.model, optimizer=training.optimizers[0]))]
            assert differences(before[0], now[0]) == [] and before[1] == now[1], "a damaged state has changed something"
        else:
            pilot.close()
            training, pilot = anew()
    pilot.run.load_state_dict(saved["run"])
    pilot.told()
    _finish(training, case.steps)
    return training, pilot


def _damaged(state: Any, number: int) -> Any:
    """Return a copy of a state with one entry replaced or removed."""
    draw, whole = random.Random(number), copy.deepcopy(state)
    table = whole
    while True:
        key = draw.choice(list(table) if isinstance(table, dict) else range(len(table)))
        if not (isinstance(table[key], (dict, list)) and table[key] and draw.random() < 0.8):
            break
        table = table[key]
    if draw.random() < 0.4:
        del table[key]
    else:
        table[key] = draw.choice([None, -1, "x", math.nan, [], {}, 10**9])
    return whole


# --- what a journal and a report must say ------------------------------------------------------------------------------


def journal_wrong(case: Case, training: Any, pilot: Attached) -> list[str]:
    """Return what is wrong with the journal and the report of a closed run."""
    path = pilot.directory / "journal.jsonl"
    is_damaged = case.fault in ("journal", "disk") or (case.fault in ("resume", "kill") and case.damage % 3 == 1)
    if case.fault == "journal":
        damage_file(path, case.damage)
    try:
        made = report(pilot.directory, draws=case.seed % 10 == 9)
        assert str(made)
    except egeria.JournalError as error:
        return [] if is_damaged and path.exists() else [f"the report: {error}"]
    if is_damaged or pilot.torn:
        return []
    summary, ends = made.summary, pilot.course.ends
    faults = [f"{e.where}: {e.error}" for e in summary.of(events.FaultCaught) if "Boom" not in e.error]
    wrong = [f"fault in {fault}" for fault in faults]
    ends_now = [event.reason for event in summary.of(events.Declined) if event.what == "freezing"]
    wrong += [f"freezing ended: {reason}" for reason in ends_now if not _is_expected(case, reason)]
    if summary.num_damaged > (case.fault == "kill"):
        wrong.append(f"{summary.num_damaged} lines of the journal are damaged")
    if case.fault == "interrupt":
        return wrong
    told = summary.step, summary.frozen, summary.closed
    if told != (expected := (training.end, ends.get(training.end - 1, 0), True)):
        wrong.append(f"the report says {told} instead of {expected}")
    return wrong + _intervals_wrong(case, training, pilot, summary) + _decisions_wrong(case, pilot, summary)


def _is_expected(case: Case, reason: str) -> bool:
    """Return whether freezing may end for this reason in a case."""
    if "were changed by the training loop" in reason:
        return bool(case.switches) or case.fault == "moved"
    if "before the state was saved" in reason:
        return case.fault in ("resume", "kill")
    if "made no step" in reason:
        return case.fault in ("break", "exception", "interrupt") or bool(case.switches)
    fits = {"Boom": "own", "at least two layers": "remembering", "fewer than two layer modules": "drawn"}
    return any(text in reason and value in (case.policy, case.model) for text, value in fits.items())


def report(directory: Path, *, draws: bool) -> Any:
    """Return the report on a run; without its page, which takes a second to draw, unless that is asked for."""
    if draws:
        return egeria.report(directory)
    journal = egeria.read_journal(directory)
    summary = Summary.from_events(journal, directory, num_damaged=journal.num_damaged)
    return Report(summary=summary, path=None, message="")


def _intervals_wrong(case: Case, training: Any, pilot: Attached, summary: Any) -> list[str]:
    wrong, found = list[str](), summary.of(events.IntervalMeasured)
    begin = found[0].step - found[0].num_steps if found else 0
    for event in found:
        # With two optimizers the first depth is set as the first step ends, and its interval is booked at that depth.
        is_odd = event.frozen != pilot.course.updates[event.step - 1] and not (case.optimizer == "two" and not begin)
        if event.step - event.num_steps != begin or is_odd:
            wrong.append(f"wrong in {event}")
        losses = [loss for loss in training.means[begin : event.step] if math.isfinite(loss)]
        mean, begin = statistics.fmean(losses) if losses else None, event.step
        if case.ranks == 1 and case.policy != "egeria" and event.loss != mean:
            if mean is None or event.loss is None or not math.isclose(event.loss, mean, rel_tol=1e-6):
                wrong.append(f"the mean loss is {mean}, not as in {event}")
    return wrong


def _decisions_wrong(case: Case, pilot: Attached, summary: Any) -> list[str]:
    """Return where the frozen depth is not what the policy has asked for last."""
    ends, is_ended = pilot.course.ends, any(event.what == "freezing" for event in summary.of(events.Declined))
    if is_ended or summary.of(events.DepthRefused) or not ends or not summary.modules:
        return []
    if case.policy == "own" and pilot.given and (found := ends[max(ends)]) != pilot.given[-1]:
        return [f"the policy asked for {pilot.given[-1]}, {found} are frozen"]
    if case.policy != "plan" or case.nan_at >= 0:  # a loss that is not finite thaws everything
        return []
    plan = Plan.parse(case.plan, summary.modules, case.steps)
    found = [ends[step] for step in sorted(ends)]
    wanted = [plan.depth_at(step + 1) for step in sorted(ends)]
    if case.optimizer != "two":  # of which some have made their first update before the others have gradients
        found, wanted = [pilot.course.updates[0], *found], [plan.depth_at(0), *wanted]
    return [] if found == wanted else [f"the plan {case.plan} wants {wanted}, found {found}"]
