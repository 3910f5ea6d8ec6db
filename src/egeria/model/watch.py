"""Watches the user's own passes up to the first optimizer step, without passes of our own."""

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

Node = Any  # of the autograd graph (`Tensor.grad_fn`); its identity lasts while it is held
_current_backward: Any = torch._C._current_graph_task_id  # the current backward pass, or -1


class Watch:
    """Notes which pieces ran, in which order, and where their outputs are in the graph.

    The hooks are on the pieces and on the modules around them, so that all passes up to `close` are
    seen, also if the loop calls parts of the model one by one. What runs without gradients, as a
    teacher does, is not noted, nor what a checkpoint recomputes in the backward pass.
    """

    def __init__(self, model: nn.Module, pieces: Iterable[Piece]) -> None:
        self._model = model
        self._names = {piece.module: piece.name for piece in pieces if piece.role != "direct"}
        self._stack: list[nn.Module] = []
        self._given: list[tuple[str, weakref.ref[Tensor]]] = []
        self._pass: dict[str, None] = {}
        self.order: dict[str, None] = {}  # pieces that ran, in the order of their last calls
        self.nodes = defaultdict[str, list[Node]](list)  # of the outputs of a piece
        self.rows = Counter[str]()  # vectors that the weights of a piece were multiplied with
        self.outputs: list[Node] = []  # of the outermost calls
        self.reached = defaultdict[int, set[Node]](set)  # outputs by backward pass
        self.passes = defaultdict[int, set[str]](set)  # parameters by backward pass
        self._added = defaultdict[int, set[str]](set)  # those of them whose `grad` was written
        self.read: set[str] = set()  # pieces whose output gradient the loop reads
        self.num_calls = 0  # calls of the model: one for each micro-batch
        self.failure = ""  # of a hook; then nothing more is noted, and no cut can be made

    @property
    def asked(self) -> set[str]:
        """Parameters whose gradient was computed but not accumulated: by `torch.autograd.grad`."""
        return {name for task, own in self.passes.items() for name in own - self._added[task]}

    def open(self) -> None:
        """Register the hooks."""
        inner = {part for module in self._names for part in module.modules() if part is not module}
        for module in self._model.modules():
            if module not in inner or module in self._names:
                module.register_forward_pre_hook(self._hook(Watch._enter))
                module.register_forward_hook(self._hook(Watch._leave), always_call=True)
        named: Any = self._model.named_parameters()
        for name, entry in [(name, entry) for name, entry in named if entry.requires_grad]:
            entry.register_hook(self._hook(Watch._note_backward, notes=self.passes, entry=name))
            added = self._hook(Watch._note_backward, notes=self._added, entry=name)
            entry.register_post_accumulate_grad_hook(added)

    def close(self) -> None:
        """Remove the hooks; the notes stay. Can be called again."""
        sweep(self._model, self)
        for parameter in self._model.parameters():
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if (table := getattr(parameter, name)) is not None:
                    remove(table, self)
                    if not table:  # an empty one costs time in each backward pass
                        setattr(parameter, name, None)
        self._end_pass()

    def _hook(self, note: Callable[..., None], **given: Any) -> Hook:
        return Hook(self, partial(Watch._guarded, note=partial(note, **given)))

    def _guarded(self, *args: Any, note: Callable[..., None]) -> None:
        """Note something in a pass of the user's, which must not stop at an error of ours."""
        try:
            if torch.compiler.is_compiling():
                self.failure = "it was compiled after attach. Compile it before"
            if not self.failure:
                note(self, *args)
        except Exception as error:
            self.failure = brief(error)

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if module is self._model:
            self._stack.clear()
            self._end_pass()
            if all(parameter.grad is None for parameter in module.parameters()):
                self.num_calls = 0  # that step was skipped, or is not over
        if _current_backward() == -1 and torch.is_grad_enabled():
            self._stack.append(module)

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        if module not in self._stack or _current_backward() != -1:
            return
        while self._stack.pop() is not module:
            pass
        found = tree.tensors(output)
        if module in self._names and output is not None:  # it is None if the call raised
            name = self._names[module]
            self._given += [(name, weakref.ref(tensor)) for tensor in found]
            self._pass.pop(name, None)
            self._pass[name] = None
            self.rows[name] += _count_rows(module, found)
            self.nodes[name] += [tensor.grad_fn for tensor in found if tensor.grad_fn is not None]
        if self._stack:
            return
        for tensor in [tensor for tensor in found if tensor.grad_fn is not None]:
            self.outputs.append(tensor.grad_fn)
            hook = self._hook(Watch._note_backward, notes=self.reached, entry=tensor.grad_fn)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        self.num_calls += module is self._model
        self._find_readers()

    def _find_readers(self) -> None:
        """Look for outputs whose gradient is read: it would raise an error for a frozen piece."""
        for name, tensor in [(name, given()) for name, given in self._given]:
            hooks: Any = getattr(tensor, "_backward_hooks", None) or {}
            modules = [getattr(hook, "__module__", None) or "" for hook in hooks.values()]
            own = [not module.startswith(("torch.", "egeria.")) for module in modules]
            if tensor is not None and (tensor.retains_grad or any(own)):
                self.read.add(name)

    def _note_backward(self, _: Tensor, *, notes: dict[int, set[Any]], entry: Any) -> None:
        notes[_current_backward()].add(entry)

    def _end_pass(self) -> None:
        """Insert what is new in a pass into the order, in front of what followed it."""
        self._find_readers()
        self._given.clear()
        order, place = list(self.order), len(self.order)
        for name in reversed(self._pass):
            if name not in self.order:
                order.insert(place, name)
            place = order.index(name)
        self.order, self._pass = dict.fromkeys(order), {}


def _count_rows(module: nn.Module, found: list[Tensor]) -> int:
    """Return the number of vectors in an output; the vectors of images are their pixels."""
    output = next((tensor for tensor in found if tensor.dim() > 1), None)
    if output is None:
        return 1
    convolutions = (nn.Conv2d, nn.Conv3d)
    is_image = output.dim() > 3 and any(isinstance(part, convolutions) for part in module.modules())
    return output.numel() // max(1, output.shape[1 if is_image else -1])


def reach(starts: Iterable[Node], stop: Collection[Node] = ()) -> set[Node]:
    """Return `starts` and the nodes reached from them, without `stop` and what is beyond it."""
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
    inner = reach(p for node in unique for p, _ in node.next_functions if p is not None)
    return [node for node in unique if node not in inner]
