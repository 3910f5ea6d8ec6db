"""The loop of a training, which knows nothing of freezing, and its pilots: egeria, and a user who does it by hand."""

import contextlib
import copy
import functools
import itertools
import json
import math
import os
import random
import resource
import signal
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from soak.cases import RAISES, Case, make_optimizers
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import egeria
from egeria.policy import Depth, Wants
from laws.models import BATCH
from loops import FAST

CACHES = {"": {"enabled": False}, "memory": {"enabled": "auto", "gate": "open"}}
CACHES["disk"] = {"enabled": True, "gate": "open", "verify_batches": 3}


class Boom(Exception):
    """Raised by the user's own code."""


class Training:
    """An ordinary loop. Everything that the two of a pair may differ in is the pilot's, who is called at moments."""

    def __init__(self, case: Case, pilot: Any, rank: int = 0) -> None:
        torch.manual_seed(case.seed)
        random.seed(case.seed)
        self.case, self.pilot, self.model = case, pilot, case.spec.build().train()
        self.named, self.called = dict(self.model.named_parameters()), self.model
        if case.ranks > 1:
            unused = isinstance(pilot, ByHand) or not case.spec.uses_all
            self.called = DistributedDataParallel(self.model, find_unused_parameters=unused)
        self.optimizers = make_optimizers(case, self.model)
        fall = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1 + case.steps // 3)
        self.schedulers = [fall(each) for each in self.optimizers if case.falls]
        self.parts = {f"{type(part).__name__} {n}": part for n, part in enumerate([*self.optimizers, *self.schedulers])}
        self.parts["model"] = self.model
        rows = case.spec.rows(torch.Generator().manual_seed(case.seed + 1000 * rank))
        order = {"shuffle": case.shuffles, "generator": torch.Generator().manual_seed(case.seed)}
        self.loader = DataLoader(TensorDataset(*rows), batch_size=BATCH, **order)
        self.batches = itertools.chain.from_iterable(itertools.repeat(self.loader))
        self.step = self.num_updates = self.end = 0
        self.losses, self.trace, self._micro, self.is_over = list[float](), list[Any](), list[Any](), False
        for optimizer in self.optimizers:  # in front of the library's
            optimizer.register_step_post_hook(self._note_update)
        self._train()
        pilot.open(self)

    def finish(self, end: int) -> None:
        with contextlib.suppress(Boom, KeyboardInterrupt):
            self.run(end)
        self.is_over, self.end = True, self.step
        self.pilot.close()
        self.run(self.step + self.case.after)

    def run(self, end: int) -> None:
        while self.step < end:
            self._micro = self._micro or [next(self.batches) for _ in range(self.case.accumulation)]
            before = copy.deepcopy(self.save()) if self.case.fault == "interrupt" else {}
            self.num_updates, self._is_finished = 0, False
            try:
                self._make()
            except KeyboardInterrupt as error:
                if self.case.fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                self.pilot.note_interrupt(error)
                is_made = self.num_updates > 0
                if not is_made:  # as a user would who loads a checkpoint
                    own = zip(self.named.values(), before["grads"], strict=True)
                    before["grads"] = [None if entry.grad is None else grad for entry, grad in own]
                    self._restore(before)
                if is_made or self.case.goes_on:
                    self._make()
                if not self.case.goes_on:
                    self.step, self._micro = self.step + is_made, [] if is_made else self._micro
                    raise
            self.step, self._micro = self.step + 1, []

    def _make(self) -> None:
        """Make a step; the rest of it, where an interrupt came behind the update."""
        case, parameters = self.case, self.named.values()
        if not self.num_updates:
            self._prepare()
            self.pilot.at("start")
            self._told = [self._pass(*batch, number) for number, batch in enumerate(self._micro, start=1)]
            if case.clips:
                nn.utils.clip_grad_norm_(parameters, 0.5)
            self.trace.append((self.step, [(entry.grad is None, entry.requires_grad) for entry in parameters]))
            self.pilot.at("update")
            for optimizer in self.optimizers:
                optimizer.step()
            self.pilot.at("updated")
        if self._is_finished:
            return
        for scheduler in self.schedulers:
            scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=case.sets_to_none)
        told = self._told if case.tells_micro else self._told[-1:]
        self.losses.append(sum(told) / len(told))
        self._is_finished = True
        self.pilot.at("tell", told[-1])
        self.pilot.at("end")

    def _pass(self, inputs: Tensor, targets: Tensor, number: int) -> float:
        case = self.case
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            loss = nn.functional.cross_entropy(self.called(inputs).float(), targets) / case.accumulation
        if case.fault == "exception" and self.step == case.at and not self.is_over:
            raise Boom
        is_nan = case.nan_at == self.step
        (loss * math.nan if is_nan and case.seed % 3 == 0 else loss).backward()
        told = math.nan if is_nan else float(loss.detach()) * case.accumulation
        if case.tells_micro and number < case.accumulation:
            self.pilot.at("tell", told)
            self.pilot.at(f"told {number}")  # behind an interrupt a step may be counted as late as here
        return told

    def _prepare(self) -> None:
        case = self.case
        is_evaluated = case.evaluates and self.step and self.step % case.evaluates == 0
        if is_evaluated:
            self.model.eval()
            with torch.no_grad():
                self.model(self.loader.dataset.tensors[0][:BATCH])
        if is_evaluated or case.calls_train:
            self._train()
        for step, name, flag in self._switches():
            if step == self.step:
                self.pilot.switch(name, flag)
        if case.fault == "moved" and self.step == case.at:
            with torch.no_grad():
                next(iter(self.named.values())).add_(0.01)

    def _switches(self) -> list[tuple[int, str, bool]]:
        names = list(self.named)
        given = self.case.switches if self.case.ranks == 1 else ()  # DistributedDataParallel does not allow it
        return [(step, names[number % len(names)], flag) for step, number, flag in sorted(given)]

    def _train(self) -> None:
        self.model.train()
        kinds = (nn.Dropout, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)
        parts = [part for part in self.model.modules() if isinstance(part, kinds)]
        if self.case.keeps_eval and parts:
            parts[self.case.seed % len(parts)].eval()

    def _note_update(self, *_: Any) -> None:
        self.num_updates += 1

    def save(self) -> dict[str, Any]:
        notes = {name: getattr(self, name) for name in ("step", "losses", "trace")}
        notes |= {name: part.state_dict() for name, part in self.parts.items()}
        return {**notes, "random": torch.get_rng_state(), "grads": [entry.grad for entry in self.named.values()]}

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint; the state of the pilot is loaded behind this."""
        for _ in range(saved["step"] * self.case.accumulation):
            next(self.batches)
        for _, name, flag in [entry for entry in self._switches() if entry[0] < saved["step"]]:
            self.named[name].requires_grad_(flag)
        self._restore(saved)

    def _restore(self, saved: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        for entry, grad in zip(self.named.values(), saved["grads"], strict=True):
            entry.grad = grad
        self.step, self.losses, self.trace = saved["step"], [*saved["losses"]], [*saved["trace"]]
        torch.set_rng_state(saved["random"])

    def everything(self) -> dict[str, Any]:
        saved = {**self.save(), "grads": {name: entry.grad for name, entry in self.named.items()}}
        return as_bytes(saved)


def as_bytes(value: Any) -> Any:
    """Return dictionaries with the bytes of tensors, and with the texts of anything else."""
    if isinstance(value, dict):
        return {key: as_bytes(entry) for key, entry in value.items()}
    return value.detach().flatten().view(torch.uint8).clone() if isinstance(value, Tensor) else repr(value)


class Attached:
    """egeria; notes at each moment of a step how many layer modules are frozen according to the journal."""

    def __init__(self, case: Case, directory: Path, tracer: Any = None) -> None:
        self.case, self.directory, self.tracer = case, directory, tracer
        self.modules, self.course = list[dict[str, Any]](), dict[tuple[int, str], int]()
        self.given, self.heard = list[int](), list[dict[str, Any]]()  # what the user's policy and callback gave and got
        self.is_torn = self.is_odd = False  # by an interrupt within a change of depth; where the journal lacks a move
        self._path, self._depth, self._is_closed = directory / "journal.jsonl", 0, False
        self._offset = len(self._path.read_text(errors="replace")) if self._path.exists() else 0

    def settings(self) -> dict[str, Any]:
        case, groups = self.case, {"cache": CACHES[self.case.cache]}
        if case.policy == "egeria":
            groups |= {**FAST, "plasticity": {"interval_steps": case.interval, "window": 2}}
            groups |= {"reference": {"precision": "fp32"}, "freezing": {"tolerance_share": 3.0}}
        elif case.policy == "default":
            groups["policy"] = {"pretrained": case.seed % 4 > 0}
        given = {"default": {}, "plan": {"plan": case.plan}, "own": {"policy": self._make_policy}}
        return {"config": groups, **given.get(case.policy, {"policy": case.policy})}

    def _make_policy(self, *, deepest: int, **_: Any) -> Any:
        case, state = self.case, {"num_asked": 0}

        def observe(_: Any) -> Depth | None:
            answer = case.depths[state["num_asked"] % len(case.depths)]
            state["num_asked"] += 1
            if answer == RAISES:
                raise Boom
            self.given += [answer] if answer is not None and 0 <= answer <= deepest else []
            return None if answer is None else Depth(answer, "drawn")

        policy: Any = SimpleNamespace(wants=Wants(interval_steps=case.interval), observe=observe)
        policy.state_dict, policy.load_state_dict = state.copy, state.update
        return policy

    def open(self, training: Training) -> None:
        self.training, case = training, self.case
        given = {**self.settings(), "directory": self.directory, "total_steps": case.steps}
        given |= {"loader": training.loader if case.gives_loader else None, "scheduler": training.schedulers or None}
        self.run: Any = None
        with contextlib.suppress(KeyboardInterrupt), self.hit(-1):
            self.run = egeria.attach(training.called, training.optimizers, **given)
        if self.run is None:  # a user runs the cell again
            self.run = egeria.attach(training.called, training.optimizers, **given)
        self.run.on_event(self._hear)

    def hit(self, step: int) -> Any:
        return self.tracer if self.tracer is not None and step == self.case.at else contextlib.nullcontext()

    def at(self, moment: str, loss: float = 0.0) -> None:
        step = self.training.step
        if moment == "tell":
            self.run.step(1.0 if self.case.policy == "egeria" and self.case.seed % 2 else loss)
        elif moment != "update" and not self._is_closed:
            self.course[step, "update" if moment == "updated" else moment] = self.told()
        if moment == "start" and step == self.case.at and not self._is_closed:
            self._strike()

    def _strike(self) -> None:
        self.hit(self.case.at).__enter__()
        if self.case.fault == "disk":
            most = self._path.stat().st_size + self.case.damage % 500
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        for link in Path("/proc/self/fd").iterdir() if self.case.fault == "cache file" else ():  # the file has no name
            if link.is_symlink() and "egeria-activations" in str(link.readlink()):
                damage_file(link, self.case.damage)

    def switch(self, name: str, flag: bool) -> None:
        self.training.named[name].requires_grad_(flag)

    def note_interrupt(self, error: BaseException) -> None:
        changing = {"set_depth", "apply", "_tell", "restore", "_end", "_release", "freeze_to", "_runs_late"}
        names = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
        self.is_torn |= self.training.step == 0 or not names.isdisjoint(changing)

    def told(self) -> int:
        for record in self._news():
            kind = record["event"]
            if kind == "run_started":
                self.modules = record["modules"] or self.modules  # none where freezing had ended before
            elif kind in ("frozen", "resumed"):
                self.is_odd |= kind == "frozen" and record["frozen"] != self._depth + 1
                self._depth = record["frozen"]
            elif kind in ("thawed", "run_closed") or (kind == "declined" and record["what"] == "freezing"):
                self._depth = 0
        if self.case.ranks > 1:
            both = [(self._depth, self.modules)]
            distributed.broadcast_object_list(both)
            self._depth, self.modules = both[0]
        return self._depth

    def _news(self) -> list[dict[str, Any]]:
        if self.case.fault == "disk":
            begin, self._offset = self._offset, len(self.heard)
            return self.heard[begin:]
        text = self._path.read_text(errors="replace") if self._path.exists() else ""
        begin, self._offset = self._offset, text.rfind("\n") + 1
        return [json.loads(line) for line in text[begin : self._offset].splitlines() if line]

    def _hear(self, event: Any) -> None:
        self.heard.append(event.to_dict())
        if self.case.fault == "listener" and len(self.heard) > self.case.damage % 7:
            raise Boom

    def close(self) -> None:
        sys.settrace(None)
        with contextlib.suppress(KeyboardInterrupt), self.hit(self.case.steps):
            self.run.close()
        self.run.close()
        self._is_closed = True
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        self.still_open = [name for name in map(os.path.realpath, links) if str(self.directory) in name]


def damage_file(path: Path, number: int, first: int = 0) -> None:
    """Cut a file short, or write something else into it, from this byte on."""
    if not path.exists() or not (data := path.read_bytes()):
        return
    draw = random.Random(number)
    place = draw.randrange(first, len(data))
    with path.open("r+b") as file:
        file.seek(place)
        file.write(draw.randbytes(draw.choice([1, 200])))
        file.truncate(place if draw.random() < 0.3 else None)


class ByHand:
    """Freezes layer modules by `requires_grad`, modes and gradients, as a course says; nothing without one."""

    def __init__(self, modules: Any = (), course: dict[tuple[int, str], int] | None = None) -> None:
        self.modules, self.course, self._depth = modules, course or {}, 0
        self._held = list[set[str]]()  # for each frozen layer module the parameters switched off with it
        self._still = set[nn.Module]()  # what stays in eval mode
        self._handles, self._before = list[Any](), dict[nn.Module, bool]()

    def open(self, training: Training) -> None:
        self.training, model = training, training.model
        self._handles += [model.register_forward_pre_hook(self._enter), model.register_forward_hook(self._leave)]
        for number, module in enumerate(self.modules if training.case.spec.tied else (), start=1):
            tap, cut = model.get_submodule(module["tap"]), functools.partial(self._cut, number)
            self._handles.append(tap.register_forward_hook(cut))

    def at(self, moment: str, loss: float = 0.0) -> None:
        if moment not in ("tell", "updated"):
            self.freeze(self.course.get((self.training.step, moment), self._depth) if self._handles else 0)

    def close(self) -> None:
        self.freeze(0)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def switch(self, name: str, flag: bool) -> None:
        self.training.named[name].requires_grad_(flag)
        for names in self._held:  # the user is the owner of it from now on
            names.discard(name)

    def freeze(self, depth: int) -> None:
        if depth == self._depth:
            return
        named = dict(self.training.model.named_parameters(remove_duplicate=False))
        while len(self._held) > depth:
            for name in self._held.pop():
                named[name].requires_grad_(True)
        for module in self.modules[len(self._held) : depth]:
            self._held.append({name for name in module["parameters"] if named[name].requires_grad})
            for name in self._held[-1]:
                named[name].requires_grad_(False).grad = None
        self._depth, self._still = depth, self._find_still(depth)

    def _find_still(self, depth: int) -> set[nn.Module]:
        model, none = self.training.model, set[nn.Module]()
        roots = [[model.get_submodule(name) for name in module["submodules"]] for module in self.modules]
        parts = [{part for root in own for part in root.modules()} for own in roots]
        front = none.union(*(own for own, held in zip(parts, self._held, strict=False) if held))
        trains = {part for part in front if any(entry.requires_grad for entry in part.parameters(recurse=False))}
        norms = {part for part in model.modules() if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d))}
        is_alone = depth == len(parts) - 1 and not (
            self.training.case.policy == "default" and self.training.case.seed % 4
        )
        return front - none.union(*parts[depth:]) - trains | (norms if is_alone else none)

    def _enter(self, *_: Any) -> None:
        self._before = {part: part.training for part in self._still}
        for part in self._still:
            part.training = False

    def _leave(self, *_: Any) -> None:
        for part, mode in self._before.items():
            part.training = mode

    def _cut(self, number: int, _part: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
        return output.detach() if number == self._depth else None
