"""The reference model: which number format it has, new weights, and its state."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from egeria.errors import ReferenceModelError, brief
from egeria.events import RungTaken
from egeria.model.hooks import copies_of_computed, without_watchers
from egeria.model.passes import Batch, restore_table
from egeria.plasticity import sp_loss
from egeria.random_state import kept_random_state
from egeria.reference.formats import Format, Ranges, build, with_autocast

FIDELITY_SHARE = 0.1  # ten times under the signal
# Stands for the plasticity before any is known: the smallest first readings of record 0004.
_EARLY_PLASTICITY = 1e-4
_MOST_ROWS = 32
_EVALUATIONS = 10  # that share a build: those between two refreshes, `W` of the paper
# By tap, the activation in float32 and the plasticity.
Expected = Mapping[str, tuple[Tensor, float]]


class Reference:
    """A snapshot of the model in training, in the fastest number format that is exact enough.

    At the first refresh with a batch 'auto' builds and times every format once on it; a given one
    is built whatever its speed. A format is exact enough while its SP loss to the float32 snapshot
    is at most `fidelity_share` of the plasticity, which each refresh checks. Where it fails, then
    or later, float32 takes its place for good, the snapshot itself.

    Args:
        taps: submodules whose activations will be asked for.
        precision: 'auto', 'int8', 'bf16' or 'fp32'.
        device: "cpu", or a CUDA device, where bf16 takes the place of int8.
        fidelity_share: largest error of a format as a share of the plasticity.
    """

    def __init__(
        self,
        taps: Sequence[str],
        *,
        precision: str = "auto",
        device: str = "cpu",
        fidelity_share: float = FIDELITY_SHARE,
    ) -> None:
        self._taps, self._device = tuple(taps), torch.device(device)
        self._fidelity_share = fidelity_share
        names = ["int8", "bf16", "fp32"] if precision == "auto" else [precision, "fp32"]
        if self._device.type != "cpu":
            names = [name.replace("int8", "bf16") for name in names]
        # The formats that may be taken; the one that was, alone, once it was chosen.
        self._names, self._is_timed = list(dict.fromkeys(names)), precision == "auto"
        self._snapshot: nn.Module | None = None
        self._format: Format | None = None
        self._events: list[RungTaken] = []

    @property
    def precision(self) -> str:
        """The format in use: 'int8', 'bf16' or 'fp32'; '' before the first refresh."""
        return "" if self._format is None else self._format.name

    @property
    def builder(self) -> str:
        """How it was made, for the journal."""
        return "" if self._format is None else self._format.builder

    def take_events(self) -> list[RungTaken]:
        """Return the changes of format since the last call."""
        events, self._events = self._events, []
        return events

    def refresh(
        self,
        model: nn.Module,
        batch: Batch | None = None,
        plasticity: Mapping[str, float] | None = None,
    ) -> None:
        """Take over the weights of the model in training as they are now.

        Args:
            model: the model in training.
            batch: the newest training batch, to find ranges on and to compare. The format is
                float32 until there is one that the snapshot can run.
            plasticity: means of the newest readings, by tap.

        Raises:
            ReferenceModelError: the model cannot be copied.
        """
        self._snapshot, known = take_snapshot(model, self._device), plasticity or {}
        is_chosen, exact = len(self._names) == 1, self._build("fp32")
        compared = [] if self._names == ["fp32"] else self._taps
        taps = [tap for tap in compared if tap in known or not is_chosen]
        found, reason = dict[str, Tensor](), "there is no batch to try other formats on"
        if batch is not None:
            batch = self._here(batch).first_rows(_MOST_ROWS)
            try:
                found = exact.read(taps, with_autocast(batch, False)) if taps else {}
            except Exception as error:
                batch, reason = None, f"the batch cannot be run in float32: {brief(error)}"
        if batch is None and not is_chosen:
            self._take(exact, reason)
            return
        expected = {tap: (found[tap], known.get(tap, _EARLY_PLASTICITY)) for tap in found}
        self._choose(exact, batch, expected)

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the output [B, ...] of submodule `tap` in float32, None if it gives no tensor.

        Raises:
            ReferenceModelError: there was no refresh yet.
        """
        if self._format is None:
            raise ReferenceModelError(
                "A reference is refreshed before it is asked, found none. Call `refresh` first."
            )
        batch = self._here(batch)
        try:
            return self._format.read([tap], batch).get(tap)
        except Exception as error:
            exact = self._build("fp32")
            found = exact.read([tap], batch)  # what fails here too is no fault of the format
            self._settle(exact, f"{self.precision} failed at {tap}: {brief(error)}")
            return found.get(tap)

    def state_dict(self) -> dict[str, Any]:
        """Return what it takes to give the same activations; empty before the first refresh."""
        if self._snapshot is None or self._format is None:
            return {}
        return {
            "tensors": [tensor.detach().clone() for tensor in _tensors_of(self._snapshot)],
            "names": list(self._names),
            "precision": self.precision,
            "ranges": self._format.ranges,
        }

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Continue from a saved state; activations are the same to the bit.

        Args:
            state: of a reference of this model.
            model: gives the architecture.
        """
        self._format = self._snapshot = None
        if not state:
            return
        self._snapshot = take_snapshot(model, self._device)
        with torch.no_grad():
            for tensor, saved in zip(_tensors_of(self._snapshot), state["tensors"], strict=True):
                tensor.copy_(saved)
        self._names, name = list(state["names"]), state["precision"]
        try:
            self._format = self._build(name, None, state["ranges"])
        except Exception as error:  # another machine, or another torch
            self._settle(self._build("fp32"), f"{name} cannot go on here: {brief(error)}")

    def _choose(self, exact: Format, batch: Batch | None, expected: Expected) -> None:
        """Take the fastest of the formats that may be taken and work; without times the first.

        Args:
            exact: the snapshot in float32.
            batch: to try them on; None where one was chosen before.
            expected: what they are to give; empty where nothing is known.
        """
        is_timed, works, reasons = self._is_timed and len(self._names) > 1, [], list[str]()
        for name in self._names:
            try:
                seconds, made = self._try(name, batch, expected)
            except Exception as error:
                reasons.append(f"{name} is not used: {brief(error)}")
                continue
            works.append((seconds, made))
            if is_timed:
                reasons.append(f"{name} takes {1000 * seconds:.1f} ms an evaluation")
        if is_timed:
            works.sort(key=itemgetter(0))
        elif not reasons:
            reasons.append(f"the setting is {self._names[0]!r}")
        self._settle(works[0][1] if works else exact, "; ".join(reasons))

    def _try(self, name: str, batch: Batch | None, expected: Expected) -> tuple[float, Format]:
        """Return the seconds that an evaluation takes, and the format; raise if it is no good."""
        begin = time.perf_counter()
        made = self._build(name, batch)
        build_s = time.perf_counter() - begin
        if batch is None:
            return 0.0, made
        found = made.read(list(expected), batch) if expected and name != "fp32" else {}
        for tap, activation in found.items():
            exact, plasticity = expected[tap]
            error = float(sp_loss(exact, activation))
            if not error <= self._fidelity_share * plasticity:
                raise ValueError(
                    f"its SP loss at {tap} is {error:.1e}, where plasticity is {plasticity:.1e}"
                )
        if len(self._names) == 1:
            return 0.0, made
        begin = time.perf_counter()
        for activation in made.read(self._taps, batch).values():
            activation.cpu()  # waits for a GPU
        return time.perf_counter() - begin + build_s / _EVALUATIONS, made

    def _build(self, name: str, batch: Batch | None = None, ranges: Ranges | None = None) -> Format:
        assert self._snapshot is not None
        ranges = ranges or (self._format.ranges if self._format else {})
        return build(name, self._snapshot, self._taps, batch, ranges)

    def _take(self, made: Format, reason: str) -> None:
        before, self._format = self.precision, made
        if made.name != before:
            self._events.append(RungTaken(step=0, before=before, after=made.name, reason=reason))

    def _settle(self, made: Format, reason: str) -> None:
        """Take a format for good."""
        self._names = [made.name]
        self._take(made, reason)

    def _here(self, batch: Batch) -> Batch:
        """Return the batch on our device, where autocast for another type means nothing."""
        moved, kind = batch.on(str(self._device)), self._device.type
        if batch.autocast.device_type == kind:
            return moved
        return replace(moved, autocast=replace(batch.autocast, device_type=kind, enabled=False))


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def take_snapshot(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of the model as it is now, in eval mode, without gradients and hooks.

    Its tensors are made on `device` at once: the model's own device may have no room for them.

    Raises:
        ReferenceModelError: the model cannot be copied, or a copy is not apart from it.
    """
    memo = copies_of_computed(model)
    for tensor in _tensors_of(model):
        if type(tensor) in (Tensor, nn.Parameter):
            copied = tensor.detach().to(device, copy=True)
            memo[id(tensor)] = copied if type(tensor) is Tensor else nn.Parameter(copied, False)
    try:
        with kept_random_state(model):  # a `__deepcopy__` of the model's own may rebuild it
            snapshot = copy.deepcopy(model, memo)
    except Exception as error:
        raise ReferenceModelError(
            f"The reference is a deep copy of the model, which {type(model).__name__} does not "
            f"allow: {error}. Give it a `__deepcopy__`, or keep what cannot be copied out of its "
            "attributes."
        ) from error
    before = {id(entry) for entry in (*model.modules(), *_tensors_of(model))}
    if any(id(entry) in before for entry in (*snapshot.modules(), *_tensors_of(snapshot))):
        raise ReferenceModelError(
            f"The reference is a deep copy of the model, and the `__deepcopy__` of "
            f"{type(model).__name__} gives one that shares modules or weights with the model. "
            "Let it copy all of them."
        )
    for module in snapshot.modules():
        restore_table(vars(module), without_watchers(vars(module)))
        module.training = False  # a `train` of the model's own may do more
    return snapshot.requires_grad_(False).to(device)
