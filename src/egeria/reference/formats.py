"""The number formats of a reference, each built from the float32 snapshot, and which of them the CPU is fast in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn

from egeria import tree
from egeria.layers.batch import Autocast, Batch
from egeria.layers.taps import capture
from egeria.layers.undisturbed import undisturbed
from egeria.reference.folding import FoldedModel, fold_model
from egeria.reference.survey import Survey, Workload, in_fp32, read_taps
from egeria.reference.tracing import is_altered

_Result = TypeVar("_Result")
FormatName = Literal["int8-static", "int8-dynamic", "bf16", "fp32"]

# Ascending, as oneDNN orders them; a cap allows what stands before it and itself.
_CAPS = (
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
    "AVX512_CORE_BF16",
    "AVX512_CORE_FP16",
    "AVX512_CORE_AMX",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The instructions for int8 and bf16 that kernels may use in this process."""

    vnni: bool = False
    """AVX-512 VNNI: sums of int8 products in 32 bits, so that activations may use all 8 bits."""
    avx512_bf16: bool = False
    """Products of bf16 vectors."""
    amx: bool = False
    """Products of int8 and bf16 matrices."""

    @classmethod
    def here(cls) -> Machine:
        """Return what this CPU has, as far as the environment variable ONEDNN_MAX_CPU_ISA allows its use."""
        flags = _cpuinfo_flags()
        return cls(
            vnni=_has("_is_vnni_supported", "avx512_vnni", flags) and _allowed("AVX512_CORE_VNNI"),
            avx512_bf16=_has("_is_avx512_bf16_supported", "avx512_bf16", flags) and _allowed("AVX512_CORE_BF16"),
            amx=_has("_is_amx_tile_supported", "amx_bf16", flags) and _allowed("AVX512_CORE_AMX"),
        )

    @property
    def fast_bf16(self) -> bool:
        """Whether bf16 beats float32.

        Measured with one thread: 3x on residual nets and 1.9x on BERT by AVX-512 BF16 alone, 4 to 9x
        with AMX, and a fifth to two thirds of the speed of float32 without either.
        """
        return self.amx or self.avx512_bf16

    def fallback_order(self, workload: Workload, precision: str = "auto") -> tuple[FormatName, ...]:
        """Return the formats to try for a workload, the cheapest first, the most exact last."""
        int8: FormatName = "int8-static" if workload == "convolutions" else "int8-dynamic"
        exact: tuple[FormatName, ...] = ("bf16", "fp32") if self.fast_bf16 else ("fp32",)
        if precision == "int8":
            return (int8, *exact)
        if precision == "int8-dynamic":
            return ("int8-dynamic", *exact)
        if precision == "bf16":
            return ("bf16", "fp32")
        if precision == "fp32":
            return ("fp32",)
        # With AMX, bf16 outruns quantising every activation again, and is far more exact.
        return exact if self.amx and int8 == "int8-dynamic" else (int8, *exact)

    def __str__(self) -> str:
        names = {"AVX-512 VNNI": self.vnni, "AVX-512 BF16": self.avx512_bf16, "AMX": self.amx}
        return ", ".join(name for name, has in names.items() if has) or "neither VNNI, BF16 nor AMX"


def _has(function: str, flag: str, flags: frozenset[str]) -> bool:
    # Private functions, some of them missing before torch 2.13.
    ask = getattr(torch.cpu, function, None)
    return bool(ask()) if callable(ask) else flag in flags


def _cpuinfo_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def _allowed(needed: str) -> bool:
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").strip().upper()
    # An unknown name is no cap to oneDNN either; what comes after plain AMX includes it.
    return cap not in _CAPS or _CAPS.index(cap) >= _CAPS.index(needed)


_KEPT_IN_FLOAT32 = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatInputs:
    """What a number format is built from."""

    snapshot: nn.Module
    taps: Sequence[str]
    machine: Machine
    device_type: str = "cpu"
    survey: Survey | None = None
    batch: Batch | None = None
    """A training batch on the CPU to find ranges on."""
    built: Mapping[str, Any] = field(default_factory=dict)
    """What an earlier build of this format has found out, to build the same again."""

    def fold(self) -> FoldedModel:
        """Return a copy with batch norm folded.

        Raises:
            ValueError: there was no batch to check it with.
        """
        forms = self.built.get("parts")
        if self.survey is None and forms is None:
            raise ValueError("there is no batch to try it on")
        return fold_model(self.snapshot, self.taps, self.survey, forms)


class NumberFormat(Protocol):
    """The snapshot in one number format."""

    name: FormatName

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
        """Return what the build has found out, for `FormatInputs.built`."""
        ...


