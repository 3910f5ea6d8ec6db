"""Carrying out what the policy decides: the only code that freezes or thaws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.config import Config
from egeria.events import FreezeWaits, ModuleFrozen, Rewrapped, StageChanged, Thawed
from egeria.layers.batch import Batch
from egeria.layers.compute import forward_shares
from egeria.layers.freezer import Freezer
from egeria.layers.modules import LayerModule
from egeria.layers.plain import outline
from egeria.layers.shards import is_sharded
from egeria.layers.undisturbed import undisturbed
from egeria.parallel import ParallelStrategy
from egeria.policy import KNOWLEDGE_GUIDED, Decision, Freeze, Thaw
from egeria.session.compiling import Compiling
from egeria.session.handle import ModelHandle
from egeria.session.pace import Stopwatch
from egeria.session.recorder import Recorder

Waits = Callable[[Sequence[int]], str | None]


class HarmfulFreezeError(Exception):
    """A rehearsal showed that a freeze would break the training; it was undone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """Tensors of one forward pass with gradients."""

    boundary: tuple[Tensor, ...]
    """What the layer module about to freeze put out."""
    outputs: tuple[Tensor, ...]
    """What the model put out."""

    def is_a_branch_without(self, after: Rehearsal) -> bool:
        """Tell whether a freeze took the gradient of an output, and nothing that keeps one depends on the module.

        A hidden state that is put out beside the loss may lose its gradient; a head of its own may not.
        """
        pairs = [pair for pair in zip(self.outputs, after.outputs, strict=True) if pair[0].requires_grad]
        kept = [now.float().sum() for now, later in pairs if later.requires_grad]
        module_outputs = [tensor for tensor in self.boundary if tensor.requires_grad]
        if len(kept) == len(pairs) or not module_outputs:
            return False
        if not kept:
            return True
        gradients = torch.autograd.grad(kept, module_outputs, allow_unused=True)
        return all(gradient is None for gradient in gradients)


