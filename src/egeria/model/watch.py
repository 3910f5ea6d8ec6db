"""Watching the user's own passes until the first optimizer step; no pass is made for it."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.errors import brief
from egeria.model.group import Piece
from egeria.model.hooks import Hook, remove, sweep

Node = Any  # of the graph (`Tensor.grad_fn`); while it is held, it keeps its identity
_current_backward: Any = torch._C._current_graph_task_id  # the backward pass this is in, or -1


class Watch:
    """Notes which pieces ran, in which order, and where their outputs stand in the graph.

    The hooks sit on the pieces and on the modules around them, so that all passes until `close` are
    seen, also where the loop calls parts of the model one by one. Not noted is what runs without
    gradients, as a teacher does, and what a backward pass computes anew for a checkpoint.
    """

    def __init__(self, model: nn.Module, pieces: Iterable[Piece]) -> None:
        self._model = model
        self._names = {piece.module: piece.name for piece in pieces if piece.role != "direct"}
        self._stack: list[nn.Module] = []
        self._added: set[tuple[int, str]] = set()
        self._given: list[tuple[str, weakref.ref[Tensor]]] = []
        self._pass: dict[str, None] = {}
        self.order: dict[str, None] = {}  # pieces that ran, by their last call in a pass
        self.nodes = defaultdict[str, list[Node]](list)  # of the outputs of a piece
        self.rows = Counter[str]()  # vectors that the weights of a piece were multiplied with
        self.outputs: list[Node] = []  # of what the outermost calls returned
        self.backwards = defaultdict[Node, set[int]](set)  # that gave an output a gradient
        self.passes = defaultdict[int, set[str]](set)  # parameters that each backward pass reached
        self.read: set[str] = set()  # pieces whose outputs' gradient the loop reads
        self.num_calls = 0  # of the model: one for each micro-batch
        self.failure = ""  # of a hook: nothing is noted from then on, and no cut can be made

    @property
    def asked(self) -> set[str]:
        """Parameters whose gradient was worked out and not added up: by `torch.autograd.grad`."""
        reached = {(task, name) for task, names in self.passes.items() for name in names}
        return {name for _, name in reached - self._added}

    def open(self) -> None:
        """Put the hooks on."""
        inner = {part for module in self._names for part in module.modules() if part is not module}
        for module in self._model.modules():
            if module not in inner or module in self._names:
                module.register_forward_pre_hook(self._hook(Watch._enter))
                module.register_forward_hook(self._hook(Watch._leave), always_call=True)
        named: Any = self._model.named_parameters()
        for name, entry in [(name, entry) for name, entry in named if entry.requires_grad]:
            entry.register_hook(self._hook(Watch._note_gradient, name=name))
            entry.register_post_accumulate_grad_hook(self._hook(Watch._note_added, name=name))

    def close(self) -> None:
        """Take the hooks off; what was noted stays readable. Can be called again."""
        sweep(self._model, self)
        for parameter in self._model.parameters():
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if (table := getattr(parameter, name)) is not None:
                    remove(table, self)
                    if not table:  # an empty one is called in each backward pass
                        setattr(parameter, name, None)
        self._end_pass()

    def _hook(self, note: Callable[..., None], **given: Any) -> Hook:
        return Hook(self, partial(Watch._guarded, note=partial(note, **given)))

    def _guarded(self, *args: Any, note: Callable[..., None]) -> None:
        """Note something in a pass of the user's, which no error of ours may stop."""
        try:
            if torch.compiler.is_compiling():
                self.failure = "it was compiled behind attach. Compile it before"
            if not self.failure:
                note(self, *args)
        except Exception as error:
            self.failure = brief(error)

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if module is self._model:
            self._stack.clear()
            self._end_pass()
            if all(parameter.grad is None for parameter in module.parameters()):
                self.num_calls = 0  # the step that it was part of was left out, or is not over
        if _current_backward() == -1 and torch.is_grad_enabled():
            self._stack.append(module)

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        if module not in self._stack or _current_backward() != -1:
            return
        while self._stack.pop() is not module:
            pass
        found = tree.tensors(output)
        if module in self._names and output is not None:  # of a call that raised it is None
            self._note_piece(self._names[module], module, found)
        if self._stack:
            return
        for tensor in [tensor for tensor in found if tensor.grad_fn is not None]:
            self.outputs.append(tensor.grad_fn)
            tensor.register_hook(self._hook(Watch._note_backward, node=tensor.grad_fn))  # type: ignore[no-untyped-call]
        self.num_calls += module is self._model
        self._find_readers()

    def _find_readers(self) -> None:
        """Look for outputs whose gradient is read: of what is frozen that would raise an error."""
        for name, tensor in [(name, given()) for name, given in self._given]:
            hooks: Any = getattr(tensor, "_backward_hooks", None) or {}
            modules = [getattr(hook, "__module__", None) or "" for hook in hooks.values()]
            own = [not module.startswith(("torch.", "egeria.")) for module in modules]
            if tensor is not None and (tensor.retains_grad or any(own)):
                self.read.add(name)

    def _note_backward(self, _gradient: Tensor, *, node: Node) -> None:
        self.backwards[node].add(_current_backward())

    def _note_gradient(self, _gradient: Tensor, *, name: str) -> None:
        self.passes[_current_backward()].add(name)

    def _note_added(self, _parameter: Tensor, *, name: str) -> None:
        self._added.add((_current_backward(), name))

    def _note_piece(self, name: str, module: nn.Module, found: list[Tensor]) -> None:
        self._given += [(name, weakref.ref(tensor)) for tensor in found]
        self._pass.pop(name, None)
        self._pass[name] = None
        self.rows[name] += _count_rows(module, found)
        self.nodes[name] += [tensor.grad_fn for tensor in found if tensor.grad_fn is not None]

    def _end_pass(self) -> None:
        """Add what is new in a pass to the order, in front of what followed there."""
        self._find_readers()
        self._given.clear()
        order, place = list(self.order), len(self.order)
        for name in reversed(self._pass):
            if name not in self.order:
                order.insert(place, name)
            place = order.index(name)
        self.order, self._pass = dict.fromkeys(order), {}


def _count_rows(module: nn.Module, found: list[Tensor]) -> int:
    """Return the number of vectors in the output of a module; those of images are their pixels."""
    output = next((tensor for tensor in found if tensor.dim() > 1), None)
    if output is None:
        return 1
    convolutions = (nn.Conv2d, nn.Conv3d)
    is_image = output.dim() > 3 and any(isinstance(part, convolutions) for part in module.modules())
    return output.numel() // max(1, output.shape[1 if is_image else -1])


def reach(starts: Iterable[Node], stop: Collection[Node] = ()) -> set[Node]:
    """Return `starts` and the nodes that are reached from them, but nothing in or behind `stop`."""
    waiting, seen = list(starts), set()
    while waiting:
        node = waiting.pop()
        if node not in seen and node not in stop:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return seen


def sinks(outputs: Iterable[Node]) -> list[Node]:
    """Return the outputs that no other output is computed from, each once."""
    unique = list(dict.fromkeys(outputs))
    parents = [parent for node in unique for parent, _ in node.next_functions]
    inner = reach(parent for parent in parents if parent is not None)
    return [node for node in unique if node not in inner]
