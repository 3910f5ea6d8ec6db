"""The public interface: `attach`, the `Run` that it returns, and what a run logs."""

import gc
import io
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from egeria import events
from egeria.config import Config
from egeria.distributed.ranks import all_or_none, rank
from egeria.errors import ConfigError, StateError, brief, printable
from egeria.journal import EgeriaWarning, Recorder, run_directory
from egeria.model.compile import Compilation, is_compiled
from egeria.model.cut import LayerModule
from egeria.policy import Maker, Plan
from egeria.report.summary import UNKNOWN_START, Summary
from egeria.report.text import duration, plural, progress
from egeria.report.trackers import Showing, find_trackers
from egeria.session import checks
from egeria.session.clock import Seconds, read_loss
from egeria.session.session import Session
from egeria.session.training import Training

if TYPE_CHECKING:
    from egeria.controller.inline import Controller


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Any = None,
    *,
    scheduler: Any = None,
    total_steps: int | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    directory: str | Path | None = None,
    controller: "str | Controller | None" = None,
    policy: str | Maker | None = None,
    plan: str | None = None,
    log_to: Any = None,
) -> "Run":
    """Watch a training run and freeze its front layers; `run.close()` undoes everything.

    Nothing of the model, the optimizer or the loader changes until the first layer module freezes.
    A model that cannot be cut and a directory that cannot be written are no errors: there is a
    warning, and the training goes on without.

    Args:
        model: the model in training; the loop goes on calling it, or the wrapper that it is in.
        optimizer: the optimizer, or all of them; never changed.
        loader: the training loader; its steps and workers are counted.
        scheduler: the learning-rate scheduler; its kind tells the policy 'egeria' when to thaw. It
            is never stepped. A list if several optimizers have one each.
        total_steps: optimizer steps of the whole run; the default policy needs it.
        config: a `Config`, nested dictionaries, or the path of a TOML file.
        directory: where the journal and the report go; None makes one under `egeria_runs/`.
        controller: 'auto', 'process', 'inline' or your own; takes precedence over `config`.
        policy: the name of a policy, or your own `egeria.policy.Maker`; over `config` too.
        plan: when to freeze how many front layer modules. "0.5:1 0.75:2" freezes one from half of
            the steps on, and two from three quarters on. Short for `policy.plan`.
        log_to: TensorBoard's `SummaryWriter`, a W&B or Trackio run, `mlflow`, a callable
            `(values, step)`, or a list of these: gets the run's numbers.

    Returns:
        The run: call `run.step(loss)` once after each optimizer step.

    Raises:
        ConfigError: an argument is outside its contract, or an open run watches this model.
        RankError, LostError: it failed on another rank, or was not called there.
    """
    begin, leads = Seconds.now(), rank() == 0  # only the first rank keeps a journal and logs
    with all_or_none("attach"):
        settings = checks.read_config(config, controller, policy, plan)
        loader = checks.unwrap_loader(loader)
        rule_name, rule = checks.choose_rule(settings, scheduler)
        given, inner, optimizers = checks.check_training(model, optimizer, total_steps)
        _check_unwatched(inner)
        checks.check_plan(settings.policy, inner, loader, total_steps)
        trackers = find_trackers(log_to) if leads else []
        folder = run_directory(directory) if leads else None
        pretrained = checks.is_pretrained(settings, inner)
    pretrained, shared = checks.agree(settings, total_steps, pretrained, folder)
    recorder = Recorder(folder, echoes=not leads)
    training = Training(
        model=inner,
        given=given,
        optimizers=optimizers,
        loader=loader,
        config=settings,
        controller=controller,
        rule=rule,
        rule_name=rule_name,
        total_steps=total_steps,
        recorder=recorder,
        compilation=Compilation() if is_compiled(given) or is_compiled(inner) else None,
        is_pretrained=pretrained,
        directory=shared,
    )
    started = replace(UNKNOWN_START, config=settings.to_dict(), total_steps=total_steps)
    showing = Showing(recorder, started, trackers, leads)
    try:
        session = Session(training)
    except BaseException:  # such as a pattern that matches no layer module
        recorder.close()
        raise
    session.clock.spend(*Seconds.now().since(begin))
    run = _OPEN_RUNS[id(inner)] = Run(session, showing)
    return run


