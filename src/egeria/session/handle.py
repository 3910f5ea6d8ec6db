"""What a run hands out beside itself: `run.model`, which stands for the model, and `run.packed`,
its state.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from egeria.errors import StateError
from egeria.parallel import ParallelStrategy
from egeria.session.following import ModelHooks

if TYPE_CHECKING:  # it takes half a second to import
    from torch.distributed.checkpoint.stateful import Stateful


class ModelHandle(nn.Module):
    """Stands for a model: same parameters, submodules, state and attributes; calls go to the
    wrapper, if it has one.

    A bare model in a job of several processes is wrapped in `DistributedDataParallel` when the
    handle is called. The handle shares the tables of the model itself, so that names, `state_dict`
    and `.to()` are the model's own.
    """

    def __init__(self, hooks: ModelHooks, parallel: ParallelStrategy) -> None:
        attributes = self.__dict__
        attributes["_bare"] = self
        super().__init__()
        model = hooks.model
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            attributes[table] = getattr(
                model, table
            )  # of what torch.jit.trace made they are not in its `__dict__`
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
        if (
            torch.compiler.is_compiling()
        ):  # only in this very function does that leave the handle out
            torch._dynamo.skip_frame(
                "egeria: a handle is called as it is, and what it calls is compiled"
            )
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
            "run.model is a handle on the attached model and is not copied itself. Copy the model "
            "you gave to attach."
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "run.model is a handle on the attached model and is not pickled itself. "
            "Save run.model.state_dict(), or the model you gave to attach."
        )


class Packed:
    """The state of a run in one piece.

    `torch.distributed.checkpoint` takes states apart and loads them entry by entry into a state
    that has the same entries; those of a run come and go. In one piece there is one entry, and all
    processes load the same. It must be that of the first: save with
    `DefaultSavePlanner(dedup_save_to_lowest_rank=True)`. Others have the decisions, but not the
    reference model and what was measured since the last evaluation, which are made again then.
    """

    def __init__(self, run: Stateful) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        """Return the state as one entry of bytes."""
        file = io.BytesIO()
        torch.save(self._run.state_dict(), file)
        return {"state": file.getvalue()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            StateError: it is of another egeria, or of another model. Nothing has changed then.
        """
        try:
            loaded = torch.load(io.BytesIO(state["state"]), map_location="cpu", weights_only=True)
        except Exception as error:
            raise StateError(
                f"The state of a run is what run.packed saved; this one cannot be read ({error}). "
                f"Take an earlier checkpoint, or go on without loading it."
            ) from error
        self._run.load_state_dict(loaded)
