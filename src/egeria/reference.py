"""The reference model: a snapshot of the model in training, to compare its activations with.

Its number format is float32, bfloat16 or int8. In int8 are, of a convolutional model, the largest
submodules that can be traced and have no tap inside, with ranges of activations found on a batch;
of other models the linear layers, which find the range of their input at every call.
"""

import copy
import importlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from egeria.errors import brief
from egeria.events import RungTaken
from egeria.model.hooks import copies_of_computed, without_watchers
from egeria.model.passes import Batch, captures, restore_table, undisturbed
from egeria.plasticity import sp_loss
from egeria.random_state import kept_random_state

FIDELITY_SHARE = 0.1  # largest error of a format, as a share of the plasticity
# Assumed before any plasticity is known: the smallest first readings of record 0004.
_EARLY_PLASTICITY = 1e-4
_MOST_ROWS = 32
_EVALUATIONS = 10  # between two refreshes, which share a build: `W` of the paper
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ENGINE = "x86"
# For each submodule the smallest and largest values at the places in it.
Ranges = Mapping[str, Mapping[str, Tensor]]


class Reference:
    """A snapshot of the model in training, in the fastest number format that is exact enough.

    A format is exact enough while its SP loss to the float32 snapshot is at most a tenth of the
    plasticity, which each refresh checks. If it fails, float32 replaces it for good.

    Args:
        taps: submodules whose activations will be asked for.
        precision: 'int8', 'bf16', 'fp32', or 'auto', which times each at the first refresh.
        device: "cpu", or a CUDA device, where bf16 takes the place of int8.
    """

    def __init__(self, taps: Sequence[str], precision: str = "auto", device: str = "cpu") -> None:
        self._taps, self._device = tuple(taps), torch.device(device)
        names = ["int8", "bf16", "fp32"] if precision == "auto" else [precision]
        if self._device.type != "cpu":
            names = [name.replace("int8", "bf16") for name in names]
        self._names = list(dict.fromkeys(names))  # to choose from; one from the first refresh on
        # The format in use, such as 'int8', and how it was made; empty before the first refresh.
        self.precision = self.builder = ""
        self._snapshot: nn.Module | None = None
        self._format: Format | None = None
        self._events: list[RungTaken] = []

    def take_events(self) -> list[RungTaken]:
        """Return the changes of format since the last call."""
        events, self._events = self._events, []
        return events

    def refresh(self, model: nn.Module, batch: Batch, plasticity: Mapping[str, float] = {}) -> None:
        """Take the weights of the model in training as they are now.

        Args:
            model: the model in training.
            batch: the newest training batch, on which ranges and errors are measured.
            plasticity: means of the newest readings, by tap.

        Raises:
            RuntimeError: the model cannot be copied.
        """
        is_first = self._format is None
        self._snapshot, batch = take_snapshot(model, self._device), self._here(batch)
        taps = self._taps if is_first else [tap for tap in self._taps if tap in plasticity]
        expected = {tap: plasticity.get(tap, _EARLY_PLASTICITY) for tap in taps}
        works, reasons = list[tuple[float, Format]](), list[str]()
        for name in self._names:
            try:
                works.append(self._try(name, batch.first_rows(_MOST_ROWS), expected))
                reasons.append(f"{name} takes {1000 * works[-1][0]:.1f} ms an evaluation")
            except Exception as error:
                reasons.append(f"{name} is not used: {brief(error)}")
        best = min(works, key=itemgetter(0))[1] if works else self._build("fp32")
        is_given = works and len(self._names) == 1
        self._take(best, f"the setting is {best.name!r}" if is_given else "; ".join(reasons))

    def activation(self, tap: str, batch: Batch) -> Tensor:
        """Return the output [B, ...] of submodule `tap` in float32."""
        assert self._format is not None, "a reference is refreshed before it is asked"
        batch = self._here(batch)
        try:
            return self._format.read([tap], batch)[tap]
        except Exception as error:
            exact = self._build("fp32")
            found = exact.read([tap], batch)[tap]  # an error here is not caused by the format
            self._take(exact, f"{self.precision} failed at {tap}: {brief(error)}")
            return found

    def state_dict(self) -> dict[str, Any]:
        """Return what gives the same activations again; empty before the first refresh."""
        if self._snapshot is None or self._format is None:
            return {}
        return {
            "tensors": [tensor.detach().clone() for tensor in _tensors_of(self._snapshot)],
            "precision": self.precision,
            "ranges": self._format.ranges,
        }

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Continue from the state of a refreshed reference; activations are the same to the bit."""
        self._snapshot, self.precision = take_snapshot(model, self._device), state["precision"]
        with torch.no_grad():
            for tensor, saved in zip(_tensors_of(self._snapshot), state["tensors"], strict=True):
                tensor.copy_(saved)
        try:
            self._take(self._build(self.precision, ranges=state["ranges"]))
        except Exception as error:  # another machine, or another torch
            self._take(self._build("fp32"), f"{self.precision} cannot go on here: {brief(error)}")

    def _try(
        self, name: str, batch: Batch, plasticity: Mapping[str, float]
    ) -> "tuple[float, Format]":
        """Return the seconds of an evaluation, 0 for a lone format, and the format.

        It raises what rules the format out, such as an error that is too large at some tap.
        """
        begin = time.perf_counter()
        made = self._build(name, batch)
        build_s = time.perf_counter() - begin
        if name != "fp32" and plasticity:
            found = made.read(list(plasticity), batch)
            exact = self._build("fp32").read(list(plasticity), with_autocast(batch, False))
            for tap, activation in exact.items():
                error, movement = float(sp_loss(activation, found[tap])), plasticity[tap]
                what = f"its SP loss at {tap} is {error:.1e}, where plasticity is {movement:.1e}"
                if not error <= FIDELITY_SHARE * movement:
                    raise ValueError(what)
        if len(self._names) == 1:
            return 0.0, made
        begin = time.perf_counter()
        for activation in made.read(self._taps, batch).values():
            activation.cpu()  # waits for a GPU
        return time.perf_counter() - begin + build_s / _EVALUATIONS, made

    def _build(
        self, name: str, batch: Batch | None = None, ranges: Ranges | None = None
    ) -> "Format":
        """Return the snapshot in the format of that name; raise what rules it out.

        Ranges of activations, except at the taps, are measured on a batch; without one, `ranges`
        count.
        """
        snapshot = self._snapshot
        assert snapshot is not None
        if name != "int8":
            return Format(name=name, builder=name, model=snapshot)
        if any(p.is_floating_point() and p.dtype != torch.float32 for p in snapshot.parameters()):
            raise ValueError("not all weights are float32")
        with kept_random_state(snapshot), torch.no_grad(), kernels():
            model = copy.deepcopy(snapshot)
            linear = _layers(model, (nn.Linear,))
            if len(_layers(model, _CONVOLUTIONS)) >= len(linear):
                return _static(model, self._taps, batch, ranges or {})
            toolkit = _toolkit()
            layers = dict.fromkeys(linear, toolkit.per_channel_dynamic_qconfig)
            toolkit.quantize_dynamic(model, layers, inplace=True)
        return Format(name=name, builder=f"int8, {len(linear)} linear layers, dynamic", model=model)

    def _take(self, made: "Format", reason: str = "") -> None:
        """Use this format from now on, for good."""
        before, self._format, self._names = self.precision, made, [made.name]
        self.precision, self.builder = made.name, made.builder
        if made.name != before:
            self._events.append(RungTaken(step=0, before=before, after=made.name, reason=reason))

    def _here(self, batch: Batch) -> Batch:
        """Return the batch on our device, without autocast for another type of device."""
        moved, kind = batch.on(str(self._device)), self._device.type
        if batch.autocast.device_type == kind:
            return moved
        return replace(moved, autocast=replace(batch.autocast, device_type=kind, enabled=False))


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def take_snapshot(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of the model as it is now, in eval mode, without gradients and hooks.

    Its tensors are made directly on `device`: the model's own may have no room for them.

    Raises:
        RuntimeError: the model cannot be copied, or the copy shares something with it.
    """
    memo = copies_of_computed(model)
    for tensor in _tensors_of(model):
        if type(tensor) in (Tensor, nn.Parameter):
            copied = tensor.detach().to(device, copy=True)
            memo[id(tensor)] = copied if type(tensor) is Tensor else nn.Parameter(copied, False)
    try:
        with kept_random_state(model):  # a `__deepcopy__` of the model's own may rebuild it
            snapshot = copy.deepcopy(model, memo)
        before = {id(entry) for entry in (*model.modules(), *_tensors_of(model))}
        if not before.isdisjoint(map(id, (*snapshot.modules(), *_tensors_of(snapshot)))):
            raise TypeError("the copy shares modules or weights with the model")
    except Exception as error:
        raise RuntimeError(
            "The reference is a deep copy of the model with modules and weights of its own, which "
            f"{type(model).__name__} does not allow: {error}. Give it a `__deepcopy__` that copies "
            "all of them, or keep what cannot be copied out of its attributes."
        ) from error
    for module in snapshot.modules():
        restore_table(vars(module), without_watchers(vars(module)))
        module.training = False  # a `train` of the model's own may do more
    return snapshot.requires_grad_(False).to(device)


