"""Following a model in training: the hook on it, what skips its forward, its execution order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from egeria import tree
from egeria.config import Config
from egeria.errors import StateError
from egeria.journal import Recorder
from egeria.layers.atoms import names_of_reused
from egeria.layers.batch import Batch
from egeria.layers.copies import PlainCopies
from egeria.layers.modules import LayerModule, parameters_of, parse_modules
from egeria.layers.order import CallOrder, OrderOfBatch, OrderRecorder
from egeria.layers.pretrained import is_mostly_trained, settings_of_cut
from egeria.layers.shards import compiling_callback, is_compiled, is_sharded, run_uncompiled
from egeria.layers.undisturbed import is_own_pass
from egeria.parallel import ParallelStrategy
from egeria.parallel.refusals import COPIES, JOINED
from egeria.policy import Plan
from egeria.policy.plan import find_plan
from egeria.session.ranks import OutOfStepError, Ranks
from egeria.session.showing import outermost


class ModelHooks:
    """Watches the training calls of a model by one hook on the model itself: the loop calls what it
    always called.

    Calls in evaluation mode or without gradients, and passes of our own, go by unseen. Inside
    compiled code the hook is left out; a model that is compiled as such runs it ahead of its
    graphs.

    Args:
        model: without any wrapper.
        parallel: how several processes train together; it learns from the first call what wraps the
            model.
    """

    def __init__(self, model: nn.Module, parallel: ParallelStrategy) -> None:
        self.model, self._parallel = model, parallel
        self.is_compiled = is_compiled(model) or parallel.is_compiled
        self.num_calls = 0
        """Training calls so far."""
        self.needs_check = True
        """Whether `check_calls` is to be called: at the first step, and after a failure."""
        self.failure: Exception | None = None
        """What was raised in a call of the loop's, which goes on without us."""
        self._keep: Callable[[Batch], None] | None = None
        self._skip: Callable[[Callable[[], Any], Batch], Any] | None = None
        self._before: Callable[[], None] | None = None
        self._checks_each = True
        self._wants: Callable[[], bool] | None = None
        self._observe: Callable[[Batch], None] | None = None
        self._notice: weakref.WeakMethod[Callable[[], None]] | None = None
        self.input_needs_grad = False
        """Whether something in front of the model is in training, such as a soft prompt, as last
        looked at."""
        self.looks_at_input = True
        """Whether the next training call is looked at for that."""
        self._batch: Batch | None = None
        """Arguments of the call under way, for `forward`."""
        self._handles: list[RemovableHandle | PlainCopies] = []

    def open(self) -> None:
        """Put the hook on the model, ahead of those of others."""
        if self._handles:
            return
        given = self._parallel.given if self._parallel.is_compiled else None
        module_name = type(self.model).forward.__module__ or ""  # None where torch.fx made it
        is_of_torch = module_name.startswith("torch.")  # which compiles its hooks too
        for module in (self.model, given) if given is not None and is_of_torch else (self.model,):
            hook = module.register_forward_pre_hook(
                self._before_forward, prepend=True, with_kwargs=True
            )
            self._handles += [hook, PlainCopies(module)]
        self._handles += map(PlainCopies, self.model.modules())

    def close(self) -> None:
        """Leave the model as it was found."""
        self.skip_with(None)
        self._keep = self._before = self._notice = self._wants = self._observe = None
        while self._handles:
            self._handles.pop().remove()

    def keep_next(self, keep: Callable[[Batch], None] | None) -> None:
        """Hand the arguments of coming training calls to `keep`; None stops that."""
        self._keep = keep

    def watch_with(
        self, wants: Callable[[], bool] | None, observe: Callable[[Batch], None] | None
    ) -> None:
        """Hand the arguments of those training calls to `observe` for which `wants` is true; None
        stops that.
        """
        self._wants, self._observe = wants, observe

    def call_before(self, before: Callable[[], None] | None, *, each: bool = True) -> None:
        """Call `before` ahead of each training call, or of the first in the last step of an
        interval; None: of none.
        """
        self._before, self._checks_each = before, each

    def skip_with(self, skip: Callable[[Callable[[], Any], Batch], Any] | None) -> None:
        """Let `skip` make the forward passes: it is given the model's own and its arguments; None
        stops that.
        """
        attributes, self._skip = vars(self.model), skip
        mine = isinstance(attributes.get("forward"), SkippingForward)
        if skip is not None and not mine:
            attributes["forward"] = SkippingForward(
                self, self.model.forward, attributes.get("forward")
            )
        elif skip is None and mine:
            attributes.pop("forward").restore(attributes)

    def when_compiled(self, notice: Callable[[], None]) -> None:
        """Call a method once calls turn out to be compiled, before the first of them is, if its
        owner still lives.
        """
        self._notice = weakref.WeakMethod(notice)

    def note_compiled(self) -> None:
        """Take note that the model is compiled."""
        if not self.is_compiled:
            self.is_compiled = True
            if self._notice and (notice := self._notice()):
                notice()

    def forward(self, call: Callable[[], Any]) -> Any:
        """Make the forward pass of a call that the hook has seen begin."""
        batch, self._batch = self._batch, None
        if batch is None or self._skip is None or is_own_pass():
            return call()
        return self._skip(call, batch)

    @run_uncompiled
    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """See a call of the model; the function itself is never compiled."""
        if torch.compiler.is_compiling() or is_own_pass():
            return
        is_called_compiled = compiling_callback() not in (None, False)
        disable: Any = torch.compiler.disable
        prepare = disable(self._prepare) if is_called_compiled else self._prepare
        try:
            if (
                "_is_replica" in model.__dict__
            ):  # `DataParallel` was put around the model after `attach`
                raise HarmfulFreezeError(COPIES)
            prepare(args, kwargs, is_called_compiled)
        except Exception as error:
            self._batch, self.failure, self.needs_check = None, error.with_traceback(None), True

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], is_called_compiled: bool
    ) -> None:
        self._batch = None
        if is_called_compiled or self.model._compiled_call_impl is not None:
            self.note_compiled()
        if not self.model.training or not torch.is_grad_enabled():
            return
        self.num_calls += 1
        self._look(args, kwargs)
        observe = self._observe if self._wants is not None and self._wants() else None
        takers = [take for take in (self._keep, observe) if take is not None]
        if not takers and self._skip is None:
            return
        device = next((parameter.device.type for parameter in self.model.parameters()), "cpu")
        batch = Batch.of_call(args, kwargs, device)
        for take in takers:
            take(batch)
        if self._skip is not None:
            self._batch = batch

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See what wraps the model and what trains in front of it; let others look."""
        looks, self.looks_at_input = self.looks_at_input, False
        if looks:
            self.input_needs_grad = tree.requires_grad((args, kwargs))
        if self._parallel.see_call():
            raise OutOfStepError(
                JOINED
            )  # all processes see it at the same call, so that none has to tell the others
        if self._before is not None and (looks or self._checks_each):
            self._before()


class SkippingForward:
    """The `forward` of a model while the cache may skip the front of it.

    Args:
        hooks: on the model.
        forward: of the model, which this stands for.
        own: what was an attribute of this very model before, rather than of its class.
    """

    def __init__(self, hooks: ModelHooks, forward: Callable[..., Any], own: Any) -> None:
        self._hooks, self.own_forward = hooks, own
        self.__wrapped__ = forward  # its signature is read from here

    @property
    def __code__(self) -> Any:
        """What `torch.export` asks a `forward` for."""
        return self.__wrapped__.__code__

    @run_uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the forward pass, or have the cache make it."""
        return self._hooks.forward(partial(self.__wrapped__, *args, **kwargs))

    def restore(self, attributes: dict[str, Any]) -> None:
        """Give a model its own `forward` back."""
        if self.own_forward is not None:
            attributes["forward"] = self.own_forward


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What the user trains, as `attach` was given it, with whom, and where what
    happens is noted.
    """

    model: nn.Module
    """Without any wrapper."""
    hooks: ModelHooks
    optimizers: Sequence[Optimizer]
    config: Config
    total_steps: int | None
    parallel: ParallelStrategy
    ranks: Ranks
    recorder: Recorder
    norms: dict[str, bool] = field(default_factory=dict)
    """For each normalisation layer whether it came trained; of a resumed run, when that first
    began."""

    @property
    def policy_name(self) -> str:
        """The name of the policy, or of what makes it."""
        name = self.config.policy.name
        return name if isinstance(name, str) else getattr(name, "__qualname__", type(name).__name__)

    @property
    def is_pretrained(self) -> bool:
        """Whether the model came trained, most of it at least, so that this is a fine-tuning."""
        given = self.config.policy.pretrained
        return is_mostly_trained(self.norms) if given == "auto" else bool(given)

    @property
    def is_sharded(self) -> bool:
        """Whether each process has a part of the parameters only."""
        return is_sharded(self.model)

    def plan(self, modules: Sequence[LayerModule]) -> Plan | None:
        """Return the plan that the settings ask for; None where the policy follows none."""
        names = [module.name for module in modules]
        return find_plan(self.config.policy, names, self.is_pretrained, self.total_steps)

    def parse(self, seen: CallOrder | None = None) -> tuple[LayerModule, ...]:
        """Return the layer modules, in the order of execution where that is known."""
        settings = settings_of_cut(asdict(self.config.modules), is_pretrained=self.is_pretrained)
        if seen is None:
            return parse_modules(self.model, **settings)
        return parse_modules(
            self.model, order=seen.order, returned_to=seen.returned_to, uses=seen.uses, **settings
        )

    def check_state(self, policy_name: str, modules: Sequence[LayerModule] | None) -> None:
        """Raise StateError if a saved state is of another policy, or of a model with other
        parameters.
        """
        if policy_name != self.policy_name:
            raise StateError(
                f"A run goes on under the policy it began with; this state is of {policy_name!r}, "
                "and the run has "
                f"{self.policy_name!r}. Give policy={policy_name!r}, or go on without loading the "
                "state."
            )
        ours = {name for name, _ in self.model.named_parameters()}
        theirs = (
            ours if modules is None else {name for module in modules for name in module.parameters}
        )
        if theirs != ours:
            raise StateError(
                "A run's state fits the model it was saved from; this state is of another model, "
                "which differs in "
                f"{', '.join(sorted(theirs ^ ours)[:3])}. Attach the model that the state was "
                "saved from."
            )

    def learning_rate(self, modules: Sequence[LayerModule]) -> float:
        """Return the largest rate of the groups that train what may freeze; of all groups where
        there are none.

        A group without one (`lr` is None: `Adafactor` of transformers finds it by itself) has 0.
        """
        own = {
            id(parameter)
            for parameters in parameters_of(self.model, modules[:-1])
            for parameter in parameters
        }
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        fitting = [
            group for group in groups if any(id(parameter) in own for parameter in group["params"])
        ]
        return max(float(group.get("lr") or 0.0) for group in fitting or groups)


UNDONE = (
    "the loop switched gradients of frozen layers on, as `disable_adapter` and `set_adapter` of "
    "PEFT do for all "
    "adapters, and loops of a GAN for its discriminator: it has the last word"
)


class HarmfulFreezeError(Exception):
    """A freeze would break the training, or has; it was undone."""


def watch_order(
    training: Training, modules: Sequence[LayerModule], *, again: bool
) -> OrderRecorder | OrderOfBatch | None:
    """Record the order in which the layers run in the coming forward pass.

    In a compiled model hooks do not fire: a forward pass of our own on the same batch is recorded
    there; not `again`, where a resumed run only asks how the model is checkpointed now.
    """
    names = dict.fromkeys(
        [*(name for m in modules for name in m.submodules), *names_of_reused(training.model)]
    )
    if training.hooks.is_compiled:
        return None if again else OrderOfBatch(training.model, names, training.hooks.keep_next)
    return OrderRecorder(training.model, names, in_training=True)


def check_calls(training: Training, order: OrderRecorder | OrderOfBatch | None) -> None:
    """Check that the calls of the model can be followed.

    Raises:
        HarmfulFreezeError: they cannot.
        Exception: what was raised when a call was last looked at.
    """
    hooks = training.hooks
    failure, hooks.failure, hooks.needs_check = hooks.failure, None, False
    if failure is not None:
        raise failure
    reason = training.parallel.refusal()
    if not hooks.num_calls:
        parts = outermost(training.model, order.called_alone if order else ())
        found = (
            f"the loop calls parts of it ({', '.join(parts[:3])})"
            if parts
            else "no call in training mode was seen"
        )
        way_out = (
            "Call the model itself in the loop, model(inputs), or attach the part that is called"
        )
        if any(kind.__name__ == "LightningModule" for kind in type(training.model).__mro__):
            part = parts[0] if parts else "the name of a part"
            way_out = (
                "Call self(inputs) in training_step, or name the part that is called: "
                f"EgeriaCallback({part!r})"
            )
        reason = (
            f"the model was not called in training mode before the first step: {found}. {way_out}"
        )
    if reason:
        raise HarmfulFreezeError(reason)