class Applier:
    """Turns decisions into frozen layers and journal events.

    Args:
        model: the model in training.
        handle: what the loop calls.
        modules: the layer modules, front to back.
        config: the settings of the run.
        parallel: how several processes train together.
        compiling: what freezing costs a compiled model.
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
        compiling: Compiling,
        recorder: Recorder,
    ) -> None:
        self.freezer = Freezer(model, modules, freeze_tied=config.freezing.tied == "freeze")
        self._model = model
        self._handle = handle
        self._modules = tuple(modules)
        self._parallel = parallel
        self._compiling = compiling
        self._recorder = recorder
        self._waiting: list[int] = []
        """Layer modules that were decided to freeze, and train on until that repays itself."""
        self._settled = 0
        self._gave_in = False
        self._num_parameters = sum(module.num_parameters for module in modules)

    @property
    def is_undone(self) -> bool:
        """Tell whether the loop switched gradients of a frozen layer on again."""
        return self._gave_in or self.freezer.is_undone

    @property
    def decided_depth(self) -> int:
        """How many front layer modules were decided to freeze: those that wait too."""
        return self._waiting[-1] + 1 if self._waiting else self.freezer.depth

    def apply(
        self, step: int, decisions: Sequence[Decision], batch: Batch | None = None, waits: Waits = lambda modules: None
    ) -> None:
        """Carry out decisions in order and journal each; `settle` then puts them in force for the loop.

        Args:
            step: optimizer steps done so far.
            decisions: what the policy decided.
            batch: a training batch to rehearse a freeze on.
            waits: returns why layer modules about to freeze together are to train on for now, None if they are not.

        Raises:
            HarmfulFreezeError: a freeze would have broken the training; everything is thawed then.
        """
        for decision in decisions:
            if isinstance(decision, Freeze):
                self._freeze(step, decision, batch, waits)
            elif isinstance(decision, Thaw):
                self._thaw(step, decision)
            else:
                self._recorder.write(StageChanged(step=step, stage=KNOWLEDGE_GUIDED, reason=decision.reason))

    def restore(self, depth: int, decided_depth: int) -> None:
        """Bring the model to a saved depth without journaling decisions that were journaled before."""
        self.freezer.freeze_to(depth)
        self._waiting = list(range(depth, decided_depth))
        self.settle()

    def settle(self) -> None:
        """Let the loop call the model as it is now: with several processes, reducing what trains."""
        watch = Stopwatch()
        before, self._settled = self._settled, self.freezer.depth
        frozen = [name for module in self._modules[: self.freezer.depth] for name in module.submodules]
        self._handle.call_instead(self._parallel.rewrap(frozen))
        is_watched = self._parallel.num_ranks > 1 or self._compiling.is_on
        self._handle.call_before(self._look_ahead_of_a_forward if is_watched and self._settled > 0 else None)
        if before != self._settled:
            self._compiling.note_change()
        if self._parallel.num_ranks > 1 and before != self._settled:
            trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
            self._recorder.write(Rewrapped(step=self._recorder.step, wall_s=watch.read()[0], reduced_bytes=size_bytes))

    def release(self) -> None:
        """Thaw everything without a decision, for good."""
        self._waiting = []
        self.freezer.thaw()
        self.settle()

    def trained(self) -> str:
        """Return what is frozen and what trains, as text that is the same wherever that is the same."""
        names = (name for name, parameter in self._model.named_parameters() if parameter.requires_grad)
        return f"{self.freezer.depth} {' '.join(names)}"

    def forward_shares(self, batch: Batch) -> list[float] | None:
        """Return the share of the forward pass that each layer module takes; None where that cannot be counted."""
        try:
            model, batch = outline(self._model, batch)
            return forward_shares(model, self._modules, batch)
        except Exception as error:
            self._recorder.fault("counting operations", error)
            return None

    def _freeze(self, step: int, decision: Freeze, batch: Batch | None, waits: Waits) -> None:
        module, together = self._modules[decision.module], [*self._waiting, decision.module]
        reason = waits(together)
        if reason is not None:
            self._waiting = together
            self._recorder.write(FreezeWaits(step=step, module=decision.module, name=module.name, reason=reason))
            return
        self._waiting = []
        before = None if batch is None else self._rehearse(module, batch)
        self.freezer.freeze_to(decision.module + 1, input_needs_grad=batch is not None and batch.needs_grad)
        after = None if batch is None or before is None else self._rehearse(module, batch)
        if batch is not None and before is not None and after is not None:
            self._refuse_a_branch(module, before, after)
            self._tell_of_a_costly_boundary(module, batch.needs_grad or tree.requires_grad(after.boundary))
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

    def _look_ahead_of_a_forward(self) -> None:
        """See to what hooks of frozen layers cannot: what the loop unfroze must be reduced in this pass already."""
        if self._parallel.num_ranks > 1 and self.freezer.is_undone:
            self._gave_in = True
            self.release()
        self.freezer.stay_in_inference_mode()

    def _thaw(self, step: int, decision: Thaw) -> None:
        before, self._waiting = self.freezer.depth, []
        self.freezer.thaw()
        self._recorder.write(Thawed(step=step, frozen_before=before, reason=decision.reason, window=decision.window))

    def _rehearse(self, module: LayerModule, batch: Batch) -> Rehearsal | None:
        """Run the model once, undisturbed but with gradients; an outline of one in parts, where that is possible."""
        boundary: list[Tensor] = []
        try:
            model, copied = outline(self._model, batch.first_rows(None))
            with undisturbed(model, gradients=True), batch.autocast.context():
                tap = model.get_submodule(module.tap)
                handle = tap.register_forward_hook(lambda *call: boundary.extend(tree.leaves(call[-1])))
                try:
                    output = model(*copied.args, **copied.kwargs)
                finally:
                    handle.remove()
        except Exception as error:
            if not is_sharded(self._model):
                raise
            self._recorder.decline("rehearsing a freeze", f"the model does not run without its values ({error})")
            return None
        return Rehearsal(boundary=tuple(boundary), outputs=tuple(tree.leaves(output)))

    def _refuse_a_branch(self, module: LayerModule, before: Rehearsal, after: Rehearsal) -> None:
        if before.is_a_branch_without(after):
            self.freezer.thaw()
            raise HarmfulFreezeError(
                f"with {module.name} frozen an output of the model would have no gradient left, "
                f"because it is a branch of its own and not in front of the others"
            )

    def _tell_of_a_costly_boundary(self, module: LayerModule, needs_grad: bool) -> None:
        if needs_grad:
            self._recorder.decline(
                f"the full saving behind {module.name}",
                "its output still needs a gradient, because a trainable tensor outside the frozen layer modules "
                "(the input, or a parameter of another module) feeds it; the backward pass runs through it",
            )
