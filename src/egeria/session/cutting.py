"""The cut of a model in training: which layer modules it has, and how many of them may freeze."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.optim import LBFGS

from egeria.errors import UnsupportedModelError
from egeria.events import ModulesOrdered
from egeria.layers.gradients import prompts_refusal
from egeria.layers.modules import (
    LayerModule,
    count_trainable,
    parameters_of,
    trains_elsewhere,
)
from egeria.layers.order import CallOrder
from egeria.session.following import HarmfulFreezeError, Training


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The layer modules of a model, and how many of them may freeze."""

    modules: tuple[LayerModule, ...]
    trainable: tuple[bool, ...]
    """Whether each has any parameter to train."""
    num_trainable: tuple[int, ...]
    """Elements of the parameters of each that train; of fully trainable models its
    `num_parameters`."""
    deepest_freeze: int
    """The largest number of front modules that may be frozen."""

    @classmethod
    def of(
        cls, training: Training, modules: Sequence[LayerModule], returned_to: Collection[str] = ()
    ) -> Cut:
        """Return the cut into these layer modules.

        To freeze one that is called again after active modules, in `returned_to`, saves nothing:
        the backward pass runs through it. Of one that only has weights tied to layers behind it
        nothing would freeze.
        """
        bounds = (
            i
            for i, m in enumerate(modules)
            if m.tap in returned_to or trains_elsewhere(training.model, m)
        )
        chain, parameters = next(bounds, len(modules) - 1), parameters_of(training.model, modules)
        return cls(
            modules=tuple(modules),
            num_trainable=tuple(count_trainable(own) for own in parameters),
            trainable=tuple(
                any(parameter.requires_grad for parameter in own) for own in parameters
            ),
            deepest_freeze=min(chain, _deepest_with_busy_optimizers(training, modules)),
        )

    @classmethod
    def in_order(cls, training: Training, seen: CallOrder) -> Cut:
        """Return the cut in the order in which layers ran; HarmfulFreezeError where nothing can be
        frozen.
        """
        try:
            cut = cls.of(training, training.parse(seen), seen.returned_to)
        except UnsupportedModelError as error:
            reason = (
                f"{error} Layers are seen where they are called: block(x), not block.forward(x)"
            )
            raise HarmfulFreezeError(reason) from error
        deepest, reason = deepest_by_gradients(cut.modules, seen)
        if deepest < cut.deepest_freeze:
            training.recorder.decline(
                f"freezing {cut.modules[deepest].name} and what follows", reason
            )
            return replace(cut, deepest_freeze=deepest)
        limit = cut.modules[cut.deepest_freeze]
        if limit.tap in seen.returned_to:
            reason = (
                f"{limit.tap} is called again after layers behind it, so freezing it would "
                "save nothing"
            )
        elif trains_elsewhere(training.model, limit):
            reason = (
                "its weights are tied to layers behind it, which train them on. Untie them to have "
                "it frozen"
            )
        elif cut.deepest_freeze < len(cut.modules) - 1:
            reason = (
                "one of the optimizers would have nothing left to train, which GradScaler takes "
                "for an error. Give one "
                "optimizer all of the parameters, in groups"
            )
        else:
            return cut
        training.recorder.decline(f"freezing {limit.name} and what follows", reason)
        return cut

    @classmethod
    def resumed(
        cls, training: Training, modules: Sequence[LayerModule], saved: Mapping[str, Any]
    ) -> Cut:
        """Return the cut of a saved state, with what its run had seen: the calls, and what trained
        in the beginning.
        """
        cut = cls.of(training, modules)
        return replace(
            cut,
            deepest_freeze=saved["policy"].get("deepest_freeze", cut.deepest_freeze),
            trainable=tuple(saved["trainable"]),
        )

    def announce(
        self, training: Training, step: int, known: Sequence[LayerModule], cut_by: Mapping[str, Any]
    ) -> None:
        """Journal a resumed cut where it is not the known one, and say so where it was made with
        other settings.
        """
        if self.modules == tuple(known):
            return
        training.recorder.step = step
        training.recorder.write(ModulesOrdered(step=step, **self.to_dict()))
        ours = asdict(training.config.modules)
        differing = [name for name, value in ours.items() if cut_by.get(name, value) != value]
        if differing:
            training.recorder.decline(
                "cutting the model by "
                f"{' and '.join(f'modules.{name}={ours[name]!r}' for name in differing)}",
                "a resumed run keeps the layer modules that it was saved with. For others load "
                "the model and the "
                "optimizer, but not the state of the run",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of journal events about a cut."""
        pairs = zip(self.modules, self.num_trainable, strict=True)
        modules = [module.to_dict() | {"num_trainable": count} for module, count in pairs]
        return {
            "modules": modules,
            "trainable": list(self.trainable),
            "deepest_freeze": self.deepest_freeze,
        }


def first_cut(training: Training) -> tuple[Cut | None, str]:
    """Return how the model is cut, or None and why it is left alone."""
    refusal = training.parallel.refusal()
    if any(isinstance(optimizer, LBFGS) for optimizer in training.optimizers):
        refusal = "LBFGS moves parameters by its history, also those without a gradient"
    if any(getattr(optimizer, "_overlap_with_ddp", False) for optimizer in training.optimizers):
        refusal = (
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps by buckets laid out once. "
            "Leave that out"
        )
    if any(
        group.get("lr") is None
        for optimizer in training.optimizers
        for group in optimizer.param_groups
    ):
        refusal = (
            "the optimizer keeps its learning rate to itself (lr is None), and decisions go by "
            "that; "
            "give it one (Adafactor: relative_step=False, lr=...)"
        )
    refusal = refusal or prompts_refusal(training.model)
    if refusal:
        return None, refusal
    try:
        return Cut.of(training, training.parse()), ""
    except UnsupportedModelError as error:
        return None, str(error)


def deepest_by_gradients(modules: Sequence[LayerModule], seen: CallOrder) -> tuple[int, str]:
    """Return how many front layer modules may freeze such that every gradient that the loop needs
    comes, and why.

    Raises:
        HarmfulFreezeError: not one.
    """
    places = {name: index for index, module in enumerate(modules) for name in module.parameters}
    owners = {name: index for index, module in enumerate(modules) for name in module.submodules} | {
        "": len(modules) - 1
    }
    recomputed = [owners.get(name, 0) for name in (*seen.without_grad, *seen.graph.checkpointed)]
    part = min(seen.without_grad, default="a part of the model")
    # What is recomputed needs a gradient at its input, from a layer module in front of it.
    limits = [
        (
            max(0, min(recomputed, default=len(modules)) - 1),
            f"{part} runs under reentrant activation checkpointing, which loses every "
            f"gradient behind a frozen layer. Use torch.utils.checkpoint with use_reentrant=False",
        ),
        (
            seen.gradients.asked(places),
            "the loop asks torch.autograd.grad for gradients of parameters, which fails for "
            "frozen ones",
        ),
        (
            seen.gradients.deepest(places),
            "the loop makes a backward pass of its own for what is in front, such as a penalty on "
            "its weights, "
            "which fails where nothing in it needs a gradient. Add it to the loss",
        ),
    ]
    deepest, reason = min(limits, key=lambda limit: limit[0])
    if deepest == 0:
        raise HarmfulFreezeError(reason)
    return deepest, reason


def _deepest_with_busy_optimizers(training: Training, modules: Sequence[LayerModule]) -> int:
    """Return how many front modules may freeze such that every optimizer keeps something to train.

    An optimizer without any gradient is an error to `GradScaler.step` ("No inf checks were
    recorded").
    """
    owned = parameters_of(training.model, modules)
    owner = {id(parameter): index for index, own in enumerate(owned) for parameter in own}
    deepest = last = len(modules) - 1
    for optimizer in training.optimizers:
        parameters = [
            entry
            for group in optimizer.param_groups
            for entry in group["params"]
            if entry.requires_grad
        ]
        deepest = min(
            deepest, max((owner.get(id(entry), last) for entry in parameters), default=last)
        )
    return deepest
