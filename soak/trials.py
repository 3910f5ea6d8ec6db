"""One trial: a training under egeria, with its fault, and all that must hold of it."""

import contextlib
import copy
import dataclasses
import io
import logging
import math
import os
import random
import resource
import signal
import statistics
import tempfile
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from soak.cases import Case
from soak.training import Attached, ByHand, Training, as_bytes, damage_file
from torch import distributed

import egeria
from egeria import events
from egeria.distributed.ranks import exchange
from egeria.policy import Plan
from egeria.report import Summary
from laws.support import decisions, differences, outside
from ranks import run_ranks
from strays import Interrupter, nothing_left_behind

LONGEST_S = 200  # after which a trial counts as hung


def check(case: Case) -> None:
    """Make the trial of a case; an AssertionError says what did not hold."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGALRM, _ring)
    signal.alarm(LONGEST_S)
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            found = run_ranks(_try_cleanly, case, folder) if case.ranks > 1 else [_try_cleanly(case, folder)]
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    wrong = [f"{line} (rank {rank} of {case.ranks})" for rank, own in enumerate(found) for line in own]
    assert wrong == [], "\n".join(wrong[:12])


def _ring(*_: object) -> None:
    raise AssertionError(f"it hangs, {LONGEST_S} s so far")


def _try_cleanly(case: Case, folder: str) -> list[str]:
    """Return what was wrong; raise if a process, a thread or memory is left behind."""
    warnings.simplefilter("ignore")
    exchange(None)  # for which a job makes a process group, once
    with nothing_left_behind(), contextlib.redirect_stdout(None):
        return _try_in_framework(case, Path(folder)) if case.framework else _try_out(case, Path(folder))


def _try_out(case: Case, folder: Path) -> list[str]:
    rank = distributed.get_rank() if case.ranks > 1 else 0
    ours, pilot = _train(case, folder, rank)
    wrong = [f"still open: {name}" for name in pilot.still_open] + ([] if rank else _told_wrong(case, ours, pilot))
    if pilot.is_torn:
        (plain := Training(case, ByHand(), rank)).pilot.close()
        compared = ("modes", "hooks") if case.switches else ("modes", "hooks", "needs")
        return wrong + [f"left behind: {name}" for name in _left(plain, ours) if name.startswith(compared)]
    by_hand = Training(case, ByHand(pilot.modules, pilot.course), rank)
    by_hand.finish(case.steps if case.fault == "exception" else ours.end)
    wrong += [f"by hand: {name}" for name in differences(by_hand.everything(), ours.everything())]
    wrong += [f"left behind: {name}" for name in _left(by_hand, ours)]
    if case.fault in ("resume", "kill"):
        whole = Attached(dataclasses.replace(case, fault=""), folder / "whole")
        training = Training(whole.case, whole, rank)
        training.finish(case.steps)
        wrong += [f"uninterrupted: {name}" for name in differences(training.everything(), ours.everything())]
        wrong += [f"uninterrupted: frozen at {moment}" for moment in differences(whole.course, pilot.course)]
    return wrong


def _left(first: Training, second: Training) -> list[str]:
    found = list[str]()
    for number in range(len(first.optimizers)):
        views = [outside(SimpleNamespace(model=t.model, optimizer=t.optimizers[number])) for t in (first, second)]
        found += differences(*({**view, "groups": None} for view in views))
    return sorted(found)


def _try_in_framework(case: Case, folder: Path) -> list[str]:
    """Train as a test of the frameworks does, and again by hand, as the journal says."""
    import test_plans_under_frameworks as tests  # noqa: PLC0415  (seconds to import)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pilot = Attached(case, folder / "run")
    given, accumulation = pilot.settings(), case.accumulation
    groups = {**given.pop("config"), "modules": {"pattern": tests.PATTERN}}
    names = {"policy": "name", "plan": "plan"}
    groups["policy"] = {**groups.get("policy", {}), **{names[key]: value for key, value in given.items()}}
    tests.CONFIG = groups

    def train(directory: Path, *, is_ours: bool) -> Any:
        torch.manual_seed(case.seed)
        if case.framework == "accelerate":
            return tests.by_accelerate(directory, is_ours=is_ours, accumulation=accumulation)
        if case.framework == "transformers":
            ours = tests.egeria_transformers.EgeriaCallback(groups, directory=directory / "run")
            callback = ours if is_ours else tests.TrainerByHand()
            return tests.by_trainer(directory / "out", callback, gradient_accumulation_steps=accumulation)[0]
        ours = tests.egeria_lightning.EgeriaCallback(config=groups, directory=directory / "run")
        callback = ours if is_ours else tests.LightningByHand()
        return tests.by_lightning(directory, callback, accumulate_grad_batches=accumulation)[0]

    first = as_bytes(train(folder, is_ours=True))
    moves = decisions(folder / "run")
    tests.depth_at = lambda step, _: ([0] + [depth for at, depth in moves if at <= step])[-1]
    second = as_bytes(train(folder / "by hand", is_ours=False))
    faults = [event.error for event in egeria.read_journal(folder / "run").of(events.FaultCaught)]
    return differences(first, second) + [error for error in faults if "Boom" not in error]


def _train(case: Case, folder: Path, rank: int) -> tuple[Training, Attached]:
    if case.fault == "kill":
        return _resume(case, folder, rank, _killed(case, folder))
    pilot = Attached(case, folder / "run", Interrupter(case.line) if case.fault == "interrupt" else None)
    training = Training(case, pilot, rank)
    if case.fault == "resume":
        training.run(case.saved)
        checkpoint = _checkpoint(training, pilot)
        training.run(case.at)
        pilot.close()
        return _resume(case, folder, rank, checkpoint)
    training.finish(case.at if case.fault == "break" else case.steps)
    return training, pilot


def _checkpoint(training: Training, pilot: Attached) -> bytes:
    saved = {"training": training.save(), "run": pilot.run.state_dict(), "course": pilot.course}
    torch.save({**saved, "modules": pilot.modules}, buffer := io.BytesIO())
    return buffer.getvalue()


def _killed(case: Case, folder: Path) -> bytes:
    """Train in another process, which is killed at a line of ours; return the checkpoint that it has written."""
    path, told = folder / "checkpoint", folder / "told"
    if (child := os.fork()) == 0:
        try:
            pilot = Attached(case, folder / "run", Interrupter(case.line))
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


def _resume(case: Case, folder: Path, rank: int, checkpoint: bytes) -> tuple[Training, Attached]:
    saved = torch.load(io.BytesIO(checkpoint), weights_only=True)
    if case.damage % 3 == 1 and case.ranks == 1:
        damage_file(folder / "run" / "journal.jsonl", case.damage, first=30)  # else it is none of ours

    def anew() -> tuple[Training, Attached]:
        pilot = Attached(case, folder / ("run" if case.goes_on else "another"))
        pilot.modules, pilot.course = saved["modules"], dict(saved["course"])
        training = Training(case, pilot, rank)
        training.load(saved["training"])
        return training, pilot

    training, pilot = anew()
    if case.damage % 3 == 2:
        before = training.everything()
        try:
            pilot.run.load_state_dict(_damaged(saved["run"], case.damage))
        except egeria.StateError:
            assert differences(before, training.everything()) == [], "a damaged state has changed something"
        else:
            pilot.close()
            training, pilot = anew()
    pilot.run.load_state_dict(saved["run"])
    training.finish(case.steps)
    return training, pilot


def _damaged(state: Any, number: int) -> Any:
    draw, whole = random.Random(number), copy.deepcopy(state)
    table, key = whole, draw.choice(list(whole))
    while isinstance(table[key], dict) and table[key] and draw.random() < 0.8:
        table, key = table[key], draw.choice(list(table[key]))
    table[key] = draw.choice([None, -1, "x", math.nan, [], {}, 10**9])
    if draw.random() < 0.4:
        del table[key]
    return whole


def _told_wrong(case: Case, training: Training, pilot: Attached) -> list[str]:
    path, is_resumed = pilot.directory / "journal.jsonl", case.fault in ("resume", "kill")
    is_damaged = case.fault in ("journal", "disk") or (is_resumed and case.damage % 3 == 1)
    if case.fault == "journal":
        damage_file(path, case.damage)
    try:
        journal = egeria.read_journal(pilot.directory)
        summary = Summary.from_events(journal, pilot.directory)
        if case.seed % 10 == 9:  # drawing the pictures takes a second
            assert str(egeria.report(pilot.directory))
    except egeria.JournalError as error:
        return [] if is_damaged and path.exists() else [f"the report: {error}"]
    if is_damaged or pilot.is_torn:
        return []
    ended = [event.reason for event in summary.of(events.Declined) if event.what == "freezing"]
    wrong = ["moves are missing in the journal"] if pilot.is_odd else []
    wrong += [f"freezing ended: {reason}" for reason in ended if not _is_expected(case, reason)]
    wrong += [f"fault: {e.where}: {e.error}" for e in summary.of(events.FaultCaught) if "Boom" not in e.error]
    wrong += ["damaged lines in the journal"] if summary.num_damaged > (case.fault == "kill") else []
    told, depth = (summary.step, summary.frozen, summary.closed), pilot.course.get((training.end - 1, "end"), 0)
    if case.fault == "interrupt":  # a step may be missing
        return wrong
    wrong += [f"the report says {told} at step {training.end}"] if told != (training.end, depth, True) else []
    wrong += _intervals_wrong(case, training, pilot, summary)
    return wrong if ended or summary.of(events.DepthRefused) else wrong + _decisions_wrong(case, pilot, summary)


def _is_expected(case: Case, reason: str) -> bool:
    fits = [("were changed by the training loop", case.switches or case.fault == "moved")]
    fits += [("before the state was saved", case.fault in ("resume", "kill")), ("Boom", case.policy == "own")]
    fits += [("made no step", case.fault in ("break", "exception", "interrupt") or case.switches)]
    fits += [("the value is nan", case.nan_at >= 0)]
    fits += [("at least two layers", case.model == "remembering"), ("fewer than two layer", case.model == "drawn")]
    return any(text in reason and value for text, value in fits)


def _intervals_wrong(case: Case, training: Training, pilot: Attached, summary: Summary) -> list[str]:
    wrong, found = list[str](), summary.of(events.IntervalMeasured)
    begin = found[0].step - found[0].num_steps if found else 0
    for event in found:
        is_odd = event.frozen != pilot.course[event.step - 1, "update"]
        losses = [loss for loss in training.losses[begin : event.step] if math.isfinite(loss)]
        mean = statistics.fmean(losses) if losses and event.loss is not None else math.nan
        if case.ranks == 1 and case.policy != "egeria" and (losses or event.loss is not None):
            is_odd |= not math.isclose(event.loss or 0.0, mean, rel_tol=1e-6)
        wrong += [f"wrong in {event}, {mean}"] if is_odd or event.step - event.num_steps != begin else []
        begin = event.step
    return wrong


def _decisions_wrong(case: Case, pilot: Attached, summary: Summary) -> list[str]:
    ends = [depth for (_, moment), depth in sorted(pilot.course.items()) if moment == "end"]
    if case.policy == "own" and pilot.given and ends and ends[-1] != pilot.given[-1]:
        return [f"the policy asked for {pilot.given[-1]}, {ends[-1]} are frozen"]
    is_followed = case.policy == "plan" and case.nan_at < 0  # a loss that is not finite thaws everything
    if not (is_followed and summary.modules and ends):
        return []
    plan, total = Plan.parse(case.plan, summary.modules, case.steps), len(ends)
    if case.optimizer != "two":  # of which one has made its first update before the other has gradients
        ends.insert(0, pilot.course.get((0, "update"), plan.depth_at(0)))
    wanted = [min(plan.depth_at(step), summary.started.deepest_freeze) for step in range(total + 1)][-len(ends) :]
    return [] if ends == wanted else [f"the plan {case.plan} wants {wanted}, found {ends}"]
