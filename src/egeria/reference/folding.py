"""A copy of the snapshot whose traceable parts are graphs, with batch normalisation folded into convolutions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from egeria.layers.undisturbed import undisturbed
from egeria.reference.survey import Survey
from egeria.reference.tracing import (
    CONVOLUTIONS,
    OUTLETS,
    TracedPart,
    accept_only,
    find_parts,
    is_plain,
    sharing_copy,
    trace_parts,
)

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Outlet(nn.Module):
    """Returns what it is given; a hook on `plain` reads it in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [B, ...]."""
        if self.plain._forward_hooks:
            self.plain(x.dequantize() if x.is_quantized else x)
        return x


class FoldedModel:
    """The model, where in it taps are read, and what must be folded again when weights change."""

    def __init__(
        self, model: nn.Module, taps: Sequence[str], parts: Sequence[TracedPart], folds: Sequence[FoldedConvolution]
    ) -> None:
        self.model = model
        self.hooks = {tap: tap for tap in taps}
        self.parts = tuple(parts)
        self.folds = tuple(folds)
        self.replace_parts({part.name: part.graph for part in parts})

    @property
    def part_forms(self) -> dict[str, list[str]]:
        """Names of the traced submodules, "" for the model itself, with the form of their calls."""
        return {part.name: part.form for part in self.parts}

    def replace_parts(self, graphs: Mapping[str, nn.Module], dequantize: bool = False) -> None:
        """Put other modules in the place of the traced ones; their outlets may carry quantised tensors."""
        for part in self.parts:
            graph = graphs[part.name]
            accept_only(graph, part.form)
            for index, tap in enumerate(part.taps):
                path = f"{OUTLETS}.{index}"
                if dequantize:
                    graph.set_submodule(path, Outlet())
                    path += ".plain"
                self.hooks[tap] = f"{part.name}.{path}" if part.name else path
            if part.name:
                self.model.set_submodule(part.name, graph)
            else:
                self.model = graph

    def update(self) -> None:
        """FoldedConvolution again; all other tensors are the snapshot's."""
        for fold in self.folds:
            fold.update()


def fold_model(
    snapshot: nn.Module, taps: Sequence[str], survey: Survey | None, forms: Mapping[str, list[str]] | None = None
) -> FoldedModel:
    """Copy the snapshot, sharing its tensors, and fold what can be traced.

    Args:
        snapshot: the model in float32.
        taps: names of submodules to read.
        survey: what to check the traced parts with; not needed with `forms`.
        forms: the parts to trace, where an earlier copy has found them.
    """
    model = sharing_copy(snapshot)
    with undisturbed(model):
        if forms is not None:
            parts = trace_parts(model, taps, forms)
        else:
            assert survey is not None
            parts = find_parts(model, taps, survey)
    folds = [fold for part in parts for fold in fold_norms(part.graph)]
    return FoldedModel(model, taps, parts, folds)


@dataclass(frozen=True, slots=True)
class FoldedConvolution:
    """A convolution with its own tensors, channels last, that also does the work of the norm after it."""

    folded: Any
    convolution: Any
    norm: Any
    """A batch norm, or None."""

    def update(self) -> None:
        """Take over the weights and statistics as they are now."""
        weight, bias = self.weights()
        with torch.no_grad():
            self.folded.weight.copy_(weight)
            if bias is not None:
                self.folded.bias.copy_(bias)

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias with the norm folded in."""
        weight, bias, norm = self.convolution.weight, self.convolution.bias, self.norm
        if norm is None:
            return weight, bias
        return fuse_conv_bn_weights(
            weight,
            bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
        )


def fold_norms(graph: fx.GraphModule) -> list[FoldedConvolution]:
    """Fold, in place, each batch norm that alone reads a convolution; return every convolution, folded or not."""
    folds = []
    modules = dict(graph.named_modules())
    targets = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    for node in list(graph.graph.nodes):
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if module is None or not is_plain(module, CONVOLUTIONS) or targets.count(node.target) > 1:
            continue
        norm_node = _norm_behind(node, modules, targets)
        norm = None if norm_node is None else modules[str(norm_node.target)]
        fold = FoldedConvolution(_own(module, norm), module, norm)
        fold.update()
        graph.set_submodule(str(node.target), fold.folded)
        folds.append(fold)
        if norm_node is not None:
            norm_node.replace_all_uses_with(node)
            graph.graph.erase_node(norm_node)
    graph.delete_all_unused_submodules()
    graph.recompile()
    return folds


def _norm_behind(node: fx.Node, modules: Mapping[str, nn.Module], targets: Sequence[Any]) -> fx.Node | None:
    users = list(node.users)
    if len(users) != 1 or users[0].op != "call_module" or targets.count(users[0].target) > 1:
        return None
    norm = modules[str(users[0].target)]
    return users[0] if is_plain(norm, _NORMS) and isinstance(norm.running_mean, Tensor) else None


def _own(convolution: Any, norm: Any) -> nn.Module:
    own: nn.Module = copy.copy(convolution)
    weight = torch.empty_like(convolution.weight)
    layout = _LAYOUTS.get(weight.dim())
    weight = weight if layout is None else weight.contiguous(memory_format=layout)
    bias = convolution.bias if norm is None else norm.running_mean
    own._parameters = {
        "weight": nn.Parameter(weight, requires_grad=False),
        "bias": None if bias is None else nn.Parameter(torch.empty_like(bias), requires_grad=False),
    }
    return own
