"""`egeria.attach`: checks what it is given and makes the parts of a run."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from egeria.config import Config
from egeria.controller import (
    AbsentController,
    Controller,
    ControllerChoice,
    EvaluationPlan,
    choose,
    make_controller,
)
from egeria.errors import ConfigError, UnsupportedModelError
from egeria.events import ControllerChosen, RunStarted
from egeria.journal.recorder import Recorder
from egeria.parallel import ParallelStrategy
from egeria.plasticity import find_metric
from egeria.policy import (
    FORESIGHT,
    PLASTICITY,
    Policy,
    PolicyMaker,
    UnfreezeRule,
    choose_interval,
    find_policy,
    harmless_error,
)
from egeria.session.applying import Applier
from egeria.session.checks import agree_on_the_run, check_training, choose_rule
from egeria.session.compiling import Compiling
from egeria.session.evaluation import Evaluation
from egeria.session.following import Cut, Training
from egeria.session.loop import CutParts, Session
from egeria.session.measures import Foresight, Measures
from egeria.session.meter import IntervalMeter
from egeria.session.ranks import Ranks, Subject
from egeria.session.run import Run
from egeria.session.skipping import begin_skipping
from egeria.session.timing import Budget, IterationTimer, Stopwatch

RUNS = Path("egeria_runs")


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Any = None,
    *,
    scheduler: Any = None,
    total_steps: int | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    directory: str | Path | None = None,
    controller: str | Controller | None = None,
    policy: str | PolicyMaker | None = None,
    parallel: ParallelStrategy | None = None,
) -> Run:
    """Watch a training run and freeze its front layers as they converge; `run.close()` undoes everything.

    Nothing about the model, the optimizer or the loader changes until the first layer module freezes. A model that
    cannot be cut, or a directory that cannot be written, is no error: the run continues without, with a warning.

    Args:
        model: the model in training; call `run.model` in its place.
        optimizer: the optimizer, or all of them; never changed.
        loader: the training loader, to count its steps and workers; with `cache.enabled` its samples are followed.
        scheduler: the learning-rate scheduler, read for the rates to come or for when to thaw; never stepped.
        total_steps: optimizer steps of the whole run; without it the default policy freezes nothing.
        config: a `Config`, nested dictionaries, or the path of a TOML file.
        directory: where the journal and the report go; None makes one under `egeria_runs/`.
        controller: 'auto', 'process' or 'inline', before `config`'s own; or a controller of your own.
        policy: the name of a policy, before `config`'s own; or an `egeria.policy.PolicyMaker` of your own.
        parallel: how several processes train together; None takes that from the model's wrapper and the job.

    Returns:
        The run: call `run.step(loss)` once after each optimizer step.

    Raises:
        ConfigError: an argument or a setting is outside its contract.
    """
    watch, named = Stopwatch(), {"controller": controller, "policy": policy}
    training, parallel = check_training(model, optimizer, total_steps, config=config, parallel=parallel, **named)
    rule_name, rule = choose_rule(training.config, scheduler, total_steps)
    choice, make = _choose_controller(training, controller, loader)
    shared = _share(training, parallel, rule, make, directory)
    cut, interval_steps = _begin(shared, choice, rule_name, _environment(training.model, loader))
    session = _make_session(shared, cut, interval_steps, loader, scheduler)
    session.timer.add_overhead(*watch.read())
    return Run(training.handle, session, shared.recorder)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the parts of a run share; some are made a second time, for another cut of the model."""

    training: Training
    parallel: ParallelStrategy
    ranks: Ranks
    recorder: Recorder
    compiling: Compiling
    budget: Budget
    rule: UnfreezeRule
    make_controller: Callable[[tuple[str, ...]], Controller]
    """Makes a controller for the taps of a cut."""


def _share(
    training: Training,
    parallel: ParallelStrategy,
    rule: UnfreezeRule,
    make_controller: Callable[[tuple[str, ...]], Controller],
    directory: str | Path | None,
) -> _Shared:
    ranks = Ranks(parallel)
    recorder = _make_recorder(ranks, directory)
    training.handle.call_instead(parallel.rewrap())
    compiling = Compiling(training.handle, recorder)
    budget = Budget(training.config.controller.budget_share, training.config.plasticity.window)
    return _Shared(training, parallel, ranks, recorder, compiling, budget, rule, make_controller)


def _begin(
    shared: _Shared, choice: ControllerChoice, rule_name: str, environment: dict[str, Any]
) -> tuple[Cut | None, int]:
    """Return the cut of the model, None where nothing can be frozen, and `n`; journal how the run begins."""
    training, ranks, recorder = shared.training, shared.ranks, shared.recorder
    cut, refusal = _cut(training, shared.parallel)
    needs = _make_policy(shared, cut).needs if cut else frozenset()
    if cut and PLASTICITY not in needs:
        choice = ControllerChoice(
            kind="none", device="", reason=f"the policy {training.policy_name!r} reads no plasticity"
        )
    interval_steps, interval_reason = choose_interval(
        training.config, total_steps=training.total_steps, num_modules=len(cut.modules) if cut else 1
    )
    if not ranks.is_alone:
        differs = agree_on_the_run(ranks, training, cut, interval_steps, choice.kind == "process")
        refusal = refusal or differs or ""
    cut = None if refusal else cut
    recorder.write(
        RunStarted(
            step=0,
            config=training.config.to_dict(),
            rule=rule_name,
            total_steps=training.total_steps,
            interval_steps=interval_steps,
            interval_reason=interval_reason,
            environment=environment,
            **(cut.to_dict() if cut else {"modules": [], "trainable": [], "deepest_freeze": 0}),
        )
    )
    if refusal:
        recorder.decline("freezing", refusal)
    if cut:
        recorder.write(ControllerChosen(step=0, controller=choice.kind, reason=choice.reason))
        runs = "the controller runs" if choice.device else "the controller is"
        logging.getLogger("egeria").info("%s %s: %s", runs, choice.kind, choice.reason)
    if FORESIGHT in needs and training.total_steps is None:
        reason = f"{training.policy_name!r} weighs what is still to come: give attach total_steps"
        recorder.decline("freezing", reason)
    return cut, interval_steps


