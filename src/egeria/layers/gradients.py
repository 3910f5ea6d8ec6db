"""Gradients that flow through a frozen front for nobody: found in the loop's own passes, and cut at
its boundary.

`enable_input_require_grads` of `transformers` makes the output of an embedding need a gradient, for
the sake of activation checkpointing; the backward pass then runs through every frozen layer, and
trains nothing there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from egeria import tree
from egeria.layers.copies import PlainCopies

MOST_PASSES = 100
"""Backward passes that are told apart in the first step."""
TRIES = 5
"""Optimizer steps in which a gradient must be seen to be nobody's."""
_TRAINED = (
    "a trainable tensor outside the frozen layer modules (the input, or a parameter of another "
    "module) feeds it; "
    "the backward pass runs through it"
)
_HELD = (
    "a tensor in front of it was set to require one (requires_grad_), and the loop may read its "
    "gradient; let nothing "
    "keep that tensor, or leave requires_grad_ out"
)


class InputGradients:
    """Detaches what frozen layer modules give, once it is sure that the gradients behind serve
    nobody.

    A pass is looked at where the output of a frozen module needs a gradient: the leaves that it
    comes from. With a parameter among them nothing is cut, nor where something holds on to a leaf
    when its gradient arrives or when the optimizer has stepped, or asks `autograd.grad` for its
    gradient: an input that the loop itself made to require a gradient, say. Nothing that trains is
    behind the cut, so all gradients that are left are the same, bit for bit.

    Args:
        decline: called with the reason why gradients go on to flow through the frozen modules.
    """

    def __init__(self, decline: Callable[[str], None]) -> None:
        self._decline = decline
        self._hooks: dict[nn.Module, list[Any]] = {}
        self._watches: list[Any] = []
        self._cut: set[nn.Module] = set()
        self._leaves: dict[Any, list[int]] = {}
        """Where the gradients of this step's passes end, and how many hold each leaf when they
        arrive."""
        self._asked: dict[Any, int] = {}
        """How often the gradient of such a leaf came, whether it was added up or returned by
        `autograd.grad`."""
        self._seen: set[Any] = set()
        self._has_looked = self._needs_grad = self._is_opaque = self._has_arrived = False
        self._tries, self._unheld = TRIES, (0, 0)

    def follow(self, taps: Sequence[nn.Module]) -> None:
        """Look at the outputs of these submodules from the next forward pass on; those that were
        cut before stay so.

        Args:
            taps: the submodules whose outputs are those of the frozen layer modules; none stops
                everything.
        """
        self._reset()
        for tap in [tap for tap in self._hooks if tap not in taps or tap not in self._cut]:
            for handle in self._hooks.pop(tap):
                handle.remove()
        self._cut.intersection_update(taps)
        for tap in taps:
            if tap not in self._hooks:
                self._hooks[tap] = [tap.register_forward_hook(self._look), PlainCopies(tap)]
        self._unheld = _count_unheld() if taps else (0, 0)

    def after_step(self) -> None:
        """Judge what the passes of this optimizer step have shown; the loop has zeroed or kept
        gradients by now.
        """
        leaves, asked, self._leaves, self._asked = self._leaves, self._asked, {}, {}
        self._remove_watches()
        if not self._has_looked or len(self._cut) == len(self._hooks):
            return
        if not self._needs_grad:  # nothing to cut
            self._end_look()
        elif any(isinstance(leaf.variable, nn.Parameter) for leaf in leaves) or self._is_opaque:
            self._end_look(_TRAINED)
        elif leaves and all(
            self._is_unread(leaf, counts, asked.get(leaf)) for leaf, counts in leaves.items()
        ):
            self._end_look(cuts=True)
        elif self._tries == 1:
            self._end_look(_HELD)
        else:
            tries = self._tries - 1
            self._reset()
            self._tries = tries

    def _reset(self) -> None:
        self._remove_watches()
        self._leaves, self._asked, self._seen = {}, {}, set()
        self._has_looked = self._needs_grad = self._is_opaque = self._has_arrived = False
        self._tries = TRIES

    def _remove_watches(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches = []

    def _end_look(self, reason: str = "", *, cuts: bool = False) -> None:
        """Take the hooks off that look, or have them cut from here on."""
        for tap in [tap for tap in self._hooks if tap not in self._cut]:
            for handle in self._hooks.pop(tap):
                handle.remove()
            if cuts:
                self._hooks[tap] = [tap.register_forward_hook(_detach), PlainCopies(tap)]
                self._cut.add(tap)
        self._reset()
        if reason:
            self._decline(f"its output still needs a gradient, because {reason}")

    def _look(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Look at an output; in the first passes of a step, not where one is recomputed."""
        if torch.is_grad_enabled() and not self._has_arrived:
            try:
                self._note_leaves(output)
            except Exception:  # in the forward pass of the loop: what is not understood is not cut
                self._is_opaque = True

    def _note_leaves(self, output: Any) -> None:
        """Note the leaves that an output comes from."""
        self._has_looked = True
        todo: list[Any] = [
            tensor.grad_fn or _accumulation(tensor)
            for tensor in tree.leaves(output)
            if tensor.requires_grad
        ]
        self._needs_grad = self._needs_grad or bool(todo)
        while todo:
            node = todo.pop()
            if node is None or node in self._seen:
                continue
            self._seen.add(node)
            self._is_opaque = (
                self._is_opaque or "CheckpointFunction" in node.name()
            )  # trains what is inside it
            if hasattr(node, "variable") and node not in self._leaves:
                self._leaves[node] = []
                self._watches.append(node.register_hook(partial(self._arrive, node)))
                if not isinstance(node.variable, nn.Parameter) and not any(
                    _hooks_of(node.variable)
                ):
                    self._asked[node] = 0
                    self._watches.append(node.variable.register_hook(partial(self._ask, node)))
            todo += [following for following, _ in node.next_functions]

    def _arrive(self, leaf: Any, *_gradients: Any) -> None:
        """Note that the gradient of a leaf was added up, and how many hold the leaf then."""
        self._has_arrived = True
        if leaf in self._leaves:
            self._leaves[leaf].append(sys.getrefcount(leaf.variable))

    def _ask(self, leaf: Any, _gradient: Tensor) -> None:
        """Note that the gradient of a leaf was worked out, for whoever it is."""
        if leaf in self._asked:
            self._asked[leaf] += 1

    def _is_unread(self, leaf: Any, counts: Sequence[int], num_asked: int | None) -> bool:
        """Return whether nobody can have read the gradient of a leaf.

        It was added up each time that it came (`autograd.grad` returns it instead), and nobody held
        the leaf.
        """
        arriving, after = self._unheld
        is_free = sys.getrefcount(leaf.variable) <= after and all(
            count <= arriving for count in counts
        )
        return (
            bool(counts)
            and is_free
            and num_asked == len(counts)
            and not any(_hooks_of(leaf.variable))
        )


class GradientUse:
    """Sees what the loop does with gradients of parameters, until the handles are removed.

    Args:
        parameters: of the model, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        found: Any = [(name, entry) for name, entry in parameters.items() if entry.requires_grad]
        self.handles: list[RemovableHandle] = []
        for name, parameter in found:
            self.handles.append(parameter.register_hook(partial(self._note, name)))
            self.handles.append(
                parameter.register_post_accumulate_grad_hook(partial(self._note_added, name))
            )
        self._surplus = Counter[str]()
        """By parameter, how many of its gradients were worked out and not added up."""
        self._passes: dict[int, set[str]] = {}
        """Of each backward pass the parameters that it reached."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that had a gradient."""
        return tuple(self._surplus)

    def asked(self, places: Mapping[str, int]) -> int:
        """Return the frontmost layer module of whose parameters `torch.autograd.grad` was asked for
        a gradient.

        It fails for parameters without one.

        Args:
            places: for each parameter the number of its layer module.
        """
        return min(
            (places[name] for name, count in self._surplus.items() if count > 0),
            default=len(places),
        )

    def deepest(self, places: Mapping[str, int]) -> int:
        """Return how many front layer modules may freeze; a backward pass beside one for deeper
        ones needs what trains.

        Args:
            places: for each parameter the number of its layer module.
        """
        reached = {max(places[name] for name in found) for found in self._passes.values()}
        return min(reached) if len(reached) > 1 else len(places)

    def _note(self, name: str, _gradient: Tensor) -> None:
        self._surplus[name] += 1
        if len(self._passes) < MOST_PASSES:
            current: Any = torch._C
            self._passes.setdefault(current._current_graph_task_id(), set()).add(name)

    def _note_added(self, name: str, _parameter: Tensor) -> None:
        self._surplus[name] -= 1


def _hooks_of(leaf: Tensor) -> tuple[Any, Any]:
    return leaf._backward_hooks, leaf._post_accumulate_grad_hooks


def _detach(_module: nn.Module, _args: Any, output: Any) -> Any:
    return tree.detach(output) if tree.requires_grad(output) else None


def _accumulation(leaf: Tensor) -> Any:
    """Return what adds up the gradient of a leaf."""
    function: Any = leaf.view_as(leaf).grad_fn
    return function.next_functions[0][0]


@torch.enable_grad()
def _count_unheld() -> tuple[int, int]:
    """Return the references to a leaf that nobody holds: when its gradient
    arrives, and afterwards.
    """
    output: Any = torch.zeros(1, device="cpu").requires_grad_() * 1
    leaf: Any = output.grad_fn.next_functions[0][0]
    leaves: dict[Any, list[int]] = {leaf: []}

    def arrive(leaf: Any, *_gradients: Any) -> None:
        leaves[leaf].append(sys.getrefcount(leaf.variable))

    watch = leaf.register_hook(partial(arrive, leaf))
    output.sum().backward()
    watch.remove()
    return leaves[leaf][0], sys.getrefcount(leaf.variable)


def prompts_refusal(model: nn.Module) -> str:
    """Return why a model that trains prompts by PEFT is not frozen; empty for any other."""
    settings = (
        getattr(model, "active_peft_config", None) if hasattr(model, "prompt_encoder") else None
    )
    if not getattr(settings, "is_prompt_learning", False):
        return ""
    return (
        "it trains prompts (PEFT prompt learning), which are in front of all layers: the backward "
        "pass runs through "
        "every frozen layer to them, so that freezing would save nothing"
    )
