"""What a training of the soak is: plain values, drawn by Hypothesis, and the objects they stand for."""

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from laws.models import CLASSES, MODELS, WIDTH, Model, adamw, sgd

RAISES = -9  # as a depth of the user's own policy
BLOCKS = ("layer", "batch", "plain", "shared", "bare", "still")
FAULTS = ("", "break", "exception", "resume", "kill", "interrupt", "disk", "cache file", "journal", "moved", "listener")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training; all steps count from 0."""

    model: str = "residual"
    blocks: tuple[str, ...] = ()  # of the model "drawn"
    seed: int = 0
    steps: int = 8
    after: int = 0  # steps behind the close
    optimizer: str = "sgd"
    falls: bool = False  # whether a scheduler makes the learning rate fall to a tenth, twice
    policy: str = "none"
    plan: str = ""
    interval: int = 1
    depths: tuple[int | None, ...] = ()  # the answers of the user's own policy, again and again
    cache: str = ""
    precision: str = "fp32"
    accumulation: int = 1
    tells_micro: bool = True  # whether the loss of each micro-batch is told, or that of the last one
    clips: bool = False
    sets_to_none: bool = True
    shuffles: bool = False
    gives_loader: bool = False
    evaluates: int = 0  # steps between two evaluations; 0 makes none
    calls_train: bool = True  # in each step; else behind an evaluation
    keeps_eval: bool = False  # whether the user keeps one normalization or dropout in eval mode
    switches: tuple[tuple[int, int, bool], ...] = ()  # calls of `requires_grad_`: step, which parameter, with what
    nan_at: int = -1  # the step whose loss is told as not a number; where the seed is a multiple of 3, it is none
    ranks: int = 1
    framework: str = ""
    fault: str = ""
    at: int = 0  # the step of the fault; for an interrupt -1 is in `attach`, and the number of steps in `close`
    line: int = 1  # of ours, since that step began
    saved: int = 0  # steps done when the checkpoint is written
    goes_on: bool = False  # behind an interrupt; for a resumed run: in the same directory
    damage: int = 0  # where a file or a saved state is damaged, and how

    def __str__(self) -> str:
        own = dataclasses.asdict(self)
        return json.dumps({f.name: own[f.name] for f in dataclasses.fields(self) if own[f.name] != f.default})

    @property
    def kind(self) -> tuple[str, str, str]:
        return "two ranks" if self.ranks > 1 else self.framework or "plain loop", self.policy, self.fault or "no fault"

    @property
    def spec(self) -> Model:
        return Model(build=functools.partial(drawn, self.blocks)) if self.model == "drawn" else MODELS[self.model]


class Block(nn.Module):
    """One block of a drawn model."""

    def __init__(self, kind: str, shared: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        norms = {"layer": nn.LayerNorm(WIDTH), "batch": nn.BatchNorm1d(WIDTH, momentum=0.4)}
        self.norm = norms.get(kind, nn.Tanh())
        self.dropout = shared if kind == "shared" else nn.Dropout(0.3 if kind in norms else 0.0)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if kind == "bare" else None
        self.linear.weight.requires_grad_(kind != "still")

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.norm(self.linear(x)))
        return x + y if self.scale is None else y * self.scale


def drawn(kinds: tuple[str, ...]) -> nn.Module:
    shared = nn.Dropout(0.2)
    return nn.Sequential(*(Block(kind, shared) for kind in kinds), nn.Linear(WIDTH, CLASSES))


def make_optimizers(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    own = [entry for entry in model.parameters() if entry.requires_grad]
    first, last = own[: len(own) // 2], own[len(own) // 2 :]
    groups = [{"params": first, "lr": 0.01, "weight_decay": 0.1}, {"params": last}]
    if case.optimizer == "two":
        return [sgd(first), adamw(last)]
    if case.optimizer == "groups":
        return [torch.optim.SGD(groups, lr=0.05, momentum=0.5, nesterov=True)]
    rmsprop = functools.partial(torch.optim.RMSprop, lr=2e-3, momentum=0.5, weight_decay=1e-2)
    return [{"sgd": sgd, "adamw": adamw, "plain": torch.optim.SGD, "rmsprop": rmsprop}[case.optimizer](own)]


@st.composite
def cases(draw: Any) -> Case:
    def some(often: Any, *others: Any) -> Any:
        return draw(st.sampled_from([often] * 3 + list(others)))

    cache, flag = some("", "memory", "disk"), st.booleans()
    steps = draw(st.integers(12, 30) if cache else st.integers(6, 24))
    moment = st.integers(0, steps - 1)
    given = {"steps": steps, "seed": draw(st.integers(0, 99)), **draw(policies(steps, 8 if cache else 3))}
    framework = draw(st.sampled_from([""] * 40 + ["transformers", "lightning", "accelerate"]))
    if framework:  # with the model, data and loop of a test, where nobody reads that freezing has ended
        given["depths"] = tuple(depth for depth in given.get("depths", ()) if depth != RAISES) or (0,)
        return Case(**given, framework=framework, accumulation=some(1, 2))
    if (model := draw(st.sampled_from(["drawn"] * 6 + list(MODELS)))) == "drawn":
        given["blocks"] = tuple(draw(st.lists(st.sampled_from(BLOCKS), min_size=3, max_size=6)))
    flags = ("tells_micro", "clips", "sets_to_none", "shuffles", "gives_loader", "calls_train", "goes_on", "falls")
    given |= {name: draw(flag) for name in flags} | {"model": model, "cache": cache, "precision": some("fp32", "bf16")}
    given |= {"accumulation": some(1, 2, 3), "evaluates": some(0, 3), "keeps_eval": some(False, True)}
    given |= {"nan_at": some(-1, draw(moment)), "after": draw(st.integers(0, 3))}
    given["optimizer"] = draw(st.sampled_from(["sgd", "adamw", "plain", "rmsprop", "groups", "two"]))
    given["ranks"] = draw(st.sampled_from([1] * 11 + [2]))
    if model != "tied" and some(False, True, True):
        switch = st.tuples(moment, st.integers(0, 40), flag)
        given["switches"] = tuple(draw(st.lists(switch, min_size=1, max_size=2)))
    fault = draw(st.sampled_from(FAULTS[:4] if given["ranks"] > 1 else (*FAULTS, "interrupt", "interrupt")))
    at = draw(st.integers(-1, steps) if fault == "interrupt" else moment)
    given |= {"fault": fault, "at": at, "line": draw(st.integers(1, 400)), "damage": draw(st.integers(0, 10**6))}
    if fault == "interrupt" and given["optimizer"] == "two":  # one might have stepped, and the other not
        given["optimizer"] = "sgd"
    return Case(**given, saved=draw(st.integers(0, at)) if fault in ("resume", "kill") else 0)


@st.composite
def policies(draw: Any, steps: int, longest: int) -> dict[str, Any]:
    name = draw(st.sampled_from(["own"] * 5 + ["plan"] * 3 + ["egeria", "linear", "none", "default"]))
    depth = st.integers(0, 6)
    if name == "plan":
        moves = sorted(draw(st.sets(st.integers(0, steps - 1), min_size=1, max_size=4)))
        return {"policy": name, "plan": " ".join(f"step {move}:{draw(depth)}" for move in moves)}
    if name == "own":
        answers = st.one_of(depth, depth, depth, st.sampled_from([None, -1, 99, RAISES]))
        depths = tuple(draw(st.lists(answers, min_size=2, max_size=8)))
        return {"policy": name, "depths": depths, "interval": draw(st.integers(1, longest))}
    return {"policy": name, "interval": draw(st.integers(1, 3))}
