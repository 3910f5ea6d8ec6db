"""The number formats a reference can have, each built from the float32 snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from egeria import tree
from egeria.layers.batch import Batch
from egeria.layers.taps import capture
from egeria.layers.undisturbed import undisturbed
from egeria.reference.folded import Folded, fold_model
from egeria.reference.graphs import is_altered
from egeria.reference.machine import Machine, RungName
from egeria.reference.survey import Survey, in_bf16, in_fp32, read_taps

_KEPT_IN_FLOAT32 = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a rung is built from."""

    snapshot: nn.Module
    taps: Sequence[str]
    machine: Machine
    device_type: str = "cpu"
    survey: Survey | None = None
    batch: Batch | None = None
    """A training batch on the CPU to find ranges on."""
    built: Mapping[str, Any] = field(default_factory=dict)
    """What an earlier build of this rung has found out, to build the same again."""

    def fold(self) -> Folded:
        """Return a copy with batch norm folded.

        Raises:
            ValueError: there was no batch to check it with.
        """
        forms = self.built.get("parts")
        if self.survey is None and forms is None:
            raise ValueError("there is no batch to try it on")
        return fold_model(self.snapshot, self.taps, self.survey, forms)


class Rung(Protocol):
    """The snapshot in one number format."""

    name: RungName

    @property
    def detail(self) -> str:
        """How it is made."""
        ...

    def update(self) -> None:
        """Take over the weights of the snapshot as they are now."""
        ...

    def readings(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return the activations at all taps."""
        ...

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the activation at one tap in float32, running the model no further."""
        ...

    def found(self) -> dict[str, Any]:
        """Return what the build has found out, for `Plan.built`."""
        ...


class Runnable:
    """A model of our own, and where in it the taps are read."""

    def __init__(self, model: nn.Module, hooks: Mapping[str, str], autocast: Any) -> None:
        self._model, self._hooks, self._autocast = model, hooks, autocast

    def readings(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return the activations at all taps."""
        return read_taps(self._model, self._hooks, replace(batch, autocast=self._autocast))

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the activation at one tap in float32, running the model no further."""
        args, kwargs = tree.map_tensors(torch.clone, (batch.args, dict(batch.kwargs)))
        batch = replace(batch, args=args, kwargs=kwargs, autocast=self._autocast)
        with undisturbed(self._model):
            activation = capture(self._model, self._hooks.get(tap, tap), batch)
        return None if activation is None else activation.float()


class Float32Rung(Runnable):
    """Folded and channels last where the model can be traced and runs without autocast, else the plain copy.

    At the first batch that the folded copy cannot run and the plain one can, it is the plain one for good.
    """

    name: RungName = "fp32"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._folded = _try_folding(plan)
        where = self._folded or Folded(plan.snapshot, plan.taps, [], [])
        self.detail = "fp32, batch norm folded" if self._folded else "fp32 copy"
        super().__init__(where.model, where.hooks, in_fp32(plan.device_type))

    def update(self) -> None:
        """Fold again; all other tensors are the snapshot's."""
        if self._folded:
            self._folded.update()

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the activation at one tap in float32, running the model no further."""
        if not self._folded or batch.autocast.enabled:
            return self._plain(tap, batch)
        try:
            return super().activation(tap, batch)
        except Exception:
            activation = self._plain(tap, batch)  # what fails here too is no fault of the folding
            self._unfold()
            return activation

    def _plain(self, tap: str, batch: Batch) -> Tensor | None:
        args, kwargs = tree.map_tensors(torch.clone, (batch.args, dict(batch.kwargs)))
        with undisturbed(self._plan.snapshot):
            activation = capture(self._plan.snapshot, tap, replace(batch, args=args, kwargs=kwargs))
        return None if activation is None else activation.float()

    def _unfold(self) -> None:
        self._folded, self.detail = None, "fp32 copy, since a batch was too much for the folded one"
        self._model, self._hooks = self._plan.snapshot, {tap: tap for tap in self._plan.taps}

    def found(self) -> dict[str, Any]:
        """Return the names of the traced parts."""
        return {"parts": self._folded.part_forms if self._folded else {}}


def _try_folding(plan: Plan) -> Folded | None:
    try:
        folded = plan.fold()
        if folded.folds and (plan.survey is None or _agrees(folded, plan.survey)):
            return folded
    except Exception:  # folding is for speed alone
        pass
    return None


def _agrees(folded: Folded, survey: Survey) -> bool:
    readings = read_taps(folded.model, folded.hooks, survey.batch)
    return all(_is_close(readings[tap], expected) for tap, expected in survey.readings.items())


def _is_close(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found.shape == expected.shape and torch.allclose(
        found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().amax())
    )


class BFloat16Rung(Runnable):
    """Weights in bf16, batch norm folded, under bf16 autocast: models that mix types keep working."""

    name: RungName = "bf16"

    def __init__(self, plan: Plan) -> None:
        require_float32(plan.snapshot)
        self._folded = plan.fold()
        self._pairs = _in_bf16(self._folded)
        self.detail = "bf16"
        super().__init__(self._folded.model, self._folded.hooks, in_bf16(plan.device_type))

    def update(self) -> None:
        """Round the weights of the snapshot again."""
        self._folded.update()
        with torch.no_grad():
            for mine, theirs in self._pairs:
                mine.copy_(theirs)

    def found(self) -> dict[str, Any]:
        """Return the names of the traced parts."""
        return {"parts": self._folded.part_forms}


def _in_bf16(folded: Folded) -> list[tuple[Tensor, Tensor]]:
    """Replace parameters by copies in bf16; return those that are rounded from the snapshot as they are.

    Norms keep float32, since a residual stream may be either. So do weights that are computed from
    others, or used by a `forward` of the instance: such arithmetic may know nothing of autocast.
    """
    owned = {id(fold.folded) for fold in folded.folds}
    copies: dict[int, nn.Parameter] = {}
    pairs: list[tuple[Tensor, Tensor]] = []
    for module in folded.model.modules():
        if isinstance(module, _KEPT_IN_FLOAT32) or not _is_ordinary(module):
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dtype != torch.float32:
                continue
            if id(parameter) not in copies:
                copies[id(parameter)] = nn.Parameter(parameter.detach().bfloat16(), requires_grad=False)
                if id(module) not in owned:
                    pairs.append((copies[id(parameter)].detach(), parameter))
            module._parameters[name] = copies[id(parameter)]
    return pairs


def _is_ordinary(module: nn.Module) -> bool:
    parametrized = nn.utils.parametrize.is_parametrized(module) or isinstance(
        module, (nn.utils.parametrize.ParametrizationList,)
    )
    return isinstance(module, fx.GraphModule) or not (parametrized or is_altered(module))


def require_float32(model: nn.Module) -> None:
    """Raise where weights are not float32: converting them would change what is compared.

    Raises:
        ValueError: a parameter has another floating-point type.
    """
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} - {torch.float32}
    if found:
        raise ValueError(f"the weights must be float32, found {', '.join(sorted(map(str, found)))}")
