"""The loop of a training, which knows nothing of freezing, and egeria as the pilot who freezes in it."""

import contextlib
import io
import itertools
import json
import math
import os
import random
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from laws.models import BATCH, NUM_ROWS
from loops import FAST
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

import egeria
from egeria.policy import Depth, Wants
from soak.cases import RAISES, Case, make_optimizers, make_schedulers

CACHES = {"": {"enabled": False}, "memory": {"enabled": "auto", "gate": "open"}, "disk": {"enabled": True}}
CACHES["disk"] |= {"gate": "open", "verify_batches": 3}


def damage_file(path: Path, number: int) -> None:
    """Cut a file short, or write something else into it."""
    if not path.exists() or not (data := path.read_bytes()):
        return
    draw = random.Random(number)
    place = draw.randrange(len(data))
    with path.open("r+b") as file:
        if draw.random() < 0.3:
            file.truncate(place)
        else:
            file.seek(place)
            file.write(bytes(draw.randrange(256) for _ in range(draw.choice([1, 200]))))


class Boom(Exception):
    """Raised by the user's own code."""


class Order(Sampler):
    """The rows in order, or in another order in each epoch."""

    def __init__(self, case: Case) -> None:
        self.shuffles, self.random = case.shuffles, torch.Generator().manual_seed(case.seed)

    def __len__(self) -> int:
        return NUM_ROWS

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(NUM_ROWS, generator=self.random).tolist() if self.shuffles else range(NUM_ROWS)


@dataclass
class Course:
    """How many layer modules a journal said were frozen, at three moments of each step, and which those are."""

    modules: list[dict[str, Any]] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    """In front of its passes."""
    updates: dict[int, int] = field(default_factory=dict)
    """Behind the update of its weights."""
    ends: dict[int, int] = field(default_factory=dict)


class Pilot:
    """Whoever freezes in a training; this one does not."""

    wraps = True
    """Whether two ranks train with `DistributedDataParallel`."""

    def open(self, training: "Training") -> None:
        """Begin, with a training that is ready."""

    def start(self, step: int) -> None:
        """Called in front of the passes of a step."""

    def modes(self, model: nn.Module) -> tuple[bool, ...]:
        """Return the modes that the modules had in the forward pass that has just been made."""
        return tuple(part.training for part in model.modules())

    def share(self) -> None:
        """Called in front of each forward pass."""

    def reduce(self) -> None:
        """Called behind each backward pass."""

    def update(self, step: int, make: Callable[[], None]) -> None:
        """Have the optimizers step."""
        make()

    def tell(self, loss: Any, *, is_micro: bool = False) -> None:
        """Called behind each step, and behind micro-batches."""

    def switch(self, name: str, parameter: nn.Parameter, flag: bool) -> None:
        """Make the user's own call of `requires_grad_`."""
        parameter.requires_grad_(flag)

    def hit(self, step: int) -> Any:
        """Return the context in which a step is made, for faults that only strike the library."""
        return contextlib.nullcontext()

    def is_torn(self, error: BaseException, training: "Training") -> None:
        """Called behind an interrupt."""

    def close(self) -> None:
        """End freezing."""