class RunnableFormat:
    """A model of our own, and where in it the taps are read."""

    def __init__(self, model: nn.Module, hooks: Mapping[str, str], autocast: Any) -> None:
        self._model, self._hooks, self._autocast = model, hooks, autocast

    def readings(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return the activations at all taps."""
        return read_taps(self._model, self._hooks, replace(batch, autocast=self._autocast))

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the activation at one tap in float32, running the model no further."""
        batch = replace(batch.first_rows(None), autocast=self._autocast)  # a copy: a model may overwrite its input
        with undisturbed(self._model):
            activation = capture(self._model, self._hooks.get(tap, tap), batch)
        return None if activation is None else activation.float()


class Float32(RunnableFormat):
    """FoldedModel and channels last where the model can be traced and runs without autocast, else the plain copy.

    At the first batch that the folded copy cannot run and the plain one can, it is the plain one for good.
    """

    name: FormatName = "fp32"

    def __init__(self, inputs: FormatInputs) -> None:
        self._inputs = inputs
        self._folded = _try_folding(inputs)
        where = self._folded or FoldedModel(inputs.snapshot, inputs.taps, [], [])
        self.detail = "fp32, batch norm folded" if self._folded else "fp32 copy"
        super().__init__(where.model, where.hooks, in_fp32(inputs.device_type))

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
        with undisturbed(self._inputs.snapshot):
            activation = capture(self._inputs.snapshot, tap, batch.first_rows(None))
        return None if activation is None else activation.float()

    def _unfold(self) -> None:
        self._folded, self.detail = None, "fp32 copy, since a batch was too much for the folded one"
        self._model, self._hooks = self._inputs.snapshot, {tap: tap for tap in self._inputs.taps}

    def found(self) -> dict[str, Any]:
        """Return the names of the traced parts."""
        return {"parts": self._folded.part_forms if self._folded else {}}


def _try_folding(inputs: FormatInputs) -> FoldedModel | None:
    try:
        folded = inputs.fold()
        if folded.folds and (inputs.survey is None or _agrees(folded, inputs.survey)):
            return folded
    except Exception:  # folding is for speed alone
        pass
    return None


def _agrees(folded: FoldedModel, survey: Survey) -> bool:
    readings = read_taps(folded.model, folded.hooks, survey.batch)
    return all(_is_close(readings[tap], expected) for tap, expected in survey.readings.items())


def _is_close(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found.shape == expected.shape and torch.allclose(
        found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().amax())
    )


class BFloat16(RunnableFormat):
    """Weights in bf16, batch norm folded, under bf16 autocast: models that mix types keep working."""

    name: FormatName = "bf16"

    def __init__(self, inputs: FormatInputs) -> None:
        require_float32(inputs.snapshot)
        self._folded = inputs.fold()
        self._pairs = _in_bf16(self._folded)
        self.detail = "bf16"
        super().__init__(self._folded.model, self._folded.hooks, in_bf16(inputs.device_type))

    def update(self) -> None:
        """Round the weights of the snapshot again."""
        self._folded.update()
        with torch.no_grad():
            for mine, theirs in self._pairs:
                mine.copy_(theirs)

    def found(self) -> dict[str, Any]:
        """Return the names of the traced parts."""
        return {"parts": self._folded.part_forms}


def _in_bf16(folded: FoldedModel) -> list[tuple[Tensor, Tensor]]:
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


def in_bf16(device_type: str) -> Autocast:
    """Return the setting for bf16."""
    return Autocast(device_type=device_type, enabled=True, dtype=torch.bfloat16)


def require_float32(model: nn.Module) -> None:
    """Raise where weights are not float32: converting them would change what is compared.

    Raises:
        ValueError: a parameter has another floating-point type.
    """
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} - {torch.float32}
    if found:
        raise ValueError(f"the weights must be float32, found {', '.join(sorted(map(str, found)))}")


class OnSideStream:
    """Lets the kernels of a number format wait for what was queued before, and what comes after wait for them."""

    def __init__(self, rung: NumberFormat, device: torch.device) -> None:
        self.name: FormatName = rung.name
        self._rung = rung
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device)

    @property
    def detail(self) -> str:
        """How it is made."""
        return f"{self._rung.detail}, own CUDA stream"

    def update(self) -> None:
        """Take over the weights of the snapshot as they are now."""
        self._beside(self._rung.update, ())

    def readings(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return the activations at all taps."""
        return self._beside(lambda: self._rung.readings(batch), (batch.args, dict(batch.kwargs)))

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the activation at one tap in float32, running the model no further."""
        return self._beside(lambda: self._rung.activation(tap, batch), (batch.args, dict(batch.kwargs)))

    def found(self) -> dict[str, Any]:
        """Return what the build has found out."""
        return self._rung.found()

    def _beside(self, action: Callable[[], _Result], inputs: Any) -> _Result:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = action()
        # The allocator must not hand out memory that the other stream still reads.
        for tensor in tree.leaves(inputs):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        for tensor in tree.leaves(result):
            if tensor.is_cuda:
                tensor.record_stream(current)
        current.wait_stream(self._stream)
        return result
