"""`run.model`: what the loop calls in place of the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from egeria.layers.batch import Batch
from egeria.layers.compiled import compiling_callback, is_compiled, without_wrapper


class ModelHandle(nn.Module):
    """Stands for a model: same parameters, submodules, state and attributes, one call in between.

    The handle holds no tensors and no copy of anything: it shares the tables of the model itself, so
    that names, `state_dict` and `.to()` are the model's own. What it adds is a look at the arguments
    of a training forward when an evaluation is due.
    """

    def __init__(self, model: nn.Module) -> None:
        self.__dict__["_bare"] = self
        super().__init__()
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = model.__dict__[table]
        self.__dict__["_bare"] = model
        self.__dict__["_target"] = model
        self.__dict__["_keep"] = None
        self.__dict__["_skip"] = None
        self.__dict__["_before"] = None
        self.__dict__["_notice"] = None
        self.__dict__["is_compiled"] = is_compiled(model)

    @property
    def training(self) -> bool:
        """The mode of the model."""
        return bool(self.__dict__["_bare"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        if self.__dict__["_bare"] is not self:  # nn.Module's own constructor sets it first
            self.__dict__["_bare"].training = mode

    def keep_next(self, keep: Callable[[Batch], None] | None) -> None:
        """Hand the arguments of coming training forwards to `keep`; None stops that."""
        self.__dict__["_keep"] = keep

    def skip_with(self, skip: Callable[[Callable[[], Any], Batch], Any] | None) -> None:
        """Let `skip` make the training forwards: it is given the call and its arguments; None stops that."""
        self.__dict__["_skip"] = skip

    def call_before(self, before: Callable[[], None] | None) -> None:
        """Call `before` ahead of each training forward; None stops that."""
        self.__dict__["_before"] = before

    def call_instead(self, target: nn.Module) -> None:
        """Forward calls to `target` from now on: the model, or a wrapper around it."""
        self.__dict__["_target"] = target
        if without_wrapper(target) is not target:
            self.note_compiled()

    def when_compiled(self, notice: Callable[[], None]) -> None:
        """Call a method once calls turn out to be compiled, before the first of them is, if its owner still lives."""
        self.__dict__["_notice"] = weakref.WeakMethod(notice)

    def note_compiled(self) -> None:
        """Take note that calls are compiled from now on."""
        if not self.__dict__["is_compiled"]:
            self.__dict__["is_compiled"] = True
            notice = self.__dict__["_notice"]() if self.__dict__["_notice"] else None
            if notice is not None:
                notice()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if torch.compiler.is_compiling():  # only in this very function does that leave the handle out
            torch._dynamo.skip_frame("egeria: a handle is called as it is, and what it calls is compiled")
        is_called_compiled = compiling_callback() not in (None, False)
        disable: Any = torch.compiler.disable
        prepare = disable(self._prepare) if is_called_compiled else self._prepare
        batch = prepare(args, kwargs, is_called_compiled)
        target, skip = self.__dict__["_target"], self.__dict__["_skip"]
        if batch is None or skip is None:
            return target(*args, **kwargs)
        return skip(partial(target, *args, **kwargs), batch)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_called_compiled: bool) -> Batch | None:
        """Do what is to be done ahead of a call; return its arguments where somebody needs them."""
        bare: nn.Module = self.__dict__["_bare"]
        if not self.__dict__["is_compiled"] and (is_called_compiled or bare._compiled_call_impl is not None):
            self.note_compiled()
        keep, skip, before = self.__dict__["_keep"], self.__dict__["_skip"], self.__dict__["_before"]
        is_idle = keep is None and skip is None and before is None
        if is_idle or not bare.training or not torch.is_grad_enabled():
            return None
        if before is not None:
            before()
        if keep is None and skip is None:
            return None
        device = next((parameter.device.type for parameter in bare.parameters()), "cpu")
        batch = Batch.of_call(args, kwargs, device)
        if keep is not None:
            keep(batch)
        return batch

    def train(self, mode: bool = True) -> ModelHandle:
        """Set the mode of the model."""
        self.__dict__["_target"].train(mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model in place."""
        self.__dict__["_bare"].compile(*args, **kwargs)
        self.note_compiled()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model, under its own names."""
        return self.__dict__["_bare"].state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state of the model."""
        return self.__dict__["_bare"].load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self.__dict__["_bare"], name)
        except AttributeError:
            if self.__dict__["_target"] is self.__dict__["_bare"]:
                raise
            return getattr(self.__dict__["_target"], name)  # what a wrapper has, such as `no_sync`

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
