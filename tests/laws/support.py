"""The loops that the laws compare, and the few places where they touch what the library may word anew."""

import io
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

import egeria
from laws.models import BATCH, MODELS, NUM_ROWS

NUM_STEPS = 16
Front = frozenset[str]
NONE: Front = frozenset()
ALL_BUT_ONE = "all but the last"  # in a front beside the names: batch normalisation keeps its statistics

# --- what the library may word anew: texts of plans, settings, names of layer modules, kinds of events ----------------

PLANS = ("0.25:1 0.5:2 0.75:20", "0:20 0.25:0 0.6:2")
"""Share of the steps : frozen front modules from then on. More than there are means all but the last."""
CACHES = {"none": {"enabled": False}, "memory": {"enabled": "auto"}, "disk": {"enabled": True}}
"""The settings `cache` of each way to keep what the frozen front puts out; "none" computes it."""
UNCONDITIONAL = {"controller": {"budget_share": 1000.0, "load_limit": 1.0}, "cache": {"gate": "open"}}
"""What makes the library act whatever it measures of this machine."""


def depths_of(plan: str, num_modules: int) -> list[int]:
    """Return to how many frozen layer modules a plan leads, one after the other."""
    return [min(int(entry.partition(":")[2]), num_modules - 1) for entry in plan.split()]


def settings(**groups: dict[str, Any]) -> dict[str, Any]:
    """Return these settings, with those of UNCONDITIONAL in the same groups that there are."""
    return {group: {**UNCONDITIONAL.get(group, {}), **own} for group, own in groups.items()}


def paper(interval_steps: int = 2, window: int = 3) -> dict[str, Any]:
    """Return what a training takes for the paper's rule, with evaluations in this process."""
    plasticity = {"interval_steps": interval_steps, "window": window}
    config = settings(plasticity=plasticity, reference={"precision": "fp32"}, controller={})
    return {"policy": "egeria", "controller": "inline", "config": config, "is_steady": True}


def how(kind: str) -> dict[str, Any]:
    """Return what a training takes so that layer modules freeze and thaw: by a "plan", or by the rule of the "paper".

    For that the learning rate falls so far that hardly anything moves, and later to a tenth, for which all thaws.
    """
    return {"plan": PLANS[1]} if kind == "plan" else {**paper(), "total_steps": 44, "rates": {8: 0.01, 30: 0.1}}


def front(run: egeria.Run) -> Front:
    """Return the names of the parameters in the frozen layer modules; tied weights may be among them."""
    names = [name for module in run.modules[: run.frozen] for name in module.parameters]
    return frozenset(names + [ALL_BUT_ONE] * (run.frozen == len(run.modules) - 1)) if run.frozen else NONE


def decisions(directory: Path) -> list[tuple[int, int]]:
    """Return what a journal says was decided: at which step, and how many layer modules are frozen from then on."""
    return list({event.step: getattr(event, "frozen", 0) for event in _events(directory, "frozen", "thawed")}.items())


def readings(directory: Path) -> list[tuple[int, int, float]]:
    """Return each reading of plasticity in a journal: when it came, of which layer module, and what it was."""
    return [(event.step, event.module, event.value) for event in _events(directory, "plasticity")]


def refusals(directory: Path) -> list[str]:
    """Return the reasons why the library declined to act."""
    return [event.reason for event in _events(directory, "declined")]


def cached_rows(directory: Path) -> int:
    """Return how many rows came from the cache."""
    return sum({event.generation: event.hits for event in _events(directory, "cache_used")}.values())


def _events(directory: Path, *kinds: str) -> list[Any]:
    return [event for event in egeria.read_journal(directory).events if event.kind in kinds]


# --- the loops --------------------------------------------------------------------------------------------------------


