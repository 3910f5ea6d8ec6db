"""Replaying the paper's policy: what recorded intervals and readings lead to now, against what was decided then."""

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.proving import RefusedError
from benchmarks.proving.comparing import archive
from benchmarks.proving.journal import FILE_NAME, Event, Journal, read_journal
from egeria.config import Config
from egeria.policy import Interval, Reading, find_rule
from egeria.policy.paper import EgeriaPolicy

SETTINGS = (
    "plasticity.window",
    "bootstrapping.change_threshold",
    "freezing.tolerance_share",
    "freezing.tolerance_readings",
    "unfreezing.drop_factor",
)
"""All that the rule decides by, as `group.key`."""
POLICY = "egeria"
ENDINGS = ("freezing", "freezing and thawing any further")
"""What a run declined that decides nothing any more."""
STAGE = "knowledge-guided"
Decision = tuple[int, str]
"""The step, and what was decided, as `PaperRule` says it."""


class PaperRule:
    """Decides by the losses, learning rates and readings of one run after the other.

    What it decides is given as text: 'knowledge-guided' (bootstrapping is over), 'freeze 0' (the first layer module),
    or 'thaw'. It is taken for done: what is decided next goes by it.

    Args:
        settings: by the names of `SETTINGS`; None and what is left out are the library's.
        trainable: for each layer module, whether it has anything to train.
        rule: name of the rule for thaws.
        total_steps: of the run; None where unknown.
        deepest_freeze: how many front layer modules may be frozen; None for all but the last.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        trainable: Sequence[bool],
        rule: str,
        total_steps: int | None,
        deepest_freeze: int | None = None,
    ) -> None:
        groups: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            group, _, key = name.partition(".")
            if value is not None:
                groups.setdefault(group, {})[key] = value
        config, last = Config.from_dict(groups), len(trainable) - 1
        self._policy = EgeriaPolicy(
            config,
            modules=tuple(map(str, range(len(trainable)))),
            trainable=tuple(trainable),
            deepest=last if deepest_freeze is None else min(deepest_freeze, last),
            total_steps=total_steps,
            lr_rule=find_rule(rule, config.unfreezing.drop_factor),
        )
        self.frozen = 0
        """How many front layer modules are to be frozen."""

    @property
    def monitored(self) -> int | None:
        """The layer module of which a reading is wanted; None for none."""
        return self._policy.wants.plasticity_of

    def end_interval(self, step: int, loss: float | None, learning_rate: float) -> list[str]:
        """Return what the rule decides at the end of an interval."""
        stage = self._policy.status.stage
        interval = Interval(step=step, frozen=self.frozen, num_steps=1, loss=loss, learning_rate=learning_rate)
        decided = self._ask(interval)
        return decided if self._policy.status.stage == stage else [self._policy.status.stage, *decided]

    def read(self, step: int, evaluation: int, module: int, value: float) -> list[str]:
        """Return what the rule decides by a reading of a layer module."""
        reading = Reading(evaluation=evaluation, module=module, value=value)
        return self._ask(Interval(step=step, frozen=self.frozen, readings=(reading,)))

    def _ask(self, interval: Interval) -> list[str]:
        decided, before = self._policy.observe(interval), self.frozen
        if decided is None:
            return []
        self.frozen = decided.frozen
        is_thaw = decided.frozen < before
        freezes = [f"freeze {module}" for module in range(0 if is_thaw else before, decided.frozen)]
        return ["thaw", *freezes] if is_thaw else freezes


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a run decided, and what the same evidence decides now."""

    recorded: list[Decision]
    replayed: list[Decision]

    @property
    def difference(self) -> tuple[Decision | None, Decision | None] | None:
        """The first decisions, recorded and replayed, that are not the same; None where all are."""
        pairs = itertools.zip_longest(self.recorded, self.replayed)
        return next((pair for pair in pairs if pair[0] != pair[1]), None)