def with_autocast(batch: Batch, enabled: bool) -> Batch:
    """Return the batch with autocast to bfloat16, or with none."""
    return replace(batch, autocast=replace(batch.autocast, enabled=enabled, dtype=torch.bfloat16))


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A snapshot in one number format."""

    name: str  # 'int8', 'bf16' or 'fp32'
    builder: str  # how it was made, for the journal
    model: nn.Module
    ranges: Ranges = field(default_factory=dict)  # to make the same again without a batch

    def read(self, taps: Sequence[str], batch: Batch) -> dict[str, Tensor]:
        """Return the activations [B, ...] of submodules in float32; see `captures`."""
        # The float32 snapshot runs under the autocast of the batch, as the model in training did.
        if self.name != "fp32":
            batch = with_autocast(batch, self.name == "bf16")
        own = batch.first_rows(None)  # a copy: a model may overwrite its input
        with kernels() if self.name == "int8" else nullcontext(), undisturbed(self.model):
            found = captures(self.model, taps, own)
        return {tap: activation.float() for tap, activation in found.items()}


def _layers(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[str]:
    """Return the names of submodules of exactly these types with their class's own `forward`."""
    found = ((name, module) for name, module in model.named_modules() if type(module) in kinds)
    return [name for name, module in found if not _is_altered(module)]