class Training:
    """An ordinary loop. Everything that the two of a pair may differ in is the pilot's."""

    def __init__(self, case: Case, pilot: Pilot, rank: int = 0) -> None:
        torch.manual_seed(case.seed)
        random.seed(case.seed)
        self.case, self.pilot, self.rank = case, pilot, rank
        self.model = case.spec.build().train()
        self.named = dict(self.model.named_parameters())
        self.called: nn.Module = self.model
        if case.ranks > 1 and pilot.wraps:
            unused = not case.spec.uses_all
            self.called = DistributedDataParallel(self.model, find_unused_parameters=unused)
        self.optimizers = make_optimizers(case, self.model)
        self.schedulers = make_schedulers(case, self.optimizers)
        rows = case.spec.rows(torch.Generator().manual_seed(case.seed + 1000 * rank))
        self.loader = DataLoader(TensorDataset(*rows), batch_size=BATCH, sampler=Order(case))
        self.batches = itertools.chain.from_iterable(itertools.repeat(self.loader))
        self.step, self.num_updates, self.losses, self.trace = 0, 0, list[float](), list[Any]()
        self.means, self.is_over = list[float](), False
        for optimizer in self.optimizers:  # in front of the library's
            optimizer.register_step_post_hook(self._note_update)
        self._train()
        pilot.open(self)

    def run(self, end: int) -> None:
        """Train up to a step."""
        while self.step < end:
            batches = [next(self.batches) for _ in range(self.case.accumulation)]
            self._prepare()
            before, random_before = [entry.clone() for entry in self.model.buffers()], torch.get_rng_state()
            self.num_updates, self._is_finished = 0, False
            try:
                with self.pilot.hit(self.step):
                    self._make(batches)
            except KeyboardInterrupt as error:
                self.pilot.is_torn(error, self)
                if not self.num_updates:
                    self._roll_back(before, random_before)
                    if not self.case.goes_on:
                        raise
                self._make(batches)
                self.step += not self.case.goes_on
                if not self.case.goes_on:
                    raise
            self.step += 1

    def _make(self, batches: list[Any]) -> None:
        """Make a step; the rest of it, where an interrupt came behind the update."""
        case, told = self.case, list[float]()
        if not self.num_updates:
            self.pilot.start(self.step)
            for number, (inputs, targets) in enumerate(batches):
                loss = self._pass(inputs, targets)
                told.append(self._told(loss))
                if number < len(batches) - 1 and case.tells_micro:
                    self.pilot.tell(told[-1], is_micro=True)
            self._loss = told[-1]
            if case.clips:
                nn.utils.clip_grad_norm_(self.named.values(), 0.5)
            grads = tuple(entry.grad is None for entry in self.named.values())
            needs = tuple(entry.requires_grad for entry in self.named.values())
            self.trace.append((self.step, "gradients", grads, needs))
            self._told_all = told if case.tells_micro else told[-1:]
            self.pilot.update(self.step, lambda: [optimizer.step() for optimizer in self.optimizers])
        if self._is_finished:
            return
        for scheduler in self.schedulers:
            scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=case.sets_to_none)
        self.losses.append(self._loss)
        self.means.append(sum(self._told_all) / len(self._told_all))
        self._is_finished = True
        self.pilot.tell(self._loss)

    def _pass(self, inputs: Tensor, targets: Tensor) -> Tensor:
        case = self.case
        is_bf16 = case.precision == "bf16"
        self.pilot.share()
        with torch.autocast("cpu", torch.bfloat16) if is_bf16 else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(self.called(inputs).float(), targets) / case.accumulation
        self.trace.append((self.step, "modes", self.pilot.modes(self.model)))
        if case.fault == "exception" and self.step == case.at and not self.is_over:
            raise Boom
        if case.nan_at == self.step and case.seed % 3 == 0:
            loss = loss * math.nan
        loss.backward()
        self.pilot.reduce()
        return loss

    def _told(self, loss: Tensor) -> float:
        is_nan = self.case.nan_at == self.step
        return math.nan if is_nan else float(loss.detach()) * self.case.accumulation

    def _prepare(self) -> None:
        """Do what a user does between two steps."""
        case = self.case
        if case.evaluates and self.step and self.step % case.evaluates == 0:
            self.model.eval()
            with torch.no_grad():
                self.model(self.loader.dataset.tensors[0][:BATCH])
            self._train()
        elif case.calls_train:
            self._train()
        for step, name, flag in self._switches():
            if step == self.step:
                self.pilot.switch(name, self.named[name], flag)
        if case.fault == "moved" and self.step == case.at:
            with torch.no_grad():
                next(iter(self.named.values())).add_(0.01)

    def _switches(self) -> list[tuple[int, str, bool]]:
        names = list(self.named)
        given = self.case.switches if self.case.ranks == 1 else ()  # DistributedDataParallel does not allow it
        return [(step, names[number % len(names)], flag) for step, number, flag in given]

    def _train(self) -> None:
        self.model.train()
        kinds = (nn.Dropout, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)
        parts = [part for part in self.model.modules() if isinstance(part, kinds)]
        if self.case.keeps_eval and parts:
            parts[self.case.seed % len(parts)].eval()

    def _roll_back(self, buffers: list[Tensor], random_state: Tensor) -> None:
        """Undo what an interrupted step has changed, as loading a checkpoint would."""
        for entry, before in zip(self.model.buffers(), buffers, strict=True):
            if not entry.equal(before):
                entry.copy_(before)
        torch.set_rng_state(random_state)
        self.trace = [entry for entry in self.trace if entry[0] != self.step]
        for parameter in self.named.values():
            parameter.grad = None

    def _note_update(self, *_: Any) -> None:
        self.num_updates += 1

    def save(self) -> bytes:
        """Return a checkpoint as loops write one."""
        parts = {"model": self.model.state_dict(), "optimizers": [each.state_dict() for each in self.optimizers]}
        parts |= {"schedulers": [each.state_dict() for each in self.schedulers], "random": torch.get_rng_state()}
        notes = {"step": self.step, "losses": self.losses, "means": self.means, "trace": self.trace}
        grads = [entry.grad for entry in self.named.values()]  # of those that keep zeros
        torch.save({**parts, **notes, "grads": grads}, buffer := io.BytesIO())
        return buffer.getvalue()

    def load(self, checkpoint: bytes) -> None:
        """Go on from a checkpoint; the state of the pilot is loaded behind this."""
        saved = torch.load(io.BytesIO(checkpoint), weights_only=True)
        for _ in range(saved["step"] * self.case.accumulation):
            next(self.batches)
        for _, name, flag in [entry for entry in self._switches() if entry[0] < saved["step"]]:
            self.named[name].requires_grad_(flag)
        self.model.load_state_dict(saved["model"])
        for own, name in ((self.optimizers, "optimizers"), (self.schedulers, "schedulers")):
            for each, state in zip(own, saved[name], strict=True):
                each.load_state_dict(state)
        for entry, grad in zip(self.named.values(), saved["grads"], strict=True):
            entry.grad = grad
        for name in ("step", "losses", "means", "trace"):
            setattr(self, name, saved[name])
        torch.set_rng_state(saved["random"])

    def everything(self) -> dict[str, Any]:
        """Return all numbers that a training changes, as bytes, so that what is not a number is compared too."""
        state = {f"model {name}": entry for name, entry in self.model.state_dict().items()}
        state |= {f"gradient {name}": entry.grad for name, entry in self.named.items()}
        for number, optimizer in enumerate(self.optimizers):
            found = optimizer.state_dict()
            state[f"groups {number}"] = repr(found["param_groups"])
            for index, entry in found["state"].items():
                state |= {f"optimizer {number} {index} {name}": value for name, value in entry.items()}
        state |= {"losses": repr(self.losses), "random": torch.get_rng_state()}
        state |= {"schedulers": repr([each.state_dict() for each in self.schedulers])}
        return {name: as_bytes(value) for name, value in state.items()}


