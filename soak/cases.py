"""What a training of the soak is: plain values, drawn by Hypothesis."""

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from laws.models import CLASSES, MODELS, WIDTH, Model, adamw, sgd
from torch import Tensor, nn

RAISES = -9
"""As a depth of the user's own policy: it raises an error."""
BLOCKS = ("layer", "batch", "plain", "shared", "again", "bare", "still")
OPTIMIZERS = ("sgd", "adamw", "plain", "rmsprop", "groups", "two")
FAULTS = ("", "break", "exception", "resume", "kill", "interrupt", "disk", "cache file", "journal", "moved", "listener")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training; all steps count from 0."""

    model: str = "residual"
    blocks: tuple[str, ...] = ()
    """Of the model "drawn"."""
    seed: int = 0
    steps: int = 8
    after: int = 0
    """Steps behind the close."""
    optimizer: str = "sgd"
    schedule: str = ""
    policy: str = "none"
    plan: str = ""
    interval: int = 1
    depths: tuple[int | None, ...] = ()
    """The answers of the user's own policy, again and again."""
    cache: str = ""
    precision: str = "fp32"
    accumulation: int = 1
    tells_micro: bool = True
    clips: bool = False
    sets_to_none: bool = True
    shuffles: bool = False
    gives_loader: bool = False
    evaluates: int = 0
    """Steps between two evaluations; 0 makes none."""
    calls_train: bool = True
    """Whether each step begins with `model.train()`; else only those behind an evaluation do."""
    keeps_eval: bool = False
    """Whether the user keeps the last normalization or dropout of the model in eval mode."""
    switches: tuple[tuple[int, int, bool], ...] = ()
    """Calls of `requires_grad_`: at which step, of which parameter, with what."""
    nan_at: int = -1
    """The step whose loss is not a number; one behind -2 makes the loss itself so."""
    ranks: int = 1
    framework: str = ""
    fault: str = ""
    at: int = 0
    """The step of the fault; for an interrupt -1 is in `attach`, and the number of steps in `close`."""
    line: int = 1
    """Of ours, since that step began."""
    saved: int = 0
    """Steps done when the checkpoint is written."""
    goes_on: bool = False
    damage: int = 0
    """What is damaged in files or a saved state; 0 is nothing."""

    def to_json(self) -> str:
        """Return the values that are not the default, as one line."""
        own = dataclasses.asdict(self)
        return json.dumps({f.name: own[f.name] for f in dataclasses.fields(self) if own[f.name] != f.default})

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """Return the case of a line."""
        return cls(**{name: _tuples(value) for name, value in json.loads(text).items()})

    @property
    def kind(self) -> str:
        """For the table of what was trained."""
        ranks = "2 ranks, " if self.ranks > 1 else ""
        return f"{ranks}{self.framework or 'plain loop'}, {self.policy}, {self.fault or 'no fault'}"

    @property
    def spec(self) -> Model:
        """The model, its data and its optimizer."""
        if self.model == "drawn":
            return Model(build=functools.partial(Drawn, self.blocks))
        return MODELS[self.model]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class Block(nn.Module):
    """One block of a drawn model."""

    def __init__(self, kind: str, shared: nn.Module) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)
        if kind in ("layer", "batch"):
            self.norm = nn.LayerNorm(WIDTH) if kind == "layer" else nn.BatchNorm1d(WIDTH, momentum=0.4)
        if kind in ("layer", "batch", "shared"):
            self.dropout = shared if kind == "shared" else nn.Dropout(0.3)
        if kind == "bare":
            self.scale = nn.Parameter(torch.ones(WIDTH))
        if kind == "still":
            self.linear.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("plain", "still"):
            return x + torch.tanh(self.linear(x))
        if self.kind == "bare":
            return torch.tanh(self.linear(x)) * self.scale
        y = self.norm(self.linear(x)) if self.kind in ("layer", "batch") else torch.tanh(self.linear(x))
        return x + self.dropout(y)


class Drawn(nn.Module):
    """Blocks of drawn kinds and a head; "again" runs the block in front of it once more."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        shared = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(Block(kind, shared) for kind in kinds if kind != "again")
        places = [sum(kind != "again" for kind in kinds[: end + 1]) - 1 for end in range(len(kinds))]
        self.places, self.head = places, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for place in self.places:
            x = self.blocks[place](x)
        return self.head(x)


def make_optimizers(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a training."""
    own = [entry for entry in model.parameters() if entry.requires_grad]
    half = len(own) // 2
    if case.optimizer == "two":
        return [sgd(own[:half]), adamw(own[half:])]
    if case.optimizer == "groups":
        groups = [{"params": own[:half], "lr": 0.01, "weight_decay": 0.1}, {"params": own[half:]}]
        return [torch.optim.SGD(groups, lr=0.05, momentum=0.5, nesterov=True)]
    plain = functools.partial(torch.optim.SGD, lr=0.05)
    rmsprop = functools.partial(torch.optim.RMSprop, lr=2e-3, momentum=0.5, weight_decay=1e-2)
    return [{"sgd": sgd, "adamw": adamw, "plain": plain, "rmsprop": rmsprop}[case.optimizer](own)]


