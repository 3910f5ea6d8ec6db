"""All that is measured for a policy, by what it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from egeria.journal.recorder import Recorder
from egeria.layers.modules import LayerModule
from egeria.layers.shards import is_sharded
from egeria.policy import FORESIGHT, GRADIENTS, NOISE, WEIGHTS
from egeria.session.measures.foresight import Foresight
from egeria.session.measures.gradients import GradientSums
from egeria.session.measures.hooks import OptimizerHooks
from egeria.session.measures.noise import StepNoise
from egeria.session.measures.weights import WeightChanges


class Measures:
    """Gradients and weights of the layer modules, interval by interval.

    Args:
        model: the model in training.
        optimizers: what trains it.
        needs: what the policy needs; nothing else costs anything.
        foresight: what tells the learning rate to come.
        add_up: returns the sums over all processes of a job, where each has a part of the parameters.
        recorder: records faults.
        spend: counts seconds in the midst of the user's iteration.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        needs: Collection[str],
        *,
        foresight: Foresight,
        add_up: Callable[[Sequence[float]], Sequence[float]] = list,
        recorder: Recorder,
        spend: Callable[[float, float], None],
    ) -> None:
        self.in_parts = is_sharded(model)
        """Whether this process measures its part of each parameter, and others theirs."""
        self._gradients = GradientSums(model) if GRADIENTS in needs else None
        self._weights = WeightChanges(model, add_up) if WEIGHTS in needs else None
        self._noise = StepNoise(model) if NOISE in needs else None
        self._foresight = foresight if FORESIGHT in needs else None
        hook = partial(OptimizerHooks, optimizers, recorder, spend)
        self._hooks: dict[str, OptimizerHooks] = {}
        if self._gradients is not None:
            self._hooks[GRADIENTS] = hook(what="adding up gradients", before=self._gradients.take_in)
        if self._noise is not None:
            measure = self._noise
            self._hooks[NOISE] = hook(
                what="measuring noise", before=measure.before, after=measure.after, takes_closures=False
            )

    def take(self, step: int, rate: float, modules: Sequence[LayerModule], num_frozen: int) -> dict[str, Any]:
        """Return the measures of an interval that has ended, by the names that the interval has for them.

        Args:
            step: optimizer steps done.
            rate: the learning rate now.
            modules: the layer modules.
            num_frozen: how many of them are frozen.
        """
        for hooks in self._hooks.values():
            if hooks.is_closed:
                hooks.close()
        gradients = weights = noise = ahead = None
        if self._gradients is not None and not self._hooks[GRADIENTS].is_closed:
            gradients = self._gradients.take(modules, num_frozen)
        if self._weights is not None:
            weights = self._weights.take(modules, num_frozen)
        if self._noise is not None and not self._hooks[NOISE].is_closed:
            noise = self._noise.take(modules, num_frozen)
        if self._foresight is not None:
            ahead = self._foresight.ahead(step, rate)
        way, last_rate = (ahead.way, ahead.last_rate) if ahead else (None, None)
        return {
            "gradients": gradients,
            "weight_changes": weights,
            "noise": noise,
            "way_ahead": way,
            "last_rate": last_rate,
        }

    def close(self) -> None:
        """Leave the optimizers as they were found, and let go of all tensors."""
        for hooks in self._hooks.values():
            hooks.close()
        self._hooks.clear()
        self._gradients = self._weights = self._noise = None

    def state_dict(self) -> dict[str, Any]:
        """Return what an interval under way has gathered; nothing of parameters in parts, which would be one's own."""
        return {name: part.state_dict() for name, part in self._parts().items() if self._is_whole(name)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; measures that it lacks restart."""
        for name, part in self._parts().items():
            part.load_state_dict(state.get(name, {}) if self._is_whole(name) else {})

    def _is_whole(self, name: str) -> bool:
        """Return whether a measure is the same in all processes."""
        return not self.in_parts or name == FORESIGHT

    def _parts(self) -> dict[str, Any]:
        parts = {GRADIENTS: self._gradients, WEIGHTS: self._weights, NOISE: self._noise, FORESIGHT: self._foresight}
        return {name: part for name, part in parts.items() if part is not None}