def run_replay(options: argparse.Namespace, console: Console) -> int:
    """Replay the runs of the paper's policy below some directories; 1 where one would decide otherwise now."""
    num_differing = num_replayed = num_others = 0
    for given in options.directory:
        for name, journal in _journals(given):
            if not is_of_policy(journal):
                num_others += 1
                continue
            found = replay(journal)
            num_replayed += 1
            num_differing += found.difference is not None
            console.print(f"{name}: {describe(found)}", highlight=False, soft_wrap=True, markup=False)
    if not num_replayed:
        raise RefusedError(
            f"A replay needs runs of the policy {POLICY!r}, and there is none among {num_others} runs. Give the "
            f"directory of one, a folder of results, or a record."
        )
    console.print(
        f"{num_replayed - num_differing} of {num_replayed} runs decide alike; of other policies: {num_others}"
    )
    return 1 if num_differing else 0


def replay(journal: Journal) -> Replay:
    """Feed the losses, learning rates and readings of a journal to a fresh policy."""
    started, cut = journal.of("run_started")[0], journal.cut
    settings = {name: _setting(started, name) for name in SETTINGS}
    rule = PaperRule(
        settings,
        trainable=cut["trainable"],
        rule=started["rule"],
        total_steps=started["total_steps"],
        deepest_freeze=cut["deepest_freeze"],
    )
    recorded: list[Decision] = []
    replayed: list[Decision] = []
    before = asked = 0  # how many were frozen, and decisions there were, at the newest question
    for event in journal.events:
        step = event["step"]
        if event["event"] == "declined" and step > 0 and event["what"] in ENDINGS:
            # What the policy decided at this step, and the journal does not have, was refused.
            return Replay(recorded=recorded, replayed=[own for own in replayed if own[0] < step or own in recorded])
        if event["event"] == "depth_refused":
            replayed[asked:] = [own for own in replayed[asked:] if own[1] == STAGE]
            rule.frozen = before
            continue
        if event["event"] in ("interval", "plasticity"):
            before, asked = rule.frozen, len(replayed)
        if event["event"] == "interval":
            loss = None if event["loss"] is None else float(event["loss"])
            decided = rule.end_interval(step, loss, float(event["learning_rate"]))
        elif event["event"] == "plasticity" and event["module"] == rule.monitored:
            decided = rule.read(step, event["evaluation"], event["module"], float(event["value"]))
        else:
            recorded += ((step, text) for text in _recorded(event))
            continue
        replayed += ((step, text) for text in decided)
    return Replay(recorded=recorded, replayed=replayed)


def describe(found: Replay) -> str:
    """Say whether both decided alike, and where they first do not."""
    if found.difference is None:
        return f"equal, {len(found.recorded)} decisions"
    told = [f"{pair[1]} at step {pair[0]}" if pair else "nothing more" for pair in found.difference]
    return f"first difference: recorded is {told[0]}, replayed {told[1]}"


def is_of_policy(journal: Journal) -> bool:
    """Tell whether a run was under the paper's policy, from its beginning."""
    started = journal.of("run_started")
    return bool(started) and _setting(started[0], "policy.name") == POLICY


def _journals(given: Path) -> Iterator[tuple[str, Journal]]:
    """Yield the runs below a directory, or in an archive, with what they are called."""
    with archive.opened(given) as folder:
        for path in sorted(folder.rglob(FILE_NAME)):
            yield str(path.parent.relative_to(folder)), read_journal(path.parent)


def _recorded(event: Event) -> Iterator[str]:
    """Yield what an event says was decided just then."""
    if event["event"] in ("frozen", "freeze_waits") and event.get("decided_at") is None:
        yield f"freeze {event['module']}"
    elif event["event"] in ("stage", "thawed"):
        yield {"stage": STAGE, "thawed": "thaw"}[event["event"]]


def _setting(started: Event, name: str) -> object:
    """Return a setting of a run by `group.key`; None where the journal lacks it."""
    group, _, key = name.partition(".")
    return started["config"].get(group, {}).get(key)
