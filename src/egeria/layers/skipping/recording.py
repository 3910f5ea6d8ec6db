"""Recording what crosses the boundary from the user's own forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from egeria import tree
from egeria.layers.skipping.crossing import Leaf
from egeria.layers.skipping.probe import is_unsettled
from egeria.layers.skipping.refusals import require
from egeria.layers.skipping.replay import Place, Template


class Recording:
    """What hooks on the frozen layers saw of the user's own forward pass.

    Args:
        leaves: the tensors to record.
        template: the roots, each called once, and the kinds of what they give.
        modes: submodules whose mode matters, by name.
    """

    def __init__(self, leaves: Sequence[Leaf], template: Template, modes: Sequence[tuple[str, nn.Module]]) -> None:
        self._leaves, self._modes = tuple(leaves), modes
        self._roots, self._forms = template.roots, template.forms
        self._calls: dict[str, int] = {}
        self._values: dict[Place, Tensor] = {}
        self._unfit = ""

    def rows(self) -> list[Tensor]:
        """Return what crossed, one tensor [B, ...] for each of the prefix's `row_leaves`; copies.

        Raises:
            UncacheableError: the frozen layers did not run as they did when they were tried out.
        """
        for root in self._roots:
            number = self._calls.get(root, 0)
            require(number == 1, f"{root} was called {number} times in a forward pass, and once when it was tried out")
        require(not self._unfit, self._unfit)
        unsettled = next((name for name, module in self._modes if is_unsettled(module)), "")
        require(not unsettled, f"{unsettled} is in training mode, and was in inference mode when it was tried out")
        return [self._values[leaf.place].movedim(leaf.axis or 0, 0) for leaf in self._leaves]

    def note(self, root: str, output: Any) -> None:
        """Take what a root gave."""
        self._calls[root] = self._calls.get(root, 0) + 1
        tensors = list(tree.leaves(output))
        for leaf in self._leaves:
            if leaf.root != root:
                continue
            form = self._forms[leaf.place]
            value = tensors[leaf.index] if leaf.index < len(tensors) else None
            if value is None or value.dim() != len(form.shape) or value.dtype != form.dtype:
                self._unfit = f"{root} gave something of another kind than when it was tried out"
            elif value.requires_grad:
                self._unfit = f"what {root} gives needs a gradient now: something in front of it is in training"
            else:
                self._values[leaf.place] = value.detach().clone()  # an in-place operation behind may overwrite it


def watch(recording: Recording, name: str, root: nn.Module) -> RemovableHandle:
    """Let a recording see what a root gives, until the handle is removed."""
    return root.register_forward_hook(partial(_note, recording, name))


# A function of this file, not a closure: some models copy themselves in their forward pass.


def _note(recording: Recording, root: str, _module: nn.Module, _args: Any, output: Any) -> None:
    recording.note(root, output)