def _make_session(shared: _Shared, cut: Cut | None, interval_steps: int, loader: Any, scheduler: Any) -> Session:
    training, ranks, recorder, timer = shared.training, shared.ranks, shared.recorder, IterationTimer()
    skipping = begin_skipping(training, loader, ranks, recorder, timer.take_out) if cut else None
    parts = _make_parts(shared, cut) if cut else None
    # What the first process measures holds for all; where each has a part of the parameters, each measures that.
    measures = Measures(
        training.model,
        training.optimizers,
        parts.policy.needs if parts and (ranks.leads or training.is_sharded) else (),
        foresight=Foresight(scheduler, training.total_steps),
        add_up=partial(ranks.sums, Subject.MEASURES) if training.is_sharded else list,
        recorder=recorder,
        spend=timer.take_out,
    )
    return Session(
        training,
        parts,
        partial(_make_parts, shared),
        interval_steps=interval_steps,
        ranks=ranks,
        recorder=recorder,
        meter=IntervalMeter(timer, measures, ranks, recorder),
        compiling=shared.compiling,
        budget=shared.budget,
        skipping=skipping,
    )


def _make_parts(shared: _Shared, cut: Cut) -> CutParts:
    training, ranks, recorder = shared.training, shared.ranks, shared.recorder
    policy = _make_policy(shared, cut)
    controller: Controller = AbsentController()
    if PLASTICITY in policy.needs and ranks.leads:
        controller = shared.make_controller(tuple(module.tap for module in cut.modules[:-1]))
    return CutParts(
        modules=cut.modules,
        policy=policy,
        evaluation=Evaluation(training, cut.modules, controller, ranks=ranks, budget=shared.budget, recorder=recorder),
        applier=Applier(
            training,
            cut.modules,
            parallel=shared.parallel,
            ranks=ranks,
            compiling=shared.compiling,
            recorder=recorder,
        ),
    )


def _make_policy(shared: _Shared, cut: Cut) -> Policy:
    """Make the policy for a cut.

    Raises:
        ConfigError: what was made is none.
    """
    training = shared.training
    policy = find_policy(training.config.policy.name)(
        training.config,
        trainable=cut.trainable,
        rule=shared.rule,
        total_steps=training.total_steps,
        deepest_freeze=cut.deepest_freeze,
    )
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"policy.name takes a callable that makes an egeria.policy.Policy, found one that makes "
            f"{type(policy).__name__}. Give what it makes the attributes and methods of that protocol."
        )
    return policy


def _cut(training: Training, parallel: ParallelStrategy) -> tuple[Cut | None, str]:
    """Return how the model is cut, or None and why it is left alone."""
    refusal = parallel.refusal()
    if any(isinstance(optimizer, LBFGS) for optimizer in training.optimizers):
        refusal = "LBFGS moves parameters by its history, also those without a gradient"
    if refusal:
        return None, refusal
    try:
        return Cut.of(training, training.parse()), ""
    except UnsupportedModelError as error:
        return None, str(error)


def _make_recorder(ranks: Ranks, directory: str | Path | None) -> Recorder:
    """Return the recorder; of several processes only the first keeps a journal."""
    if not ranks.leads:
        return Recorder(None, echoes=True)
    return Recorder(Path(directory) if directory is not None else _new_directory())


def _new_directory() -> Path:
    """Make a directory that no other run writes to; where that fails, the journal says so."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
        directory = RUNS / f"{name}{suffix}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            break
        return directory
    return RUNS / name


def _choose_controller(
    training: Training, given: str | Controller | None, loader: Any
) -> tuple[ControllerChoice, Callable[[tuple[str, ...]], Controller]]:
    """Return which controller it is and what makes it for the taps of a cut."""
    if given is not None and not isinstance(given, str):
        return ControllerChoice(kind=type(given).__name__, device="", reason="given to attach"), lambda taps: given
    config, settings = training.config, training.config.controller
    choice = choose(settings.kind, config.reference.device, training.model, loader)
    metric = find_metric(config.plasticity.metric)

    def make(taps: tuple[str, ...]) -> Controller:
        plan = EvaluationPlan(
            taps=taps,
            metric=metric,
            largest_map=config.plasticity.largest_map,
            window=config.plasticity.window,
            precision=config.reference.precision,
            device=choice.device,
            fidelity_share=config.reference.fidelity_share,
            harmless_error=harmless_error(config),
        )
        return make_controller(choice, plan, settings)

    return choice, make


def _environment(model: nn.Module, loader: Any) -> dict[str, Any]:
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    try:
        steps_per_epoch = len(loader)
    except TypeError:
        steps_per_epoch = None
    return {
        "model": type(model).__name__,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "steps_per_epoch": steps_per_epoch,
    }