class Training:
    """An ordinary loop over one of the models, with egeria attached where there are arguments for that.

    `rates` has by step what the learning rate is multiplied by there; with `is_steady` the library is told a loss that
    does not change, which ends the critical period of the paper's rule at once.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int = 0,
        data_seed: int = 0,
        wrap: Any = None,
        total_steps: int = NUM_STEPS,
        rates: dict[int, float] | None = None,
        is_steady: bool = False,
        **attach: Any,
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.spec, self.total_steps, self.rates, self.is_steady = MODELS[name], total_steps, rates or {}, is_steady
        self.model = self.spec.build().train()
        self.called = wrap(self.model) if wrap else self.model
        self.rows = self.spec.rows(torch.Generator().manual_seed(data_seed))
        self.trained = {name: entry for name, entry in self.model.named_parameters() if entry.requires_grad}
        self.optimizer = self.spec.optimizer(self.trained.values())
        self.losses, self.random = list[float](), (torch.get_rng_state(), random.getstate())
        self.fronts: list[tuple[Front, Front]] = []
        """For each step what was frozen while the optimizer stepped, and what is for the next one."""
        self._still_parts = dict[Front, set[nn.Module]]()
        self.before, self.run = outside(self), None
        if attach:
            self.run: Any = egeria.attach(self.called, self.optimizer, total_steps=total_steps, **attach)
            self._handle = self.optimizer.register_step_pre_hook(self._look)  # behind those of the library

    def train(self, num_steps: int | None = None, batches: Iterable[Sequence[Tensor]] | None = None) -> Self:
        """Train for some steps, or to the end; or through some batches."""
        end = self.total_steps if num_steps is None else len(self.losses) + num_steps
        for inputs, targets in batches or map(self.batch, range(len(self.losses), end)):
            for group in self.optimizer.param_groups:
                group["lr"] *= self.rates.get(len(self.losses) + 1, 1.0)
            loss = self.backward(inputs, targets)
            self.optimizer.step()
            self.losses.append(loss.item())
            self._tell(loss)
        self.random = torch.get_rng_state(), random.getstate()
        return self

    def idle(self) -> None:
        """Make a step in which there is no gradient."""
        self.optimizer.zero_grad()
        self.optimizer.step()
        self._tell(torch.ones(()))

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Make the passes of a step. Gradients are set to zero, so that one that is left over is not without effect."""
        self.prepare()
        loss = nn.functional.cross_entropy(self.called(inputs), targets)
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        return loss

    def prepare(self) -> None:
        self.model.train()

    def batch(self, step: int) -> tuple[Tensor, ...]:
        rows = (step * BATCH + torch.arange(BATCH)) % NUM_ROWS
        return tuple(column[rows] for column in self.rows)

    def close(self) -> None:
        self._handle.remove()
        self.run.close()
        self.run = None

    def save(self) -> bytes:
        parts: dict[str, Any] = {part: getattr(self, part).state_dict() for part in ("model", "optimizer", "run")}
        buffer = io.BytesIO()
        torch.save({**parts, "random": self.random, "losses": self.losses}, buffer)
        return buffer.getvalue()

    def load(self, checkpoint: bytes) -> None:
        saved = torch.load(io.BytesIO(checkpoint), weights_only=True)
        for part in ("model", "optimizer", "run"):
            getattr(self, part).load_state_dict(saved[part])
        self.losses = saved["losses"]
        torch.set_rng_state(saved["random"][0])
        random.setstate(saved["random"][1])

    def everything(self) -> dict[str, Any]:
        """Return a copy of all that training changes."""
        optimizer = {str(index): entry for index, entry in self.optimizer.state_dict()["state"].items()}
        state = {"model": self.model.state_dict(), "optimizer": optimizer}
        return {**copied(state), "losses": list(self.losses), "torch": self.random[0], "python": self.random[1]}

    def still_parts(self, frozen: Front) -> set[nn.Module]:
        """Return the submodules in which nothing trains while these parameters are frozen, which did before."""
        if frozen not in self._still_parts:
            inside = {
                m: {n for n in self.trained if n.startswith(f"{name}.")} for name, m in self.model.named_modules()
            }
            own = {part: names.difference(self.spec.tied) for part, names in inside.items()}
            self._still_parts[frozen] = {part for part, names in own.items() if names and names <= frozen}
        return self._still_parts[frozen]

    def still_values(self) -> dict[str, Tensor]:
        """Return a copy of what may not move in the next step: frozen parameters, and statistics of what normalises."""
        frozen = front(self.run).difference(self.spec.tied)
        buffers = {f"{id(m)} {n}": entry for m in self.still_parts(frozen) for n, entry in m.named_buffers()}
        return copied({**{name: self.trained[name].data for name in frozen & self.trained.keys()}, **buffers})

    def _tell(self, loss: Tensor) -> None:
        if self.run is not None:
            self.run.step(1.0 if self.is_steady else loss)
            self.fronts.append((self._in_step, front(self.run)))

    def _look(self, *_call: Any) -> None:
        self._in_step = front(self.run)


