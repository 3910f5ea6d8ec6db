"""Seeing whether a model runs under `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def without_wrapper(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` was given; any other module as it is."""
    is_wrapped = any(kind.__name__ == "OptimizedModule" for kind in type(model).__mro__)
    return model._orig_mod if is_wrapped else model  # type: ignore[return-value]


def is_compiled(model: nn.Module) -> bool:
    """Tell whether the model or a part of it was compiled in place (`model.compile()`)."""
    return any(module._compiled_call_impl is not None for module in model.modules())


compiling_callback: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
"""Returns what compiles the functions called now; None or False where nothing does. Not to be called by a function of
its own, which would be compiled first."""
