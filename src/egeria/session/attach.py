"""`egeria.attach`: checks what it is given and puts a run together."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from egeria.config import Config
from egeria.controller import Controller, ControllerChoice, EvaluationPlan, choose, make_controller
from egeria.errors import UnsupportedModelError
from egeria.events import ControllerChosen, RunStarted
from egeria.layers.modules import LayerModule
from egeria.layers.shards import is_sharded
from egeria.parallel import ParallelStrategy, choose_parallel
from egeria.plasticity import find_metric
from egeria.policy import FORESIGHT, PLASTICITY, PolicyMaker, choose_interval, harmless_error
from egeria.session.checks import (
    check_model,
    check_optimizers,
    check_policy,
    check_total_steps,
    choose_rule,
    for_parts,
    read_config,
)
from egeria.session.compiling import Compiling
from egeria.session.driver import Driver
from egeria.session.engine import EngineBuilder
from egeria.session.handle import ModelHandle
from egeria.session.joining import agree_on_the_run
from egeria.session.pace import Pace, Stopwatch
from egeria.session.ranks import Ranks
from egeria.session.recorder import Recorder
from egeria.session.run import Run
from egeria.session.skipping import begin_skipping

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
    """Watch a training run and freeze its front layers as they converge.

    Nothing about the model, the optimizer or the loader changes until the first layer module
    freezes; `run.close()` undoes everything.

    Args:
        model: the model in training; call `run.model` in its place.
        optimizer: the optimizer, or all of them; never changed.
        loader: the training loader; only its length and the number of its workers are read. With
            `cache.enabled` its samples are followed, and `run.close()` gives it back as it was.
        scheduler: the learning-rate scheduler; read to see what is still to come, or for the paper's rule when to
            thaw. Never stepped.
        total_steps: optimizer steps of the whole run; sets how often to evaluate. Without it the default
            policy freezes nothing.
        config: a `Config`, nested dictionaries, or the path of a TOML file.
        directory: where the journal and the report go; None makes one under `egeria_runs/`.
        controller: 'auto', 'process' or 'inline', before `config`'s own; or a controller of your own.
        policy: 'forecast', 'egeria' (the paper's rule) or one of their rivals, before `config`'s own; or what makes
            a policy of your own (`egeria.policy.PolicyMaker`).
        parallel: how several processes train together; None takes that from the model's wrapper and the job. A bare
            model in a job of several processes is wrapped in `DistributedDataParallel`.

    Returns:
        The run: call `run.step(loss)` once after each optimizer step.

    Raises:
        ConfigError: an argument or a setting is outside its contract. A model that cannot be cut, or
            a directory that cannot be written, is no error: the run goes on without, with a warning.
    """
    watch = Stopwatch()
    settings = read_config(config, controller, policy)
    parallel = parallel or choose_parallel(check_model(model))
    model = parallel.take(model)
    settings = for_parts(settings) if is_sharded(model) else settings
    optimizers = check_optimizers(model, optimizer)
    check_total_steps(total_steps)
    rule_name, rule = choose_rule(settings, scheduler)
    check_policy(settings, rule, total_steps)
    choice, make = _choose_controller(settings, controller, model, loader)
    ranks = Ranks(parallel)
    recorder = _recorder(ranks, directory)
    handle = ModelHandle(model)
    handle.call_instead(parallel.rewrap())
    builder = EngineBuilder(
        model=model,
        handle=handle,
        optimizers=optimizers,
        config=settings,
        rule=rule,
        scheduler=scheduler,
        total_steps=total_steps,
        parallel=parallel,
        ranks=ranks,
        compiling=Compiling(handle, recorder),
        recorder=recorder,
        make_controller=make,
    )
    modules, refusal = _cut(builder)
    needs = builder.make_policy(modules).needs if modules else frozenset()
    if modules and PLASTICITY not in needs:
        choice = ControllerChoice(
            kind="none", device="", reason=f"the policy {builder.policy_name!r} reads no plasticity"
        )
    interval_steps, reason = choose_interval(settings, total_steps=total_steps, num_modules=max(1, len(modules)))
    if not ranks.is_alone:
        is_apart = choice.kind == "process"
        apart = agree_on_the_run(ranks, settings, modules, total_steps, interval_steps, is_apart=is_apart)
        refusal = refusal or apart
        modules = () if refusal else modules
    recorder.write(
        RunStarted(
            step=0,
            config=settings.to_dict(),
            rule=rule_name,
            total_steps=total_steps,
            interval_steps=interval_steps,
            interval_reason=reason,
            environment=_environment(model, loader),
            **(builder.describe(modules) if modules else {"modules": [], "trainable": [], "deepest_freeze": 0}),
        )
    )
    if refusal:
        recorder.decline("freezing", refusal)
    if modules:
        recorder.write(ControllerChosen(step=0, controller=choice.kind, reason=choice.reason))
        runs = "the controller runs" if choice.device else "the controller is"
        logging.getLogger("egeria").info("%s %s: %s", runs, choice.kind, choice.reason)
    if FORESIGHT in needs and total_steps is None:
        recorder.decline("freezing", f"{builder.policy_name!r} weighs what is still to come: give attach total_steps")
    pace = Pace()
    skipping = begin_skipping(builder, loader, pace.take_out) if modules else None
    driver = Driver(
        builder=builder,
        modules=modules,
        interval_steps=interval_steps,
        recorder=recorder,
        pace=pace,
        skipping=skipping,
    )
    driver.pace.add_overhead(*watch.read())
    return Run(builder.handle, driver, recorder)


def _recorder(ranks: Ranks, directory: str | Path | None) -> Recorder:
    """Return what writes the journal; of several processes only the first keeps one."""
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
    config: Config, given: str | Controller | None, model: nn.Module, loader: Any
) -> tuple[ControllerChoice, Callable[[tuple[str, ...]], Controller]]:
    """Return which controller it is and what makes it for the taps of a cut."""
    if given is not None and not isinstance(given, str):
        return ControllerChoice(kind=type(given).__name__, device="", reason="given to attach"), lambda taps: given
    settings = config.controller
    choice = choose(settings.kind, config.reference.device, model, loader)
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


def _cut(builder: EngineBuilder) -> tuple[tuple[LayerModule, ...], str | None]:
    """Return how the model is cut, or nothing and why it is left alone."""
    refusal = builder.parallel.refusal()
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in builder.optimizers):
        refusal = "LBFGS moves parameters by its history, also those without a gradient"
    if refusal:
        return (), refusal
    try:
        return builder.parse(), None
    except UnsupportedModelError as error:
        return (), str(error)


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