class ByHand(Training):
    """The same loop, which itself freezes what another had frozen, as noted in its `fronts`; nothing behind them."""

    def __init__(self, name: str, fronts: Sequence[tuple[Front, Front]]) -> None:
        super().__init__(name)
        self._steps, self._still = fronts, set[nn.Module]()
        for part in (self.model.embeddings, *self.model.blocks) if self.spec.tied else ():
            part.register_forward_hook(lambda part, _, output: output.detach() if part in self._still else None)

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Make the passes, and freeze before the optimizer steps where that was so."""
        step = len(self.losses)
        self._freeze(self._steps[step - 1][1] if 0 < step <= len(self._steps) else NONE)
        loss = super().backward(inputs, targets)
        self._freeze(self._steps[step][0] if step < len(self._steps) else NONE)
        return loss

    def prepare(self) -> None:
        super().prepare()
        for part in self._still:
            part.eval()
        for name in self.spec.shared:
            self.model.get_submodule(name).train()

    def _freeze(self, frozen: Front) -> None:
        frozen = frozen.difference(self.spec.tied)
        for name, parameter in self.trained.items():
            parameter.requires_grad_(name not in frozen)
            if name in frozen:
                parameter.grad = None
        norms = {part for part in self.model.modules() if ALL_BUT_ONE in frozen and isinstance(part, nn.BatchNorm2d)}
        self._still = self.still_parts(frozen) | norms


# --- what they are compared by ----------------------------------------------------------------------------------------


def outside(training: Training) -> dict[str, Any]:
    """Return what is no number: what needs a gradient, modes, hooks, attributes, groups of the optimizer."""
    modules, parameters = dict(training.model.named_modules()), dict(training.model.named_parameters())
    owners = {**{f"module {name}": modules[name] for name in modules}, **parameters, "optimizer": training.optimizer}
    return {
        "needs gradients": {name: parameters[name].requires_grad for name in parameters},
        "modes": {name: modules[name].training for name in modules},
        "attributes": {name: sorted(vars(owners[name])) for name in owners},
        "hooks": {name: _count_hooks(owners[name]) for name in owners},
        "groups": [{**group, "params": [*map(id, group["params"])]} for group in training.optimizer.param_groups],
    }


def _count_hooks(owner: Any) -> dict[str, int]:
    names = {*vars(owner), "_backward_hooks", "_post_accumulate_grad_hooks"}  # a tensor has these, unseen by `vars`
    return {name: len(getattr(owner, name, None) or ()) for name in names if name.endswith("hooks")}


def differences(first: Any, second: Any, where: str = "") -> list[str]:
    """Return the names of what is not equal to the last bit."""
    if isinstance(first, dict) and isinstance(second, dict):
        found = [f"{where}{key}" for key in first.keys() ^ second.keys()]
        pairs = [(key, first[key], second[key]) for key in first.keys() & second.keys()]
        return found + [name for key, *pair in pairs for name in differences(*pair, f"{where}{key} ")]
    same = torch.equal(first, second) if isinstance(first, Tensor) and isinstance(second, Tensor) else first == second
    return [] if same else [where.strip()]


def copied(value: Any) -> Any:
    """Return tensors as they are now, in dictionaries too; anything else as it is."""
    if isinstance(value, dict):
        return {key: copied(entry) for key, entry in value.items()}
    return value.clone() if isinstance(value, Tensor) else value