class Run(AbstractContextManager["Run", None]):
    """A training run that egeria watches, made by `egeria.attach`; also a context manager.

    Attributes:
        directory: of the journal and the report; None if nothing is written.
    """

    def __init__(self, session: Session, showing: Showing) -> None:
        self._session, self._showing, self._recorder = session, showing, session.recorder
        self.directory: Path | None = session.recorder.directory
        self._closed = False
        self._last_state: dict[str, Any] | None = None
        # The model is thawed also if the run is dropped without `close`.
        self._finalizer = weakref.finalize(self, session.close)

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen now."""
        return self._session.frozen

    @property
    def plan(self) -> Plan | None:
        """What is frozen when; None before the first step, and under a policy without a plan."""
        return self._session.plan

    @property
    def modules(self) -> tuple[LayerModule, ...]:
        """The layer modules, front to back; empty before the first step, and without a cut."""
        return self._session.modules

    @property
    def stage(self) -> str:
        """Either 'bootstrapping' or 'knowledge-guided'."""
        return self._session.status.stage

    def step(self, loss: Any) -> None:
        """Count one optimizer step; call it after the optimizer's.

        A call without an optimizer step since the last call is a micro-batch, as in gradient
        accumulation or when `GradScaler` skips a step; its loss counts for the next step.

        Args:
            loss: training loss of the step, a number or a 0-d tensor; with gradient accumulation
                before it is divided. The device is asked for its value every `n` steps, not now.
        """
        value = read_loss(loss)
        if not self._closed and self._session.step(value):
            self._showing.end_step()

    def log(self, **metrics: float) -> None:
        """Write numbers to the journal, such as `run.log(accuracy=0.93)`; the report draws them."""
        values = {k: float(read_loss(v, f"run.log takes {k}")) for k, v in metrics.items()}
        if self._closed:
            self._recorder.warn("run.log", "egeria: run.log came after run.close: not written.")
        self._recorder.write(events.MetricLogged(step=self._session.clock.step, values=values))

    def summary(self) -> Summary:
        """Return where the run stands: steps, stage, what is frozen, time saved and overhead."""
        return self._showing.summary()

    def on_event(self, callback: Callable[[events.Event], object]) -> Callable[[], object]:
        """Call `callback` with each event of the journal, until the run is closed.

        Each rank calls its own; only the first gets events about controller and reference model.

        Args:
            callback: takes an event of `egeria.events`. If it raises, it is not called again.

        Returns:
            A function that ends the calls.
        """
        if not callable(callback):
            raise ConfigError(
                f"on_event takes a function, found {type(callback).__name__}. Pass it."
            )
        return self._recorder.listen(callback)

    def __repr__(self) -> str:
        summary = self.summary()
        step, saved_s = progress(summary).removesuffix(" steps"), summary.time_saved_s
        frozen = f"{summary.frozen} of {plural(len(summary.modules), 'layer module')} frozen"
        if not summary.modules:
            frozen = "no layer modules" if summary.step else "no layer modules yet"
        saved = "time saved not known" if saved_s is None else f"{duration(saved_s)} saved"
        where = f"closed at step {step}" if summary.closed else f"step {step}"
        return printable(f"<egeria.Run: {where}, {frozen}, {saved}>")

    @property
    def packed(self) -> "Packed":
        """The state for `torch.distributed.checkpoint`, such as `dcp.save({"run": run.packed})`."""
        return Packed(self)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to continue as if the run had never stopped.

        A closed run returns its state from before it was closed.
        """
        return self._last_state or self._session.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore a saved state; load the model and the optimizer first.

        Raises:
            StateError: the run is closed, or the state is of another version of egeria or another
                model. Nothing has changed then.
        """
        if self._closed:
            raise StateError("A closed run takes no state. Attach anew, then load.")
        checks.check_state(state)
        try:
            self._session.load_state_dict(state)
        except StateError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise StateError(f"The state does not fit ({brief(error)}). {checks.GO_ON}") from error
        resumed = events.Resumed(step=self._recorder.step, frozen=self.frozen, stage=self.stage)
        self._recorder.write(resumed)

    def close(self) -> None:
        """End the run and leave the model as it was found; can be called again.

        Raises LostError where other ranks train on and do not call it.
        """
        frozen, session = self.frozen, self._session
        if self._last_state is None:
            with suppress(Exception):  # a device that has failed tells no losses
                self._last_state = session.state_dict()
        goes_well = sys.exc_info()[0] is None  # after an error calls may be missing
        if goes_well and not self._closed:
            session.meet_to_close()
        session.close()  # also in a second call, after an interrupt
        if self._closed:
            return
        self._closed = True
        if (reason := session.steps.calls_missing) and goes_well:
            self._recorder.decline("watching this training", reason)
        clock = session.clock
        closed = events.RunClosed(
            step=clock.step,
            frozen=frozen,
            overhead_wall_s=clock.overhead.wall_s,
            overhead_cpu_s=clock.overhead.cpu_s,
            controller_cpu_s=clock.controller_cpu_s,
        )
        self._recorder.write(closed)
        self._showing.log()
        self._finalizer()
        self._recorder.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def resume(run: Run, state: Any) -> bool:
    """Load a state from the checkpoint of a framework; warn and return False if it does not fit."""
    try:
        run.load_state_dict(state)
    except StateError as error:
        what = "egeria: its state in the checkpoint does not fit, and it begins anew"
        warnings.warn(f"{what}: {error}", EgeriaWarning, stacklevel=2)
        return False
    return True


# By the id of the model, which its run keeps alive; some may be closed.
_OPEN_RUNS: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()


def _check_unwatched(model: nn.Module) -> None:
    """Raise ConfigError if an open run watches a model, or one that has parameters of it."""
    own = set(model.parameters())

    def others() -> list[str]:  # not the runs: the error would keep them alive
        open_runs = [run for run in _OPEN_RUNS.values() if not run._closed]
        held = [(repr(run), run._session.training.model.parameters()) for run in open_runs]
        return [name for name, parameters in held if not own.isdisjoint(parameters)]

    if others():
        gc.collect()  # deletes runs that were dropped within a cycle, such as a traceback
    if found := others():
        raise ConfigError(
            "attach takes a model that no open run watches, in whole or in part, found one that "
            f"{found[0]} watches. Call run.close() of that run first, or go on with it. If an "
            "interrupted notebook cell left no name for it, run the cell again."
        )


class Packed:
    """The state of a run as one entry, since `torch.distributed.checkpoint` must know all entries.

    All ranks load the state of the first one: save with
    `DefaultSavePlanner(dedup_save_to_lowest_rank=True)`. The other ranks lack the reference model
    and what was measured since the last evaluation.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        """Return the state as bytes, in one entry."""
        torch.save(self._run.state_dict(), file := io.BytesIO())
        return {"state": file.getvalue()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; StateError, with nothing changed, if it is of another run."""
        try:
            loaded = torch.load(io.BytesIO(state["state"]), map_location="cpu", weights_only=True)
        except Exception as error:
            raise StateError(f"The run's state cannot be read ({error}). {checks.GO_ON}") from error
        self._run.load_state_dict(loaded)
