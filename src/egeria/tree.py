"""Nested tensors: the tuples, lists, dictionaries and model outputs that travel through `forward`.

Knows nothing of layers or policies. A *tree* is a tensor, a container of trees, or any other value,
which is carried along untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Tree = Any


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Yield every tensor of the tree, depth first, in the order of the containers."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from leaves(value)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Return the tree with `function` applied to each tensor; containers keep their type.

    A mapping type that cannot be rebuilt from its items (a required constructor argument, say)
    comes back as a plain dictionary.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        items = {key: map_tensors(function, value) for key, value in tree.items()}
        try:
            return type(tree)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def detach(tree: Tree) -> Tree:
    """Return the tree cut from the autograd graph; storage is shared."""
    return map_tensors(Tensor.detach, tree)


def requires_grad(tree: Tree) -> bool:
    """Tell whether any tensor of the tree takes part in the autograd graph."""
    return any(tensor.requires_grad for tensor in leaves(tree))


def first_activation(tree: Tree) -> Tensor | None:
    """Return the first floating-point tensor with at least two dimensions, or None.

    Transformer layers return tuples whose first such member is the hidden state; model outputs of
    `transformers` keep it first as well.
    """
    return next((tensor for tensor in leaves(tree) if tensor.is_floating_point() and tensor.dim() > 1), None)


def take_rows(tree: Tree, count: int) -> Tree:
    """Return the first `count` rows of every tensor, if all tensors agree on their number of rows.

    Where they do not agree (a mask shared by the batch, sequence-first layouts next to vectors) the
    tree comes back whole: a wrong cut would change what the model sees.
    """
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in leaves(tree)}
    if len(sizes) != 1 or None in sizes:
        return tree
    (rows,) = sizes
    if rows is None or rows <= count:
        return tree
    return map_tensors(lambda tensor: tensor[:count], tree)


def device_of(tree: Tree) -> torch.device | None:
    """Return the device of the first tensor, or None for a tree without tensors."""
    first = next(leaves(tree), None)
    return None if first is None else first.device