def _is_altered(module: nn.Module) -> bool:
    """Return whether weights are computed before a call, or `forward` is replaced."""
    return "forward" in vars(module) or bool(module._forward_pre_hooks) or is_parametrized(module)


def _static(model: nn.Module, taps: Sequence[str], batch: Batch | None, ranges: Ranges) -> Format:
    parts = dict[str, nn.Module]()
    for name, module in model.named_modules():
        has_tap = not name or any(tap.startswith(f"{name}.") for tap in taps)
        is_inside = any(name.startswith(f"{part}.") for part in parts)
        is_altered = any(map(_is_altered, module.modules()))
        if not (has_tap or is_inside or is_altered) and _layers(module, _CONVOLUTIONS):
            with suppress(Exception):  # if it cannot be traced, its parts are tried
                parts[name] = _with_observers(module)
    if not parts:
        raise ValueError("no part of the model with a convolution can be traced")
    for name, part in parts.items():
        model.set_submodule(name, part)
    if batch is not None:
        own = with_autocast(batch.first_rows(None), False)
        with undisturbed(model), own.autocast.context():
            model(*own.args, **own.kwargs)
            # Within the block: observers are buffers, which it restores.
            ranges = {
                name: {k: v.clone() for k, v in part.state_dict().items() if k.endswith("_val")}
                for name, part in parts.items()
            }
    for name, part in parts.items():
        part.load_state_dict(ranges[name], strict=False)
        model.set_submodule(name, _toolkit().quantize_fx.convert_fx(part))
    made = f"int8, {len(parts)} parts, static"
    return Format(name="int8", builder=made, model=model, ranges=ranges)


def _with_observers(module: nn.Module) -> nn.Module:
    """Return the graph of a module with observers of ranges; raise if it cannot be traced."""
    toolkit = _toolkit()
    # Sums of products with 8 bits on both sides would overflow 16 bits without VNNI.
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", bool)()
    activation = toolkit.MinMaxObserver.with_args(quant_min=0, quant_max=255 if has_vnni else 127)
    qconfig = toolkit.QConfig(activation, toolkit.default_per_channel_weight_observer)
    mapping = toolkit.get_default_qconfig_mapping(_ENGINE).set_global(qconfig)
    # A layer of torch itself would be traced into a function.
    root = nn.Sequential(module) if isinstance(module, _CONVOLUTIONS) else module
    graph: nn.Module = toolkit.quantize_fx.prepare_fx(root, mapping, ())
    return graph


def _toolkit() -> Any:
    """Import a deprecated part of torch: it takes a second, and may be missing one day."""
    importlib.import_module("torch.ao.quantization.quantize_fx")
    return importlib.import_module("torch.ao.quantization")


@contextmanager
def kernels() -> Iterator[None]:
    """Use our int8 kernels in the block, whatever engine the user chose, without warnings."""
    backend, graphs = cast(Any, (torch.backends.quantized, fx.config))
    before = backend.engine, graphs.do_not_emit_stack_traces
    # Stack traces of graph nodes would import the compiler.
    backend.engine, graphs.do_not_emit_stack_traces = _ENGINE, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that they are deprecated
            yield
    finally:
        backend.engine, graphs.do_not_emit_stack_traces = before
