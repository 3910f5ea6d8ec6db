"""The reference model in the cheapest number format that works, with a fallback
to more exact ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from egeria.errors import ConfigError, ReferenceModelError, brief
from egeria.events import RungTaken
from egeria.layers.batch import Autocast, Batch
from egeria.random_state import kept_random_state
from egeria.reference.formats import FORMATS, FormatInputs, NumberFormat
from egeria.reference.machine import FormatName, Machine
from egeria.reference.quantization import silence
from egeria.reference.snapshot import (
    Survey,
    check_readings,
    in_fp32,
    refresh_snapshot,
    run_to,
    survey_model,
    tensors_of,
)

_PRECISIONS = ("auto", "int8", "int8-dynamic", "bf16", "fp32")
_MOST_ROWS = 32
_SAVED = (type(None), bool, int, float, str, bytes, Tensor)
"""What `torch.load` reads back by default, in lists, tuples and dictionaries."""


class QuantizedReference:
    """A snapshot of the model in a cheap number format, with a fallback order of ever more exact
    ones.

    The model, the batch and the machine alone decide, never a clock, so that every process chooses
    the same. A format that does not work is passed over; at the end stands float32.

    Args:
        taps: names of the submodules whose activations will be asked for.
        precision: the first format: "auto" for the fastest on this machine, "int8" (static for
            convolutional nets, dynamic for transformers), "int8-dynamic", "bf16" or "fp32".
        machine: what the CPU can do; None asks it.
        device: "cpu", or a CUDA device for a copy in bf16 there.

    Raises:
        ConfigError: there is no such precision.
    """

    def __init__(
        self,
        taps: Sequence[str],
        *,
        precision: str = "auto",
        machine: Machine | None = None,
        device: str = "cpu",
    ) -> None:
        if precision not in _PRECISIONS:
            raise ConfigError(
                f"precision must be one of {_PRECISIONS}, found {precision!r}. Choose one of them."
            )
        self.reason = ""
        self.is_stale = False
        """Whether ranges of activations are older than the weights."""
        self._taps, self._precision = tuple(taps), precision
        self._machine, self._device = machine or Machine.here(), torch.device(device)
        self._snapshot: nn.Module | None = None
        self._formats: tuple[FormatName, ...] = ()
        self._format: NumberFormat | None = None
        self._batch: Batch | None = None
        self._waits_for_batch = False
        self._changes: list[RungTaken] = []

    @property
    def number_format(self) -> FormatName | Literal[""]:
        """The format in use, "" before the first refresh."""
        return "" if self._format is None else self._format.name

    @property
    def builder(self) -> str:
        """How it is made, for the journal."""
        return "" if self._format is None else self._format.detail

    def take_changes(self) -> list[RungTaken]:
        """Return the changes of format since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def refresh(self, model: nn.Module, batch: Batch | None = None) -> None:
        """Take over the weights of the training model as they are now.

        Args:
            model: the training model.
            batch: the newest training batch, to try formats and find ranges on. Without one at the
                first refresh it is float32 until one comes.

        Raises:
            ReferenceModelError: the model cannot be copied.
        """
        before, self._snapshot = (
            self._snapshot,
            refresh_snapshot(self._snapshot, model, self._device),
        )
        if batch is not None:
            self._batch = self._on_device(batch).first_rows(_MOST_ROWS)
        with self._aside():
            if self._format is None or (self._waits_for_batch and batch is not None):
                self._choose()
            elif self._snapshot is not before:
                self._build(self._format.name, "the shapes of the weights have changed")
            else:
                try:
                    self._format.update()
                    self.is_stale = self._format.name == "int8-static"
                except Exception as error:
                    self._build(self._format.name, f"taking over weights failed: {brief(error)}")

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the output of submodule `tap` for the batch [B, ...] in float32, None if it gives
        no tensor.

        Args:
            tap: one of those named beforehand.
            batch: what to run the model on.

        Raises:
            ReferenceModelError: there was no refresh yet.
        """
        built = self._require_format()
        if tap not in self._taps:
            raise ReferenceModelError(
                f"A reference is built for the taps {list(self._taps)}, found {tap!r}. Name it "
                "when building one."
            )
        batch = self._on_device(batch)
        try:
            activation = built.activation(tap, batch)
            return None if activation is None else activation.float()
        except Exception as error:
            self._exact(tap, batch)  # what fails in float32 too is no fault of the format
            if not self.escalate(f"{built.name} failed at {tap}: {brief(error)}"):
                raise
            return self.activation(tap, batch)

    def error(self, tap: str, metric: Callable[[Tensor, Tensor], Tensor]) -> float | None:
        """Return how far this format is from the float32 snapshot, on the newest batch kept for
        calibration.

        Args:
            tap: where to compare.
            metric: of the exact and this format's activation, [B, ...] each.

        Returns:
            0 in float32; None without a batch, or without a tensor at the tap.
        """
        if self._require_format().name == "fp32":
            return 0.0
        if self._batch is None:
            return None
        exact, found = self._exact(tap, self._batch), self.activation(tap, self._batch)
        if self.number_format == "fp32":  # the format could not run this batch
            return 0.0
        return None if exact is None or found is None else float(metric(exact, found))

    def recalibrate(self) -> bool:
        """Build this format again, with fresh ranges of activations; False if
        they are not stale.
        """
        if not self.is_stale:
            return False
        with self._aside():
            self._build(self._require_format().name, "its ranges were out of date")
        return True

    def escalate(self, reason: str) -> bool:
        """Change to the next, more exact format; False if this is the last."""
        index = self._formats.index(self._require_format().name) + 1
        if index == len(self._formats):
            return False
        with self._aside():
            self._build(self._formats[index], reason)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what it takes to continue, empty before the first refresh.

        A batch with objects of the loop's own is left out, and formats are tried anew with the next
        one.
        """
        if self._format is None:
            return {}
        batch = self._batch if self._batch and _can_be_saved(self._batch.arguments) else None
        return {
            "snapshot": {
                "tensors": [tensor.detach().clone() for tensor in tensors_of(self._exact_model)]
            },
            "formats": list(self._formats),
            "rung": self.number_format,
            "reason": self.reason,
            "found": self._format.found,
            "batch": batch and _batch_to_dict(batch),
            "waits_for_batch": self._waits_for_batch or batch is not self._batch,
            "has_old_ranges": self.is_stale,
        }

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Continue from a saved state; activations are the same to the bit.

        Args:
            state: of any reference of this model.
            model: gives the architecture.
        """
        self._format = self._snapshot = None
        if not state:
            return
        self._snapshot = refresh_snapshot(None, model, self._device)
        self._batch = state["batch"] and self._on_device(_batch_from_dict(state["batch"]))
        self._formats, self.reason = tuple(state["formats"]), state["reason"]
        self._waits_for_batch, self.is_stale = state["waits_for_batch"], state["has_old_ranges"]
        with self._aside():
            for tensor, saved in zip(
                tensors_of(self._snapshot), state["snapshot"]["tensors"], strict=True
            ):
                tensor.copy_(saved)
            try:
                self._format = self._make(state["rung"], None, state["found"])
            except Exception as error:  # another machine, or another torch
                self._build(state["rung"], f"{state['rung']} could not go on: {brief(error)}")

    def _choose(self) -> None:
        """Build the first format that works of those for this model, machine and setting."""
        self._formats, self._waits_for_batch = ("fp32",), self._precision != "fp32"
        survey = self._survey()
        if isinstance(survey, str):
            self._build("fp32", survey, survey)
            return
        self._waits_for_batch = False
        on_cpu = self._device.type == "cpu"
        precision = self._precision if on_cpu or self._precision == "fp32" else "bf16"
        self._formats = self._machine.fallback_order(survey.workload, precision)
        reason = f"the setting is {self._precision!r}"
        if self._precision == "auto":
            where = f"this CPU ({self._machine})" if on_cpu else "a GPU"
            reason = (
                f"most of the work is {survey.workload}, for which {self._formats[0]} is the "
                f"fastest on {where}"
            )
        self._build(self._formats[0], reason, survey)

    def _build(self, first: FormatName, reason: str, found: Survey | str = "") -> None:
        """Build the first format from this one on that works, and note the change."""
        before, reasons = self.number_format, [reason]
        found = found or self._survey()
        survey = None if isinstance(found, str) else found
        for name in self._formats[self._formats.index(first) :]:
            try:
                self._format = self._make(name, survey, {})
                if survey is not None:
                    with silence():  # torch warns of kernels on their way out at their first use
                        check_readings(
                            self._format.readings(survey.batch), survey, is_fp32=name == "fp32"
                        )
                break
            except Exception as error:
                if name == self._formats[-1]:
                    raise
                reasons.append(f"{name} does not work here: {brief(error)}")
        self.is_stale = False
        if self.number_format != before:
            self.reason = "; ".join(reasons)
            self._changes.append(
                RungTaken(step=0, before=before, after=self.number_format, reason=self.reason)
            )

    def _make(self, name: str, survey: Survey | None, found: Mapping[str, Any]) -> NumberFormat:
        inputs = FormatInputs(
            snapshot=self._exact_model,
            taps=self._taps,
            machine=self._machine,
            device_type=self._device.type,
            survey=survey,
            batch=self._batch,
            built=found,
        )
        with silence(), kept_random_state(inputs.snapshot):  # as it was for the survey
            return FORMATS[name](inputs)

    def _survey(self) -> Survey | str:
        """Return what the snapshot gives for the newest batch, or why there is nothing."""
        if self._batch is None:
            return "there is no batch yet to try a smaller format on"
        try:
            return survey_model(self._exact_model, self._taps, self._batch)
        except Exception as error:
            return f"the batch cannot be run in float32: {brief(error)}"

    def _exact(self, tap: str, batch: Batch) -> Tensor | None:
        return run_to(self._exact_model, tap, replace(batch, autocast=in_fp32(self._device.type)))

    def _on_device(self, batch: Batch) -> Batch:
        """Return the batch on our device; the mixed precision of another type of device means
        nothing there.
        """
        kind = self._device.type
        autocast = batch.autocast if batch.autocast.device_type == kind else in_fp32(kind)
        return replace(batch.on(str(self._device)), autocast=autocast)

    @property
    def _exact_model(self) -> nn.Module:
        assert self._snapshot is not None
        return self._snapshot

    def _require_format(self) -> NumberFormat:
        if self._format is None:
            raise ReferenceModelError(
                "A reference is refreshed before it is asked, found none. Call `refresh` first."
            )
        return self._format

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Build without a trace: no gradients, no random numbers, no mixed
        precision of the user's.
        """
        with (
            torch.no_grad(),
            kept_random_state(self._exact_model),
            in_fp32(self._device.type).context(),
        ):
            yield