def make_schedulers(case: Case, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Return a scheduler for each optimizer, or none."""
    schedulers = torch.optim.lr_scheduler
    kinds: dict[str, Any] = {
        "step": lambda o: schedulers.StepLR(o, max(1, case.steps // 3), 0.1),
        "cosine": lambda o: schedulers.CosineAnnealingLR(o, case.steps),
        "warm": lambda o: schedulers.LambdaLR(o, lambda step: min(1.0, (step + 1) / 4)),
    }
    return [kinds[case.schedule](optimizer) for optimizer in optimizers] if case.schedule else []


@st.composite
def cases(draw: Any) -> Case:
    """Draw a training."""
    cache = draw(st.sampled_from(["", "", "", "memory", "disk"]))
    steps = draw(st.integers(12, 30) if cache else st.integers(6, 24))
    moment, flag = st.integers(0, steps - 1), st.booleans()
    some = lambda often, *others: st.sampled_from([often] * 3 + list(others))  # noqa: E731
    framework = draw(st.sampled_from([""] * 40 + ["transformers", "lightning", "accelerate"]))
    given = {
        "model": draw(st.sampled_from(["drawn"] * 6 + list(MODELS))),
        "seed": draw(st.integers(0, 99)),
        "steps": steps,
        "optimizer": draw(st.sampled_from(OPTIMIZERS)),
        "schedule": draw(some("", "step", "cosine", "warm")),
        "framework": framework,
        "sets_to_none": draw(flag),
        **draw(policies(steps, 8 if cache else 3)),
    }
    if given["model"] == "drawn":
        first = draw(st.sampled_from([kind for kind in BLOCKS if kind != "again"]))
        given["blocks"] = (first, *draw(st.lists(st.sampled_from(BLOCKS), min_size=2, max_size=5)))
    if framework:
        # Frameworks bring loops of their own: one optimizer, and no faults but the end.
        given["optimizer"] = draw(st.sampled_from(OPTIMIZERS[:-1]))
        return Case(**given, accumulation=draw(some(1, 2)), clips=draw(flag))
    given |= {
        "cache": cache,
        "precision": draw(some("fp32", "bf16")),
        "accumulation": draw(some(1, 2, 3)),
        "tells_micro": draw(flag),
        "clips": draw(flag),
        "shuffles": draw(flag),
        "gives_loader": draw(flag),
        "evaluates": draw(some(0, 3)),
        "calls_train": draw(flag),
        "keeps_eval": draw(some(False, True)),
        "nan_at": draw(some(-1, draw(moment))),
        "after": draw(st.integers(0, 3)),
        "ranks": draw(st.sampled_from([1] * 19 + [2])),
    }
    if draw(some(False, True)):
        switch = st.tuples(moment, st.integers(0, 40), flag)
        given["switches"] = tuple(draw(st.lists(switch, min_size=1, max_size=2)))
    fault = draw(st.sampled_from(FAULTS[:4] if given["ranks"] > 1 else FAULTS))
    at = draw(st.integers(-1, steps) if fault == "interrupt" else moment)
    given |= {"fault": fault, "at": at, "line": draw(st.integers(1, 400)), "goes_on": draw(flag)}
    if fault in ("resume", "kill"):
        given["saved"] = draw(st.integers(0, at))
    return Case(**given, damage=draw(st.integers(0, 10**6)) if draw(flag) else 0)


@st.composite
def policies(draw: Any, steps: int, longest: int) -> dict[str, Any]:
    """Draw who decides, the user's own policy in intervals of up to `longest` steps."""
    name = draw(st.sampled_from(["own"] * 5 + ["plan"] * 3 + ["egeria", "linear", "none", "default"]))
    depth = st.integers(0, 6)
    if name == "plan":
        moves = sorted(draw(st.sets(st.integers(0, steps - 1), min_size=1, max_size=4)))
        texts = [f"step {move}:{draw(depth)}" for move in moves]
        return {"policy": name, "plan": " ".join(texts)}
    if name == "own":
        answers = st.one_of(depth, depth, depth, st.sampled_from([None, -1, 99] + [RAISES]))
        depths = tuple(draw(st.lists(answers, min_size=2, max_size=8)))
        return {"policy": name, "depths": depths, "interval": draw(st.integers(1, longest))}
    return {"policy": name, "interval": draw(st.integers(1, 3))}
