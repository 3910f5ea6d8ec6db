"""Ctrl-C at any line of the library: the loop goes on or ends, and a second `close` finishes the work."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import egeria
from egeria.cache.boundary import Boundary
from laws.models import ResidualNet

ROOT = str(Path(egeria.__file__).parent)
NUM_STEPS, LAST_DEPTH = 16, 2
PAPER = {
    "plasticity": {"interval_steps": 2, "window": 2},
    "reference": {"precision": "fp32"},
    "controller": {"budget_share": 100.0},
}
HOW = {
    "plan": {"plan": f"0:20 0.25:0 0.6:{LAST_DEPTH}"},
    "paper": {"policy": "egeria", "controller": "inline", "config": PAPER},
}


class Interrupter:
    """Counts the lines of the library that run, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at, self.count, self.place = at, 0, ""
        self.places = dict[tuple[str, int], list[int]]()
        """For each line when it ran."""

    def __enter__(self) -> "Interrupter":
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame, _event, _argument):
        return self._look if frame.f_code.co_filename.startswith(ROOT) else None

    def _look(self, frame, event, _argument):
        if event == "line":
            self.count += 1
            if self.at is None:
                self.places.setdefault((frame.f_code.co_filename, frame.f_lineno), []).append(self.count)
            elif self.count == self.at:
                self.place = f"{frame.f_code.co_filename.removeprefix(ROOT)}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._look


def train(directory, kind, at, goes_on):
    """Train with an interrupt at one line; return what the interrupter saw, and what was wrong in the end."""
    torch.manual_seed(0)
    model, wrong = ResidualNet(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = egeria.attach(model, optimizer, total_steps=NUM_STEPS, directory=directory, **HOW[kind])
    step, tracer = 0, Interrupter(at)
    while step < NUM_STEPS:
        try:
            with tracer:
                loss = nn.functional.cross_entropy(model(torch.randn(4, 3, 6, 6)), torch.randint(3, (4,)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss if kind == "plan" else 1.0)
            step += 1
        except KeyboardInterrupt:
            wrong += [] if torch.is_grad_enabled() else ["gradients are switched off"]
            if not goes_on:
                break
    frozen = run.frozen
    run.close()
    run.close()
    return tracer, wrong + left_over(model, optimizer) + ([] if told(directory) == frozen else ["the journal"])


def left_over(model, optimizer):
    """Return what the library has left on a model and its optimizer."""
    found = []
    for name, part in model.named_modules():
        hooks = len(part._forward_hooks) + len(part._forward_pre_hooks)
        if hooks or {"train", "forward"} & vars(part).keys() or not part.training:
            found.append(f"{name}: {hooks} hooks, training {part.training}")
    found += [name for name, entry in model.named_parameters() if not entry.requires_grad]
    return [*found, *optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def told(directory):
    """Return the depth that the journal tells."""
    depth = 0
    for line in (directory / "journal.jsonl").read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # the line that was being written
            continue
        depth = {"frozen": event.get("frozen"), "thawed": 0}.get(event["event"], depth)
    return depth


@pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")
@pytest.mark.parametrize("kind", ["plan", pytest.param("paper", marks=pytest.mark.slow)])
@pytest.mark.parametrize("places", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_an_interrupt_at_any_line_leaves_nothing_behind(kind, places, tmp_path):
    whole, wrong = train(tmp_path / "whole", kind, None, goes_on=True)
    assert wrong == []
    draw, found = random.Random(places), {}
    for place in draw.sample(sorted(whole.places), places):
        at = draw.choice(whole.places[place])
        tracer, wrong = train(tmp_path / str(at), kind, at, goes_on=draw.random() < 0.5)
        if wrong:
            found[tracer.place] = wrong
    assert found == {}


def test_a_close_behind_an_interrupted_look_at_the_frozen_front_takes_its_hooks_off(tmp_path, monkeypatch):
    calls, take_off = [], Boundary.close

    def close(boundary):
        calls.append(None)
        if len(calls) == 12:
            raise KeyboardInterrupt
        take_off(boundary)

    monkeypatch.setattr(Boundary, "close", close)
    model, rows = ResidualNet(), torch.randn(12, 3, 6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(rows), batch_size=4)
    run = egeria.attach(model, optimizer, loader, total_steps=30, plan="0:9", directory=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        for (batch,) in [entry for _ in range(10) for entry in loader]:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(1.0)
    run.close()
    assert len(calls) >= 12 and left_over(model, optimizer) == []
