"""The paper's rule on other numbers than plasticity: changes of weights, and Skip-Conv's metric of activations."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.analysis.metrics import input_norm, pool_map
from benchmarks.paper_rule import SETTINGS, PaperRule, rule_of
from benchmarks.rivals.base import INTERVAL, IntervalRival, Option
from benchmarks.rivals.layers import inference
from benchmarks.workloads.workload import Training

PASSES = 1 + 0.5 + 0.25
"""Bootstrapping, smoothing delay and the halved window after a thaw, in passes over all modules (paper §4.2.2)."""
NUM_SAMPLES, LARGEST_MAP = 32, 16
"""Of a batch that is looked at, and the side in pixels that feature maps are pooled to: the library's."""


class Before(NamedTuple):
    """How it was in an interval."""

    frozen: int
    """How many front layer modules were frozen."""
    monitored: int | None
    """The layer module that the rule monitored."""


@dataclass(eq=False)
class ByRule(IntervalRival):
    """Freezes a front layer module once what is read of it is stationary, and thaws by the learning rate."""

    options: ClassVar[dict[str, Option]] = {
        INTERVAL: IntervalRival.options[INTERVAL],
        **{name: Option(None, "as the library has it", lambda _: True) for name in SETTINGS},
    }

    def prepare(self) -> None:
        """Set up the rule."""
        layers, settings = self.layers, {name: value for name, value in self.values.items() if name in SETTINGS}
        rule, total_steps = rule_of(self.training.scheduler), self.total_steps
        self._rule = PaperRule(settings, trainable=layers.trainable, rule=rule, total_steps=total_steps)

    def choose_interval(self) -> int:
        """Return the steps of an interval, by the guideline of the paper."""
        return max(1, round(self.total_steps / (2 * self._rule.window) / len(self.layers.modules) / PASSES))

    def end_interval(self, loss: float | None, batch: Any) -> None:
        """Let the rule decide by the loss and the learning rate, then by a reading."""
        before = Before(frozen=self.depth, monitored=self._rule.monitored)
        evaluation = self.step // self.interval_steps
        decided = self._rule.end_interval(self.step, loss, self._learning_rate())
        self._follow(decided)
        module = self._rule.monitored
        value = self.read(module, batch, before, begins="knowledge-guided" in decided)
        if value is not None and module is not None and loss is not None and math.isfinite(value):
            self._follow(self._rule.read(self.step, evaluation, module, value))

    @abstractmethod
    def read(self, module: int | None, batch: Any, before: Before, *, begins: bool) -> float | None:
        """Return a reading of a layer module; None where there is none.

        Args:
            module: the one that the rule monitors; None for none.
            batch: the newest.
            before: how it was in the interval that ends.
            begins: whether bootstrapping has ended just now.
        """

    def _follow(self, decided: list[str]) -> None:
        if "thaw" in decided:
            self.move_to(0, "the learning rate has changed far enough since the first freeze")
        self.move_to(self._rule.frozen, "what was read of it is stationary")

    def _learning_rate(self) -> float:
        """Return the largest rate of the groups that train what may freeze."""
        own = {id(entry) for part in self.layers.parameters[:-1] for entry in part}
        groups = self.training.optimizer.param_groups
        fitting = [group for group in groups if any(id(entry) in own for entry in group["params"])]
        return max(float(group["lr"]) for group in fitting or groups)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors to go on from."""
        return {**super().state_dict(), "rule": self._rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the model has been loaded."""
        super().load_state_dict(state)
        self._rule.load_state_dict(state["rule"])


@dataclass(eq=False)
class WeightChange(ByRule):
    """'weight_change': the paper's rule on `||w_now - w_then|| / ||w_then||` of the weights over an interval.

    Source: a control of our own, for what activations show beyond weights.
    """

    def prepare(self) -> None:
        """Set up the rule."""
        super().prepare()
        self._then: list[list[Tensor]] = []
        """Weights of each layer module at the end of the interval before."""

    @torch.no_grad()
    def read(self, module: int | None, batch: Any, before: Before, *, begins: bool) -> float | None:
        """Return the change of the weights of a layer module."""
        then, self._then = self._then, [[entry.clone() for entry in own] for own in self.layers.parameters]
        if module is None or not then or begins or module != before.frozen:  # what was frozen did not move
            return None
        pairs = list(zip(self._then[module], then[module], strict=True))
        moved = sum(float((now.float() - before.float()).square().sum()) for now, before in pairs)
        size = sum(float(before.float().square().sum()) for _, before in pairs)
        if moved == 0:
            return 0.0
        return math.sqrt(moved / size) if size else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors to go on from."""
        return {**super().state_dict(), "then": self._then}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the model has been loaded."""
        super().load_state_dict(state)
        device = self._losses.device
        self._then = [[entry.to(device) for entry in own] for own in state["then"]]


@dataclass(eq=False)
class SkipConv(ByRule):
    """'skipconv': the paper's rule on Skip-Conv's input norm, of activations against a snapshot's.

    The snapshot is of the training weights, in float32, made anew after every `W` readings. Both see the newest batch
    in inference mode.
    """

    def prepare(self) -> None:
        """Set up the rule."""
        super().prepare()
        self._snapshot = copy.deepcopy(self.training.model)
        self._num_read: int | None = None
        """Readings since the snapshot was made; None while there is none."""

    def read(self, module: int | None, batch: Any, before: Before, *, begins: bool) -> float | None:
        """Return how far the activations of a layer module are from those of the snapshot."""
        if module is None:
            return None
        value = None
        if self._num_read is not None and before.monitored is not None:
            tap = self.layers.modules[module].tap
            value = distance(
                *(see(model, self.training, batch, tap) for model in (self.training.model, self._snapshot))
            )
            self._num_read += 1
        if begins or self._num_read is None or self._num_read >= self._rule.window:
            self._snapshot.load_state_dict(self.training.model.state_dict())
            self._num_read = 0
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors to go on from."""
        return {**super().state_dict(), "snapshot": self._snapshot.state_dict(), "num_read": self._num_read}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the model has been loaded."""
        super().load_state_dict(state)
        self._snapshot.load_state_dict(state["snapshot"])
        self._num_read = state["num_read"]


class _Seen(BaseException):
    """Ends a forward pass that has run far enough; no handler in a model takes it for an error."""


def see(model: nn.Module, training: Training, batch: Any, tap: str) -> Tensor | None:
    """Return what a submodule gives out for a batch, in inference mode; None where that is no tensor."""
    seen: list[Any] = []

    def stop(_module: nn.Module, _inputs: Any, output: Any) -> None:
        seen.append(output)
        raise _Seen

    handle = model.get_submodule(tap).register_forward_hook(stop)
    try:
        with inference(model):
            training.loss(model, batch)
    except _Seen:
        pass
    finally:
        handle.remove()
    return first_tensor(seen)


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor of an output."""
    if isinstance(value, Tensor):
        return value.detach() if value.is_floating_point() else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def distance(training: Tensor | None, reference: Tensor | None) -> float | None:
    """Return the input norm of two activations, of their first samples, as the library would pool them."""
    if training is None or reference is None:
        return None
    return float(input_norm(*(pool_map(entry[:NUM_SAMPLES], LARGEST_MAP) for entry in (training, reference))))
