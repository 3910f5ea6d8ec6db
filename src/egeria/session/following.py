"""Following a model in training: the hook on it, what skips its forward, its cut into modules, its execution order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from egeria.config import Config
from egeria.errors import StateError
from egeria.journal import Recorder
from egeria.layers.batch import Batch
from egeria.layers.copies import PlainCopies
from egeria.layers.modules import LayerModule, count_trainable, parse_modules
from egeria.layers.order import CallOrder, OrderOfBatch, OrderRecorder
from egeria.layers.shards import compiling_callback, is_compiled, is_sharded, run_uncompiled
from egeria.layers.undisturbed import is_own_pass
from egeria.parallel import ParallelStrategy
from egeria.session.ranks import Ranks
from egeria.session.showing import outermost


class ModelHooks:
    """Watches the training calls of a model by one hook on the model itself: the loop calls what it always called.

    Calls in evaluation mode or without gradients, and passes of our own, go by unseen. Inside compiled code the hook
    is left out; a model that is compiled as such runs it ahead of its graphs.

    Args:
        model: without any wrapper.
        parallel: how several processes train together; it learns from the first call what wraps the model.
    """

    def __init__(self, model: nn.Module, parallel: ParallelStrategy) -> None:
        self.model, self._parallel = model, parallel
        self.is_compiled = is_compiled(model) or parallel.is_compiled
        self.was_called = False
        """Whether there was a training call."""
        self._keep: Callable[[Batch], None] | None = None
        self._skip: Callable[[Callable[[], Any], Batch], Any] | None = None
        self._before: Callable[[], None] | None = None
        self._notice: weakref.WeakMethod[Callable[[], None]] | None = None
        self._batch: Batch | None = None
        """Arguments of the call under way, for `forward`."""
        self._handles: list[RemovableHandle | PlainCopies] = []

    def open(self) -> None:
        """Put the hook on the model, ahead of those of others."""
        if self._handles:
            return
        called = self._parallel.called if self._parallel.is_compiled else None
        is_of_torch = type(self.model).forward.__module__.startswith("torch.")  # which compiles its hooks too
        for module in (self.model, called) if called is not None and is_of_torch else (self.model,):
            hook = module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            self._handles += [hook, PlainCopies(module)]
        self._handles += map(PlainCopies, self.model.modules())

    def close(self) -> None:
        """Leave the model as it was found."""
        self.skip_with(None)
        self._keep = self._before = self._notice = None
        while self._handles:
            self._handles.pop().remove()

    def keep_next(self, keep: Callable[[Batch], None] | None) -> None:
        """Hand the arguments of coming training calls to `keep`; None stops that."""
        self._keep = keep

    def call_before(self, before: Callable[[], None] | None) -> None:
        """Call `before` ahead of each training call; None stops that."""
        self._before = before

    def skip_with(self, skip: Callable[[Callable[[], Any], Batch], Any] | None) -> None:
        """Let `skip` make the forward passes: it is given the model's own and its arguments; None stops that."""
        attributes, self._skip = vars(self.model), skip
        mine = isinstance(attributes.get("forward"), SkippingForward)
        if skip is not None and not mine:
            attributes["forward"] = SkippingForward(self, self.model.forward, attributes.get("forward"))
        elif skip is None and mine:
            attributes.pop("forward").restore(attributes)

    def when_compiled(self, notice: Callable[[], None]) -> None:
        """Call a method once calls turn out to be compiled, before the first of them is, if its owner still lives."""
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
    def _before_forward(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See a call of the model; the function itself is never compiled."""
        if torch.compiler.is_compiling() or is_own_pass():
            return
        is_called_compiled = compiling_callback() not in (None, False)
        disable: Any = torch.compiler.disable
        prepare = disable(self._prepare) if is_called_compiled else self._prepare
        prepare(args, kwargs, is_called_compiled)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_called_compiled: bool) -> None:
        self._batch = None
        if is_called_compiled or self.model._compiled_call_impl is not None:
            self.note_compiled()
        if not self.model.training or not torch.is_grad_enabled():
            return
        self.was_called = True
        self._parallel.see_call()
        if self._before is not None:
            self._before()
        if self._keep is None and self._skip is None:
            return
        device = next((parameter.device.type for parameter in self.model.parameters()), "cpu")
        batch = Batch.of_call(args, kwargs, device)
        if self._keep is not None:
            self._keep(batch)
        if self._skip is not None:
            self._batch = batch


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

    @run_uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the forward pass, or have the cache make it."""
        return self._hooks.forward(partial(self.__wrapped__, *args, **kwargs))

    def restore(self, attributes: dict[str, Any]) -> None:
        """Give a model its own `forward` back."""
        if self.own_forward is not None:
            attributes["forward"] = self.own_forward


class ModelHandle(nn.Module):
    """Stands for a model: same parameters, submodules, state and attributes; calls go to the wrapper, if it has one.

    A bare model in a job of several processes is wrapped in `DistributedDataParallel` when the handle is called.
    The handle shares the tables of the model itself, so that names, `state_dict` and `.to()` are the model's own.
    """

    def __init__(self, hooks: ModelHooks, parallel: ParallelStrategy) -> None:
        attributes = self.__dict__
        attributes["_bare"] = self
        super().__init__()
        model = hooks.model
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            attributes[table] = model.__dict__[table]
        attributes |= {"_bare": model, "_hooks": hooks, "_parallel": parallel}

    @property
    def training(self) -> bool:
        """The mode of the model."""
        return bool(self._bare.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if self._bare is not self:  # nn.Module's own constructor sets it first
            self._bare.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if torch.compiler.is_compiling():  # only in this very function does that leave the handle out
            torch._dynamo.skip_frame("egeria: a handle is called as it is, and what it calls is compiled")
        called, disable = self._parallel.called, cast(Any, torch.compiler.disable)
        if called is None:
            is_training = self._bare.training and torch.is_grad_enabled()
            called = disable(self._parallel.wrap)() if is_training else self._bare
        return called(*args, **kwargs)

    def train(self, mode: bool = True) -> ModelHandle:
        """Set the mode of the model."""
        called = self._parallel.called
        (self._bare if called is None else called).train(mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model in place."""
        self._bare.compile(*args, **kwargs)
        self._hooks.note_compiled()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model, under its own names."""
        return self._bare.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state of the model."""
        return self._bare.load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self.__dict__["_bare"], name)
        except AttributeError:
            parallel = self.__dict__.get("_parallel")
            if parallel is None or parallel.called is self._bare:
                raise
            if parallel.called is None and not hasattr(DistributedDataParallel, name):
                raise
            return getattr(parallel.wrap(), name)  # what a wrapper has, such as `no_sync`

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_bare"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_bare"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            "run.model is a handle on the attached model and is not copied itself. Copy the model you gave to attach."
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "run.model is a handle on the attached model and is not pickled itself. "
            "Save run.model.state_dict(), or the model you gave to attach."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What the user trains, as `attach` was given it, with whom, and where what happens is noted."""

    model: nn.Module
    """Without any wrapper."""
    hooks: ModelHooks
    optimizers: Sequence[Optimizer]
    config: Config
    total_steps: int | None
    parallel: ParallelStrategy
    ranks: Ranks
    recorder: Recorder

    @property
    def policy_name(self) -> str:
        """The name of the policy, or of what makes it."""
        name = self.config.policy.name
        return name if isinstance(name, str) else getattr(name, "__qualname__", type(name).__name__)

    @property
    def is_sharded(self) -> bool:
        """Whether each process has a part of the parameters only."""
        return is_sharded(self.model)

    def parse(self, order: Sequence[str] | None = None) -> tuple[LayerModule, ...]:
        """Return the layer modules, in the order of execution where that is known."""
        settings = self.config.modules
        shares = {"target_share": settings.target_share, "minimum_share": settings.minimum_share}
        return parse_modules(self.model, pattern=settings.pattern, order=order, **shares)

    def check_state(self, policy_name: str, modules: Sequence[LayerModule] | None) -> None:
        """Raise StateError if a saved state is of another policy, or of a model with other parameters."""
        if policy_name != self.policy_name:
            raise StateError(
                f"A run goes on under the policy it began with; this state is of {policy_name!r}, and the run has "
                f"{self.policy_name!r}. Give policy={policy_name!r}, or go on without loading the state."
            )
        ours = {name for name, _ in self.model.named_parameters()}
        theirs = ours if modules is None else {name for module in modules for name in module.parameters}
        if theirs != ours:
            raise StateError(
                f"A run's state fits the model it was saved from; this state is of another model, which differs in "
                f"{', '.join(sorted(theirs ^ ours)[:3])}. Attach the model that the state was saved from."
            )

    def learning_rate(self, modules: Sequence[LayerModule]) -> float:
        """Return the largest rate of the groups that train what may freeze; of all groups where there are none."""
        own = {id(self.model.get_parameter(name)) for module in modules[:-1] for name in module.parameters}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        fitting = [group for group in groups if any(id(parameter) in own for parameter in group["params"])]
        return max(float(group["lr"]) for group in fitting or groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The layer modules of a model, and how many of them may freeze."""

    modules: tuple[LayerModule, ...]
    trainable: tuple[bool, ...]
    """Whether each has any parameter to train."""
    num_trainable: tuple[int, ...]
    """Elements of the parameters of each that train; of fully trainable models its `num_parameters`."""
    deepest_freeze: int
    """The largest number of front modules that may be frozen."""

    @classmethod
    def of(cls, training: Training, modules: Sequence[LayerModule], returned_to: Collection[str] = ()) -> Cut:
        """Return the cut into these layer modules.

        To freeze one that is called again after active modules, in `returned_to`, saves nothing: the backward pass
        runs through it.
        """
        model = training.model
        chain = next((index for index, m in enumerate(modules) if m.tap in returned_to), len(modules) - 1)
        return cls(
            modules=tuple(modules),
            num_trainable=tuple(count_trainable(model, module) for module in modules),
            trainable=tuple(any(model.get_parameter(n).requires_grad for n in m.parameters) for m in modules),
            deepest_freeze=min(chain, _deepest_with_busy_optimizers(training, modules)),
        )

    @classmethod
    def in_order(cls, training: Training, seen: CallOrder) -> Cut:
        """Return the cut in the order in which layers were seen to run.

        Raises:
            HarmfulFreezeError: no gradient would come through a frozen layer.
        """
        if seen.without_grad:
            raise HarmfulFreezeError(
                f"{min(seen.without_grad)} runs under reentrant activation checkpointing, which loses every "
                f"gradient behind a frozen layer. Use torch.utils.checkpoint with use_reentrant=False"
            )
        cut = cls.of(training, training.parse(seen.order), seen.returned_to)
        limit = cut.modules[cut.deepest_freeze]
        if limit.tap in seen.returned_to:
            reason = f"{limit.tap} is called again after layers behind it, so freezing it would save nothing"
            training.recorder.decline(f"freezing {limit.name} and what follows", reason)
        return cut

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of journal events about a cut."""
        pairs = zip(self.modules, self.num_trainable, strict=True)
        modules = [module.to_dict() | {"num_trainable": count} for module, count in pairs]
        return {"modules": modules, "trainable": list(self.trainable), "deepest_freeze": self.deepest_freeze}


def _deepest_with_busy_optimizers(training: Training, modules: Sequence[LayerModule]) -> int:
    """Return how many front modules may freeze such that every optimizer keeps something to train.

    An optimizer without any gradient is an error to `GradScaler.step` ("No inf checks were recorded").
    """
    owner = {id(training.model.get_parameter(n)): index for index, m in enumerate(modules) for n in m.parameters}
    deepest = last = len(modules) - 1
    for optimizer in training.optimizers:
        parameters = [entry for group in optimizer.param_groups for entry in group["params"] if entry.requires_grad]
        deepest = min(deepest, max((owner.get(id(entry), last) for entry in parameters), default=last))
    return deepest


class HarmfulFreezeError(Exception):
    """A freeze would break the training, or has; it was undone."""


def watch_order(training: Training, modules: Sequence[LayerModule]) -> OrderRecorder | OrderOfBatch:
    """Record the order in which the layers run in the coming forward pass.

    In a compiled model hooks do not fire: a forward pass of our own on the same batch is recorded there.
    """
    names = [name for module in modules for name in module.submodules]
    if training.hooks.is_compiled:
        return OrderOfBatch(training.model, names, training.hooks.keep_next)
    return OrderRecorder(training.model, names)


def check_calls(training: Training, order: OrderRecorder | OrderOfBatch | None) -> None:
    """Check, at the first step, that the calls of the model can be followed.

    Raises:
        HarmfulFreezeError: they cannot.
    """
    reason = training.parallel.refusal()
    if not training.hooks.was_called:
        parts = outermost(training.model, order.called_alone if order else ())
        found = f"the loop calls parts of it ({', '.join(parts[:3])})" if parts else "no call in training mode was seen"
        way_out = "Call the model itself in the loop, model(inputs), or attach the part that is called"
        if any(kind.__name__ == "LightningModule" for kind in type(training.model).__mro__):
            part = parts[0] if parts else "the name of a part"
            way_out = f"Call self(inputs) in training_step, or name the part that is called: EgeriaCallback({part!r})"
        reason = f"the model was not called in training mode before the first step: {found}. {way_out}"
    if reason:
        raise HarmfulFreezeError(reason)
