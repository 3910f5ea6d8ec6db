"""Why frozen layers cannot be skipped: what can be told before the model runs on trial, and after one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from egeria.errors import EgeriaError, UncacheableError
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.layers.skipping.probe import Trial


def require(condition: bool, reason: str) -> None:
    """Refuse for a reason.

    Raises:
        UncacheableError: the condition does not hold.
    """
    if not condition:
        raise UncacheableError(reason)


@contextmanager
def refusing() -> Iterator[None]:
    """Turn whatever goes wrong in a trial, such as a lack of memory, into a refusal.

    Raises:
        UncacheableError: something went wrong in the block.
    """
    try:
        yield
    except EgeriaError:
        raise
    except Exception as error:
        raise UncacheableError(f"a trial run of the frozen layers failed with {_tell(error)}") from error


def check_prefix(model: nn.Module, modules: Sequence[LayerModule], roots: Mapping[str, nn.Module]) -> None:
    """Make sure that nothing about the frozen layers forbids to skip them.

    Raises:
        UncacheableError: they train, are hooked or compiled.
    """
    names = [name for module in modules for name in module.parameters]
    inside = [f"{name}.{key}".strip(".") for name, root in roots.items() for key, _ in root.named_parameters()]
    own = dict(model.named_parameters(remove_duplicate=False))
    trained = next((name for name in [*names, *inside] if own[name].requires_grad), None)
    require(
        trained is None,
        f"{trained} is in training still, and what the frozen layers give changes with it; if it is tied to a "
        f'layer behind them, set freezing.tied = "freeze"',
    )
    for name, module in _covered(model, roots):
        hooks = [*module._forward_hooks.values()]
        require(
            not hooks,
            f"there is a forward hook on {name}, which would read what stands in for skipped layers; remove it "
            f"({getattr(hooks[0], '__qualname__', type(hooks[0]).__qualname__) if hooks else ''})",
        )
    for name, module in model.named_modules():
        is_around = not name or any(root == name or root.startswith(name + ".") for root in roots)
        is_compiled = module._compiled_call_impl is not None or isinstance(module, torch.jit.ScriptModule)
        require(
            not (is_around and (is_compiled or "_orig_mod" in module._modules)),
            f"{name or 'the model'} is compiled, so that no frozen layer in it can be left out; compile the parts "
            f"that stay in training",
        )


def check_batch(batch: Batch) -> None:
    """Make sure that no gradient is wanted in front of the model.

    Raises:
        UncacheableError: one is.
    """
    require(
        not batch.needs_grad,
        "something in front of the model is in training, so the boundary needs a gradient",
    )


def check_runs_once() -> None:
    """Make sure that the pass under way is not run again for its gradients, as activation checkpointing does.

    Both runs must save the same tensors, so that neither may skip what the other computes. They are told by hooks
    on saved tensors, which offloading sets too.

    Raises:
        UncacheableError: it may be.
    """
    require(
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        "the whole model is called under activation checkpointing or other hooks on saved tensors, which may run it "
        "twice; checkpoint the parts that stay in training",
    )


def check_run(trial: Trial) -> None:
    """Make sure that a run of the whole model shows nothing that forbids to skip its frozen layers.

    Raises:
        UncacheableError: it does.
    """
    seen = trial.seen
    if trial.outcome is None:
        raise UncacheableError(f"the model cannot be run on one batch again: {_tell(trial.error)}")
    require(
        not seen.needs_grad,
        f"what {next(iter(seen.needs_grad), '')} gives needs a gradient: something in front of it is in training",
    )
    name, kind = next(iter(seen.unsettled.items()), ("", ""))
    require(not kind, f"a {kind} in {name} is in training mode, so that a sample gives something else each time")
    require(
        not seen.opaque,
        f"{next(iter(seen.opaque), '')} gives an object of its own with tensors inside, which cannot be stored; "
        f"return tensors, tuples or dictionaries",
    )
    require(
        not trial.changed,
        f"the frozen layers set {next(iter(trial.changed), '')} in every forward pass, and whatever reads it would "
        f"find an old value",
    )
    require(trial.outcome.is_finite, "the output of the model has NaN in it")


def called(trial: Trial, root: str) -> str:
    """Return how often a root was called, as words for a reason."""
    number = trial.seen.calls.get(root, 0)
    return f"{root} is called {number} times in a forward pass" if number else f"{root} is not called"


def _tell(error: Exception | None) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _covered(model: nn.Module, roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are frozen whole: the roots, what is in them, and containers of nothing else."""
    inside = {id(module) for root in roots.values() for module in root.modules()}
    for name, module in model.named_modules():
        parts = [part for part in module.modules() if not any(True for _ in part.children())]
        if all(id(part) in inside for part in parts):
            yield name, module