def as_bytes(value: Any) -> Any:
    """Return the bytes of a tensor, and anything else as it is."""
    return value.detach().contiguous().flatten().view(torch.uint8).clone() if isinstance(value, Tensor) else value


class Own:
    """A policy of the user's own, which gives its answers in turn."""

    def __init__(self, case: Case, deepest: int, given: list[Any]) -> None:
        self.wants, self.case, self.deepest, self.given = Wants(interval_steps=case.interval), case, deepest, given
        self.num_asked = 0

    def observe(self, interval: Any) -> Depth | None:
        answer = self.case.depths[self.num_asked % len(self.case.depths)]
        self.num_asked += 1
        if answer == RAISES:
            raise Boom
        if answer is not None and 0 <= answer <= self.deepest:
            self.given.append(answer)
        return None if answer is None else Depth(answer, "drawn")

    def state_dict(self) -> dict[str, Any]:
        return {"num_asked": self.num_asked}

    def load_state_dict(self, state: Any) -> None:
        self.num_asked = state["num_asked"]


class Attached(Pilot):
    """egeria; notes after each moment of a step what its journal says is frozen."""

    def __init__(self, case: Case, directory: Path, course: Course | None = None, tracer: Any = None) -> None:
        self.case, self.directory, self.tracer = case, directory, tracer
        self.course = course or Course()
        self.given, self.heard = list[int](), list[Any]()
        """The depths that the user's policy has asked for, and the events that a callback got."""
        self.run: Any = None
        self.is_closed, self.records = False, list[dict[str, Any]]()
        self.torn = ""
        """Where an interrupt came in the middle of a change of depth, which the journal cannot tell."""
        path = directory / "journal.jsonl"
        self._path, self._offset, self._depth = path, path.stat().st_size if path.exists() else 0, 0

    def open(self, training: Training) -> None:
        self.training, case = training, self.case
        groups, given = self.settings()
        if case.gives_loader:
            given["loader"] = training.loader
        given |= {"scheduler": training.schedulers or None, "total_steps": case.steps, "directory": self.directory}
        attach = partial(egeria.attach, training.called, training.optimizers, config=groups, **given)
        try:
            with self.hit(-1):
                self.run = attach()
        except KeyboardInterrupt:  # a user runs the cell again
            self.run = attach()
        self.run.on_event(self.heard.append)
        if case.fault == "listener":
            self.run.on_event(self._raise_late)

    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the `config`, and the policy or plan, that `attach` is given."""
        case = self.case
        groups: dict[str, Any] = {"cache": CACHES[case.cache]}
        given: dict[str, Any] = {"policy": case.policy}
        if case.policy == "egeria":
            groups |= {**FAST, "plasticity": {"interval_steps": case.interval, "window": 2}}
            groups |= {"reference": {"precision": "fp32"}, "freezing": {"tolerance_share": 3.0}}
        elif case.policy == "own":
            given = {"policy": lambda *, deepest, **_: Own(case, deepest, self.given)}
        elif case.policy == "plan":
            given = {"plan": case.plan}
        elif case.policy == "default":
            given, groups["policy"] = {}, {"pretrained": case.seed % 4 > 0}
        return groups, given

    def hit(self, step: int) -> Any:
        """Return the tracer at the step of an interrupt or a kill."""
        is_here = self.tracer is not None and step == self.case.at
        return self.tracer if is_here else contextlib.nullcontext()

    def start(self, step: int) -> None:
        if not self.is_closed:
            self.course.starts[step] = self.told()
        if step == self.case.at and self.case.fault == "disk":
            size, hard = self._path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + self.case.damage % 500, hard))
        elif step == self.case.at and self.case.fault == "cache file":
            links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
            for link in links:  # the file has no name
                with contextlib.suppress(OSError):
                    if "egeria-activations" in str(link.readlink()):
                        damage_file(link, self.case.damage)

    def update(self, step: int, make: Callable[[], None]) -> None:
        try:
            make()
        finally:
            if not self.is_closed:
                self.course.updates[step] = self.told()

    def tell(self, loss: Any, *, is_micro: bool = False) -> None:
        try:
            self.run.step(1.0 if self.case.policy == "egeria" and self.case.seed % 2 else loss)
        finally:
            if not (is_micro or self.is_closed):
                self.course.ends[self.training.step] = self.told()

    def is_torn(self, error: BaseException, training: Training) -> None:
        """Note whether the interrupt came within a change of depth."""
        trace, names = error.__traceback__, list[str]()
        while trace is not None:
            names.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        inside = {"set_depth", "apply", "_tell", "restore", "_end", "_release", "freeze_to", "_runs_late"}
        if found := inside.intersection(names):
            self.torn = f"in {min(found)}"
        if len(training.optimizers) > 1 and 0 < training.num_updates < len(training.optimizers):
            self.torn = "between two optimizers"
        if training.step == 0 and not training.num_updates and any(True for _ in training.model.buffers()):
            self.torn = "statistics were begun anew"

    def told(self) -> int:
        """Return how many layer modules are frozen according to the journal; rank 0 tells the others."""
        for record in self._news():
            self.records.append(record)
            kind = record["event"]
            if kind == "run_started":
                self.course.modules = record["modules"]
            elif kind in ("frozen", "resumed"):
                self._depth = record["frozen"]
            elif kind in ("thawed", "run_closed") or (kind == "declined" and record["what"] == "freezing"):
                self._depth = 0
        if self.case.ranks > 1:
            both = [(self._depth, self.course.modules)]
            distributed.broadcast_object_list(both)
            self._depth, self.course.modules = both[0]
        return self._depth

    def _news(self) -> list[dict[str, Any]]:
        if self.case.fault == "disk":
            news, self.heard[:] = [event.to_dict() for event in self.heard], []
            return news
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        return [json.loads(line) for line in whole.split(b"\n") if line.strip()]

    def _raise_late(self, _event: Any) -> None:
        if len(self.heard) > self.case.damage % 7:
            raise Boom

    def close(self) -> None:
        try:
            with self.hit(self.case.steps):
                self.run.close()
        except KeyboardInterrupt:
            pass
        self.run.close()
        self.is_closed = True
        links = [str(Path("/proc/self/fd", name).resolve()) for name in os.listdir("/proc/self/fd")]
        self.still_open = [link for link in links if str(self.directory) in link]
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
