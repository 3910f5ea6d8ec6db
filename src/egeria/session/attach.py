"""The public face: `attach` checks what it is given and makes the parts of a run; `Run` is what the
user holds.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from egeria.config import Config
from egeria.controller import Controller, ControllerChoice
from egeria.errors import ConfigError, StateError
from egeria.events import ControllerChosen, Event, MetricLogged, Resumed, RunClosed, RunStarted
from egeria.journal import Recorder, is_url, run_directory
from egeria.layers.modules import LayerModule
from egeria.layers.pretrained import find_trained_norms
from egeria.parallel import ParallelStrategy, refuse_plasticity
from egeria.policy import (
    PLASTICITY,
    Plan,
    Policy,
    PolicyMaker,
    UnfreezeRule,
    choose_interval,
    find_policy,
)
from egeria.report.live import RunSummary
from egeria.report.trackers import find_trackers
from egeria.session.checks import (
    agree_on_the_run,
    check_training,
    choose_controller,
    choose_rule,
    environment,
    read_config,
    unwrap_loader,
    unwrap_scheduler,
)
from egeria.session.cutting import Cut, first_cut
from egeria.session.following import ModelHooks, Training
from egeria.session.loop import Session
from egeria.session.packed import Packed
from egeria.session.ranks import Ranks
from egeria.session.showing import Showing, as_html, in_a_line
from egeria.session.timing import Stopwatch

STATE_SCHEMA = 2
_TOO_FEW = "Without it nothing is measured or frozen: call run.step(loss) after each optimizer step"


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
    plan: str | None = None,
    parallel: ParallelStrategy | None = None,
    log_to: Any = None,
) -> Run:
    """Watch a training run and freeze its front layers as they converge; `run.close()` undoes
    everything.

    Nothing about the model, the optimizer or the loader changes until the first layer module
    freezes. A model that cannot be cut, or a directory that cannot be written, is no error: the run
    continues without, with a warning.

    Args:
        model: the model in training; the loop goes on calling it, or the wrapper that it is in.
        optimizer: the optimizer, or all of them; never changed.
        loader: the training loader, to count its steps and workers; with `cache.enabled` its
            samples are followed.
        scheduler: the learning-rate scheduler, whose kind tells the policy 'egeria' when to thaw;
            never stepped. A list where several optimizers have one each: that of what may freeze
            counts.
        total_steps: optimizer steps of the whole run; without it the default policy freezes
            nothing.
        config: a `Config`, nested dictionaries, or the path of a TOML file.
        directory: where the journal and the report go; None makes one under `egeria_runs/`. Of a
            URL that fsspec knows, such as 's3://bucket/run', it is one there too, whose files are
            copied to the URL at `close` and whenever the state is saved.
        controller: 'auto', 'process' or 'inline', before `config`'s own; or a controller of your
            own.
        policy: the name of a policy, before `config`'s own; or an `egeria.policy.PolicyMaker` of
            your own.
        plan: how many front layer modules are frozen from when on, such as "0.5:1 0.75:2": from
            half of the steps on one, from three quarters on two; short for `policy.plan`.
        parallel: how several processes train together; None takes that from the model's wrapper and
            the job.
        log_to: TensorBoard's `SummaryWriter`, a W&B or Trackio run, `mlflow` or an `MlflowClient`,
            a callable `(values, step)`, or a list of these: gets the run's numbers under `egeria/`,
            and the report at the end.

    Returns:
        The run: call `run.step(loss)` once after each optimizer step.

    Raises:
        ConfigError: an argument or a setting is outside its contract, or an open run watches this
            model.
    """
    watch, settings = Stopwatch(), read_config(config, controller, policy, plan)
    loader, scheduler = unwrap_loader(loader), unwrap_scheduler(scheduler)
    model, optimizers, parallel = check_training(model, optimizer, total_steps, parallel)
    _check_unwatched(model)
    rule_name, rule = choose_rule(settings, scheduler, total_steps)
    choice, make_controller = choose_controller(settings, model, controller, loader)
    ranks = Ranks(parallel)
    # Of several processes only the first keeps a journal and logs; others may not even have what it
    # logs to.
    trackers = find_trackers(log_to) if ranks.leads else []
    url = str(directory) if is_url(directory) else None
    recorder = Recorder(
        run_directory(directory) if ranks.leads else None, url=url, echoes=not ranks.leads
    )
    showing = Showing(recorder, trackers, speaks=ranks.leads)
    training = Training(
        model=model,
        hooks=ModelHooks(model, parallel),
        optimizers=optimizers,
        config=settings,
        total_steps=total_steps,
        parallel=parallel,
        ranks=ranks,
        recorder=recorder,
        norms=find_trained_norms(model),
    )
    make_policy = partial(_make_policy, training, rule)
    cut, interval_steps = _begin(training, make_policy, choice, rule_name, loader)
    try:
        session = Session(
            training,
            cut=cut,
            interval_steps=interval_steps,
            make_policy=make_policy,
            make_controller=make_controller,
            loader=loader,
        )
    except BaseException:  # such as one of the user's own policy, which `attach` raises
        training.hooks.close()
        recorder.close()
        raise
    session.timer.add_overhead(*watch.read())
    run = _OPEN_RUNS[id(model)] = Run(session, showing)
    return run


class Run:
    """One training run that egeria watches. Made by `egeria.attach`; also a context manager.

    Attributes:
        directory: where the journal and the report live; None if nothing is written.
    """

    def __init__(self, session: Session, showing: Showing) -> None:
        self._session, self._showing = session, showing
        self._recorder = recorder = session.recorder
        self.directory: Path | None = recorder.directory
        self._closed = False
        # A run that is dropped without `close` must not leave a frozen model or an open file
        # behind.
        self._finalizer = weakref.finalize(self, _release, session, recorder)

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen now."""
        return self._session.frozen

    @property
    def plan(self) -> Plan | None:
        """How many layer modules are frozen over the training; None under a policy without a
        plan.
        """
        return self._session.plan

    @property
    def modules(self) -> tuple[LayerModule, ...]:
        """The layer modules, front to back; empty where the model could not be cut."""
        return self._session.modules

    @property
    def stage(self) -> str:
        """Either 'bootstrapping' or 'knowledge-guided'."""
        return self._session.stage

    def step(self, loss: Any) -> None:
        """Count one optimizer step; call it after the optimizer's.

        A call without an optimizer step since the last one is a micro-batch, as in gradient
        accumulation or where `GradScaler` skips a step: its loss is part of the mean of the next
        step.

        Args:
            loss: training loss of the step, a number or a 0-d tensor; with gradient accumulation
                before it is divided by the number of micro-batches. The device is asked for its
                value once every `n` steps, not now.

        Raises:
            ConfigError: the loss is neither a number nor a tensor of one element.
        """
        value = None if self._closed else self._session.steps.take(loss)
        if value is None:
            return
        self._session.timer.enter()
        try:
            self._session.step(value)
            self._showing.end_step()
        finally:
            self._session.timer.leave()

    def log(self, **metrics: float) -> None:
        """Put numbers into the journal, such as `run.log(accuracy=0.93)`; the report draws them."""
        values = {name: float(value) for name, value in metrics.items()}
        self._recorder.write(MetricLogged(step=self._session.clock.step, values=values))

    def summary(self) -> RunSummary:
        """Return where the run stands: steps, stage, what is frozen, time saved and overhead so
        far.
        """
        return self._showing.summary()

    def on_event(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """Call `callback` with each event of the journal from now on, as it is written, until the
        run is closed.

        Of several processes each calls its own callbacks, with the events that it sees: decisions
        and its own measurements in all, what concerns the controller and the reference model in the
        first alone.

        Args:
            callback: takes an event of `egeria.events`. One that raises is called no more, with a
                warning.

        Returns:
            A function that ends the calls.

        Raises:
            ConfigError: it cannot be called.
        """
        if not callable(callback):
            raise ConfigError(
                f"run.on_event takes a function of one event, found {type(callback).__name__}. "
                f"Pass the function itself, such as run.on_event(print)."
            )
        return self._recorder.listen(callback)

    def __repr__(self) -> str:
        return f"<egeria.Run: {in_a_line(self.summary())}>"

    def _repr_html_(self) -> str:
        return as_html(self.summary())

    @property
    def packed(self) -> Packed:
        """The state for `torch.distributed.checkpoint`: `dcp.save({"run": run.packed, ...})`, and
        `dcp.load` alike.
        """
        return Packed(self)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to continue as if the run had never stopped.

        Plain values and tensors; save it beside the states of the model and the optimizer.
        """
        self._recorder.upload()
        return {"schema": STATE_SCHEMA, **self._session.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; load the model and the optimizer first.

        Raises:
            StateError: the run is closed, or the state is of another egeria or of another model.
                Nothing has changed then.
        """
        if self._closed:
            raise StateError(
                "A closed run goes on with nothing, found a state to go on from. Attach anew, "
                "then load."
            )
        schema = state.get("schema")
        if schema != STATE_SCHEMA:
            raise StateError(
                f"This egeria reads run states of schema {STATE_SCHEMA}, found {schema!r}. Load "
                "it with the egeria "
                "that wrote it; or load the model and the optimizer alone, and the run begins "
                "anew."
            )
        try:
            self._session.load_state_dict(state)
        except StateError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise StateError(
                f"A run's state is what run.state_dict() returned; this one is damaged "
                f"({type(error).__name__}: {error}). Take an earlier checkpoint, or go on without "
                "loading it."
            ) from error
        step = self._session.clock.step
        self._recorder.write(Resumed(step=step, frozen=self.frozen, stage=self.stage))

    def close(self) -> None:
        """End the run and leave the model as it was found: thawed, without hooks. Safe to call
        twice.
        """
        if self._closed:
            return
        self._closed = True
        frozen, session = self.frozen, self._session
        session.close()
        reason = session.steps.why_too_few()
        if reason and sys.exc_info()[0] is None:  # after an error the loop may not have come to it
            self._recorder.decline("watching this training", f"{reason}. {_TOO_FEW}")
        self._recorder.write(
            RunClosed(
                step=session.clock.step,
                frozen=frozen,
                overhead_wall_s=session.timer.overhead_wall_s,
                overhead_cpu_s=session.timer.overhead_cpu_s,
                controller_cpu_s=session.controller_cpu_s,
            )
        )
        self._showing.close()
        self._finalizer()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_OPEN_RUNS: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
"""By the id of the model, which a run keeps alive. Closed ones may be among them."""


def _check_unwatched(model: nn.Module) -> None:
    """Raise ConfigError if an open run watches a model, or one that has parameters of it."""
    own = {id(parameter) for parameter in model.parameters()}

    def others() -> list[Run]:
        open_runs = [run for run in _OPEN_RUNS.values() if not run._closed]
        return [
            run
            for run in open_runs
            if any(id(entry) in own for entry in run._session.training.model.parameters())
        ]

    if others():
        # one that was dropped in a cycle, such as that of a traceback, is released by this
        gc.collect()
    if found := [repr(run) for run in others()]:  # the error must not keep the run
        raise ConfigError(
            "attach takes a model that no open run watches, in whole or in part, found one that "
            f"{found[0]} watches. "
            "Call run.close() of that run first, or go on with it. Where an interrupted cell of "
            "a notebook left no "
            f"name for it, run the cell again: the error that kept it is gone then."
        )


def _release(session: Session, recorder: Recorder) -> None:
    session.close()
    recorder.close()


def _make_policy(training: Training, rule: UnfreezeRule, cut: Cut) -> Policy:
    config, plan = training.config, training.plan(cut.modules)
    if plan is not None:
        config = replace(config, policy=replace(config.policy, plan=str(plan)))
    policy = find_policy(config.policy.name)(
        config,
        trainable=cut.trainable,
        rule=rule,
        total_steps=training.total_steps,
        deepest_freeze=cut.deepest_freeze,
    )
    if not isinstance(policy, Policy):
        raise ConfigError(
            "policy.name takes a callable that makes an egeria.policy.Policy, found one that "
            "makes "
            f"{type(policy).__name__}. Give what it makes the attributes and methods of that "
            "protocol."
        )
    return policy


def _begin(
    training: Training,
    make_policy: Callable[[Cut], Policy],
    choice: ControllerChoice,
    rule_name: str,
    loader: Any,
) -> tuple[Cut | None, int]:
    """Return the cut (None where nothing can freeze) and `n`; journal how the run begins."""
    cut, refusal = first_cut(training)
    needs = make_policy(cut).needs if cut else frozenset()
    if PLASTICITY in needs:
        refusal = refuse_plasticity(training.model) or refusal
    elif cut:
        reason = f"the policy {training.policy_name!r} reads no plasticity"
        choice = ControllerChoice(kind="none", device="", reason=reason)
    interval_steps, interval_reason = choose_interval(
        training.config,
        total_steps=training.total_steps,
        num_modules=len(cut.modules) if cut else 1,
    )
    if not training.ranks.is_alone:
        differs = agree_on_the_run(training, cut, interval_steps, choice.kind == "process")
        refusal = refusal or differs or ""
    cut = None if refusal else cut
    recorder = training.recorder
    recorder.write(
        RunStarted(
            step=0,
            config=training.config.to_dict(),
            rule=rule_name,
            total_steps=training.total_steps,
            interval_steps=interval_steps,
            interval_reason=interval_reason,
            environment=environment(training.model, loader),
            **(cut.to_dict() if cut else {"modules": [], "trainable": [], "deepest_freeze": 0}),
        )
    )
    if refusal:
        recorder.decline("freezing", refusal)
    if cut:
        recorder.write(ControllerChosen(step=0, controller=choice.kind, reason=choice.reason))
        runs = "the controller runs" if choice.device else "the controller is"
        logging.getLogger("egeria").info("%s %s: %s", runs, choice.kind, choice.reason)
    return cut, interval_steps
