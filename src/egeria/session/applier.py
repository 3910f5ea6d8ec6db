"""Carrying out what the policy decides: the only code that freezes or thaws."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from egeria import tree
from egeria.config import Config
from egeria.events import ModuleFrozen, StageChanged, Thawed
from egeria.layers.batch import Batch
from egeria.layers.compute import forward_shares
from egeria.layers.freezer import Freezer
from egeria.layers.modules import LayerModule
from egeria.parallel import ParallelStrategy
from egeria.policy import KNOWLEDGE_GUIDED, Decision, Freeze, Thaw
from egeria.session.handle import ModelHandle
from egeria.session.recorder import Recorder


class Applier:
    """Turns decisions into frozen layers and journal events.

    Args:
        model: the model in training.
        handle: what the loop calls.
        modules: the layer modules, front to back.
        config: the settings of the run.
        parallel: how several processes train together.
        recorder: where decisions are told.
    """

    def __init__(
        self,
        model: nn.Module,
        handle: ModelHandle,
        *,
        modules: Sequence[LayerModule],
        config: Config,
        parallel: ParallelStrategy,
        recorder: Recorder,
    ) -> None:
        self.freezer = Freezer(model, modules, freeze_tied=config.freezing.tied == "freeze")
        self._model = model
        self._handle = handle
        self._modules = tuple(modules)
        self._parallel = parallel
        self._recorder = recorder
        self._num_parameters = sum(module.num_parameters for module in modules)

    def apply(self, step: int, decisions: Sequence[Decision]) -> None:
        """Carry out decisions in order; each is journaled once it is in force."""
        for decision in self._parallel.agree(decisions):
            if isinstance(decision, Freeze):
                self._freeze(step, decision)
            elif isinstance(decision, Thaw):
                self._thaw(step, decision)
            else:
                self._recorder.write(StageChanged(step=step, stage=KNOWLEDGE_GUIDED, reason=decision.reason))

    def restore(self, depth: int) -> None:
        """Bring the model to a saved depth without journaling decisions that were journaled before."""
        if depth < self.freezer.depth:
            self.freezer.thaw()
        self.freezer.freeze_to(depth)
        self._handle.call_instead(self._parallel.rewrap(self._model))

    def release(self) -> None:
        """Thaw everything without a decision, for good."""
        self.freezer.thaw()
        self._handle.call_instead(self._model)

    def forward_shares(self, batch: Batch) -> list[float] | None:
        """Return the share of the forward pass that each layer module takes; None where that cannot be counted."""
        try:
            return forward_shares(self._model, self._modules, batch)
        except Exception as error:
            self._recorder.fault("counting operations", error)
            return None

    def _freeze(self, step: int, decision: Freeze) -> None:
        module = self._modules[decision.module]
        self.freezer.freeze_to(decision.module + 1)
        self._handle.call_instead(self._parallel.rewrap(self._model))
        frozen = self._modules[: self.freezer.depth]
        self._recorder.write(
            ModuleFrozen(
                step=step,
                module=decision.module,
                name=module.name,
                frozen=self.freezer.depth,
                reason=decision.reason,
                parameter_share=sum(entry.num_parameters for entry in frozen) / max(1, self._num_parameters),
            )
        )
        self._check_boundary(module)

    def _thaw(self, step: int, decision: Thaw) -> None:
        before = self.freezer.depth
        self.freezer.thaw()
        self._handle.call_instead(self._parallel.rewrap(self._model))
        self._recorder.write(Thawed(step=step, frozen_before=before, reason=decision.reason, window=decision.window))

    def _check_boundary(self, module: LayerModule) -> None:
        """Look at the boundary once, in the next training forward: it must not need a gradient."""

        def look(_module: nn.Module, _args: object, output: object) -> None:
            handle.remove()
            if tree.requires_grad(output):
                self._recorder.decline(
                    f"the full saving behind {module.name}",
                    "its output still needs a gradient, because a trainable tensor outside the frozen layer modules "
                    "(the input, or a parameter of another module) feeds it; the backward pass runs through it",
                )

        handle = self._model.get_submodule(module.tap).register_forward_hook(look)