def _can_be_saved(value: Any) -> bool:
    """Return whether a value is made of `_SAVED` alone: an object of the loop's own keeps a
    checkpoint from loading.
    """
    if type(value) is dict:
        value = [*value, *value.values()]
    return all(map(_can_be_saved, value)) if type(value) in (list, tuple) else type(value) in _SAVED


def _batch_to_dict(batch: Batch) -> dict[str, Any]:
    """Return the batch as plain values and tensors, for a checkpoint."""
    autocast = {**asdict(batch.autocast), "dtype": str(batch.autocast.dtype).removeprefix("torch.")}
    return {"args": batch.args, "kwargs": dict(batch.kwargs), **autocast}


def _batch_from_dict(entry: Mapping[str, Any]) -> Batch:
    dtype = getattr(torch, entry["dtype"])
    autocast = Autocast(device_type=entry["device_type"], enabled=entry["enabled"], dtype=dtype)
    return Batch(args=entry["args"], kwargs=entry["kwargs"], autocast=autocast)


def warm_up() -> None:
    """Import and use once whatever building a reference on the CPU needs."""
    with torch.random.fork_rng(devices=[]):
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 4), nn.Linear(4, 4))
        for precision in ("int8", "int8-dynamic", "bf16"):
            reference = QuantizedReference(["0", "2", "3"], precision=precision)
            batch = Batch(args=(torch.zeros(2, 3, 8, 8),), kwargs={}, autocast=in_fp32("cpu"))
            reference.refresh(model, batch)
            reference.refresh(model)
            reference.activation("3", batch)
