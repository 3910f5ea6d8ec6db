"""Carrying out what the policy decides: the only code that freezes or thaws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.events import FreezeWaits, ModuleFrozen, Rewrapped, Thawed
from egeria.journal.recorder import Recorder
from egeria.layers.batch import Batch
from egeria.layers.freezing import Freezer
from egeria.layers.modules import LayerModule
from egeria.layers.shards import outline
from egeria.layers.undisturbed import undisturbed
from egeria.parallel import ParallelStrategy
from egeria.policy import Freeze, Thaw
from egeria.session.compiling import Compiling
from egeria.session.following import HarmfulFreezeError, Training
from egeria.session.ranks import Ranks, Subject
from egeria.session.timing import Stopwatch


class Applier:
    """Turns decisions into frozen layers and journal events.

    Args:
        training: what the user trains.
        modules: the layer modules, front to back.
        parallel: how several processes train together.
        ranks: the processes of the job, seen from this one.
        compiling: what freezing costs a compiled model.
        recorder: writes the journal.
    """

    def __init__(
        self,
        training: Training,
        modules: Sequence[LayerModule],
        *,
        parallel: ParallelStrategy,
        ranks: Ranks,
        compiling: Compiling,
        recorder: Recorder,
    ) -> None:
        self._freezer = Freezer(training.model, modules, freeze_tied=training.config.freezing.tied == "freeze")
        self._training = training
        self._modules = tuple(modules)
        self._parallel = parallel
        self._ranks = ranks
        self._compiling = compiling
        self._recorder = recorder
        self.waiting: list[int] = []
        """Layer modules that were decided to freeze, and train on until compiling again repays itself."""
        self._depth_in_force = 0
        self._was_overruled = False

    @property
    def depth(self) -> int:
        """How many front layer modules are frozen."""
        return self._freezer.depth

    @property
    def decided_depth(self) -> int:
        """How many front layer modules were decided to freeze, waiting ones included."""
        return self.waiting[-1] + 1 if self.waiting else self.depth

    @property
    def is_undone(self) -> bool:
        """Whether the loop switched gradients of a frozen layer on again."""
        return self._was_overruled or self._freezer.is_undone

    def freeze(self, decision: Freeze, batch: Batch | None, saved_s: float | None) -> None:
        """Freeze one more layer module, or let it wait; `put_in_force` then makes it effective for the loop.

        Args:
            decision: what the policy decided.
            batch: a training batch to rehearse the freeze on.
            saved_s: seconds that it saves to the end of the run, with those that wait; None where unknown.

        Raises:
            HarmfulFreezeError: it would have broken the training; everything is thawed then.
            OutOfStepError: the processes of the job do not agree.
            LostError: they cannot reach each other.
        """
        module, step = self._modules[decision.module], self._recorder.step
        reason = self._reason_to_wait(saved_s)
        if reason is not None:
            self.waiting.append(decision.module)
            self._recorder.write(FreezeWaits(step=step, module=decision.module, name=module.name, reason=reason))
            return
        self.waiting = []
        before = None if batch is None else self._rehearse(module, batch)
        self._freezer.freeze_to(decision.module + 1, input_needs_grad=batch is not None and batch.needs_grad)
        after = None if batch is None or before is None else self._rehearse(module, batch)
        if batch is not None and before is not None and after is not None:
            self._check_rehearsals(module, before, after, batch.needs_grad)
        num_frozen = sum(entry.num_parameters for entry in self._modules[: self.depth])
        self._recorder.write(
            ModuleFrozen(
                step=step,
                module=decision.module,
                name=module.name,
                frozen=self.depth,
                reason=decision.reason,
                parameter_share=num_frozen / max(1, sum(entry.num_parameters for entry in self._modules)),
            )
        )

    def thaw(self, decision: Thaw) -> None:
        """Thaw everything; `put_in_force` then makes it effective for the loop."""
        before, self.waiting = self.depth, []
        self._freezer.thaw()
        event = Thawed(step=self._recorder.step, frozen_before=before, reason=decision.reason, window=decision.window)
        self._recorder.write(event)

    def restore(self, depth: int, decided_depth: int) -> None:
        """Freeze to a saved depth, without journaling decisions that were journaled before.

        Args:
            depth: how many front layer modules were frozen.
            decided_depth: how many were decided to freeze.
        """
        self._freezer.freeze_to(depth)
        self.waiting = list(range(depth, decided_depth))
        self.put_in_force()

    def put_in_force(self) -> None:
        """Let the loop call the model as it is now; with several processes, only gradients of what trains are sent."""
        watch, handle = Stopwatch(), self._training.handle
        has_changed, self._depth_in_force = self._depth_in_force != self.depth, self.depth
        frozen = [name for module in self._modules[: self.depth] for name in module.submodules]
        handle.call_instead(self._parallel.rewrap(frozen))
        is_watched = self._parallel.num_ranks > 1 or self._compiling.is_on
        handle.call_before(self._check_before_forward if is_watched and self.depth > 0 else None)
        if has_changed:
            self._compiling.note_change()
        if has_changed and self._parallel.num_ranks > 1:
            trained = [parameter for parameter in self._training.model.parameters() if parameter.requires_grad]
            size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
            self._recorder.write(Rewrapped(step=self._recorder.step, wall_s=watch.read()[0], reduced_bytes=size_bytes))

    def release(self) -> None:
        """Thaw everything without a decision, for good."""
        self.waiting = []
        self._freezer.thaw()
        self.put_in_force()

    def describe(self) -> str:
        """Return what is frozen and what trains, as text that is the same wherever that is the same."""
        names = (name for name, parameter in self._training.model.named_parameters() if parameter.requires_grad)
        return f"{self.depth} {' '.join(names)}"

    def _reason_to_wait(self, saved_s: float | None) -> str | None:
        """Return why a freeze has to wait: compiling the model again would take longer than it saves."""
        if not self._compiling.is_on:
            return None
        reason = self._compiling.reason_to_wait(saved_s)
        [does_wait] = self._ranks.from_leader(Subject.GATE, [float(reason is not None)])
        return (reason or "the first process waits") if does_wait else None

    def _check_before_forward(self) -> None:
        """Do what hooks of frozen layers cannot: what the loop unfroze must be reduced in this pass already."""
        if self._parallel.num_ranks > 1 and self._freezer.is_undone:
            self._was_overruled = True
            self.release()
        self._freezer.stay_in_inference_mode()

    def _rehearse(self, module: LayerModule, batch: Batch) -> tuple[list[Tensor], list[Tensor]] | None:
        """Run the model once, undisturbed but with gradients; an outline of a sharded one, where that is possible.

        Returns:
            The outputs of the layer module about to freeze, and those of the model.
        """
        boundary: list[Tensor] = []
        try:
            model, copied = outline(self._training.model, batch.first_rows(None))
            with undisturbed(model, gradients=True), batch.autocast.context():
                tap: nn.Module = model.get_submodule(module.tap)
                hook = tap.register_forward_hook(lambda *call: boundary.extend(tree.leaves(call[-1])))
                try:
                    output = model(*copied.args, **copied.kwargs)
                finally:
                    hook.remove()
        except Exception as error:
            if not self._training.is_sharded:
                raise
            self._recorder.decline("rehearsing a freeze", f"the model does not run without its values ({error})")
            return None
        return boundary, list(tree.leaves(output))

    def _check_rehearsals(
        self,
        module: LayerModule,
        before: tuple[list[Tensor], list[Tensor]],
        after: tuple[list[Tensor], list[Tensor]],
        input_needs_grad: bool,
    ) -> None:
        """Refuse a freeze that takes the gradient of an output, and report one that saves less than it could."""
        if _is_branch(before[0], before[1], after[1]):
            self._freezer.thaw()
            raise HarmfulFreezeError(
                f"with {module.name} frozen an output of the model would have no gradient left, "
                f"because it is a branch of its own and not in front of the others"
            )
        if input_needs_grad or tree.requires_grad(after[0]):
            self._recorder.decline(
                f"the full saving behind {module.name}",
                "its output still needs a gradient, because a trainable tensor outside the frozen layer modules "
                "(the input, or a parameter of another module) feeds it; the backward pass runs through it",
            )


def _is_branch(boundary: Sequence[Tensor], outputs: Sequence[Tensor], outputs_after: Sequence[Tensor]) -> bool:
    """Return whether a freeze took the gradient of an output, and no output that keeps one depends on the module.

    A hidden state that is put out beside the loss may lose its gradient; a head of its own may not.

    Args:
        boundary: outputs of the layer module before it froze.
        outputs: outputs of the model before it froze.
        outputs_after: the same outputs with it frozen.
    """
    pairs = [pair for pair in zip(outputs, outputs_after, strict=True) if pair[0].requires_grad]
    kept = [now.float().sum() for now, later in pairs if later.requires_grad]
    module_outputs = [tensor for tensor in boundary if tensor.requires_grad]
    if len(kept) == len(pairs) or not module_outputs:
        return False
    if not kept:
        return True
    gradients = torch.autograd.grad(kept, module_outputs, allow_unused=True)
    return all(gradient is None for gradient in gradients)
