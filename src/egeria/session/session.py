"""What happens at each step of the loop, and what an internal error leads to.

One batch: the optimizer's hook counts its step (`clock`), `step` takes the loss and mostly returns.
Right before the first update `_before_update` cuts the model and makes the policy. Where an
interval ends, or the policy wants to be asked, `_act` calls `_decide`, and that `_ask`: it asks the
policy (`policy`) and sets the depth of its answer, or refuses it (`apply`).
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from egeria import tree
from egeria.distributed import ddp
from egeria.distributed.ranks import LostError, RankError, together, world_size
from egeria.errors import ConfigError, UnsupportedModelError
from egeria.events import DepthRefused, IntervalMeasured
from egeria.model.cut import Cut, LayerModule
from egeria.model.passes import finish
from egeria.policy import Interval, Plan, Status, first_stage
from egeria.random_state import accelerators_of
from egeria.session.checks import STATE_SCHEMA
from egeria.session.clock import CHECKED_CALLS, NO_STEP, NO_STEPS, Clock, Seconds, Steps
from egeria.session.parts import Parts, make_cache, make_parts, run_started
from egeria.session.training import FirstStep, FreezingEndedError, Training

if TYPE_CHECKING:
    from egeria.cache import Cache
    from egeria.session.evaluation import Evaluation

T = TypeVar("T")


class Session:
    """Counts the steps of a run, asks the policy how much is frozen, and applies the answer.

    Up to the first update it only watches the user's passes. Then it cuts the model and makes the
    policy. An internal error ends freezing; it never stops the user's training.
    """

    def __init__(self, training: Training) -> None:
        self.training, self.recorder = training, training.recorder
        # The layer modules, front to back. These and the plan stay when freezing has ended.
        self.modules: tuple[LayerModule, ...] = ()
        self.plan: Plan | None = None
        self.parts: Parts | None = None
        self.steps = Steps(training.optimizers, self._before_update)
        self.clock = Clock(training.total_steps, training.config.plasticity.interval_steps)
        # The newest status of the policy.
        self.status = Status(stage=first_stage(training.config.policy.name))
        self._has_started = self._has_ended = False
        self._lost = ""  # why the ranks cannot reach each other any more
        self._meets = False  # whether the ranks of a job exchange values at each decision
        self._call = "run.step"  # of the user, in which ranks meet
        self._asked_at = -1  # the step of the newest decision; -1 before the first one
        self._due: float = self.clock.ends
        self._measured_depth: int | None = None
        self._cache: Cache | None = None
        self._first: FirstStep | None = None
        try:
            self._first = FirstStep(training)
        except FreezingEndedError as error:
            self._end(str(error))
        else:
            self._cache = make_cache(training, self.clock.spend)
            self._first.open()
        self.steps.open()

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen now."""
        return self.parts.applier.depth if self.parts else 0

    def step(self, loss: float | Tensor) -> bool:
        """Take the loss of a batch; return whether a decision was due."""
        if not self.steps.take():
            self.clock.hold(loss)
            if self.clock.num_held == CHECKED_CALLS and not self._has_ended:
                self.recorder.decline("counting calls of run.step", NO_STEPS)
            return False
        self.clock.enter(loss)
        self.recorder.step = self.clock.step
        if is_due := self.clock.step >= self._due:
            try:
                self._act()
            finally:
                finish(self.training.model)  # a pass of ours that was interrupted
        self.clock.leave()
        return is_due

    def meet_to_close(self) -> None:
        """Wait for the other ranks, if the training goes on: none may thaw alone."""
        is_over = (total := self.clock.total_steps) is not None and self.clock.step >= total
        if self._meets and self.frozen and not is_over:
            self._call = "run.close"
            with self._guard("closing the run"):
                pass  # the ranks compare what is frozen
            if self._lost:
                raise LostError(f"{self._lost}, or again to thaw this one.")

    def close(self) -> None:
        """Leave the model, the optimizers and the loader as they were found; can be repeated."""
        self._has_ended = True
        self._start_journal()
        if self._first is not None and any(self.steps.num_steps):
            self.recorder.decline("freezing", NO_STEP)
        self._release()
        self.steps.close()

    # --- from attach to the first update ---------------------------------------------------------

    def _before_update(self, optimizer: int) -> None:
        """Cut the model, once all optimizers are at their first update.

        With one optimizer the first depth is set here too, so that this update leaves frozen layers
        alone; with several it is set in the next `run.step`.
        """
        first, begin = self._first, Seconds.now()
        if first is None:
            return
        with self._guard("cutting the model"):
            if not first.comes_to(optimizer, self.steps.num_calls):
                return
            self._meets = world_size() > 1
            cut, epoch_steps = first.cut()
            parts = make_parts(self.training, cut, first.wrapper, epoch_steps)
            self._install(parts)
            parts.announce()
            if len(self.training.optimizers) == 1:  # where there are several, some have stepped
                self._decide(parts)
        self._first, self._due = None, 0  # last, so that an interrupted cut is made again
        self.clock.spend(*Seconds.now().since(begin))

    def _install(self, parts: Parts) -> None:
        """Take new parts in place of the ones before; nothing is frozen yet."""
        self._release()
        wants = parts.policy.wants
        if wants.interval_steps is not None:
            self.clock.interval_steps = max(1, operator.index(wants.interval_steps))
        self._meets = world_size() > 1 and bool(wants.interval_steps or wants.steps)
        self.modules, self.plan, self.parts = parts.cut.modules, parts.plan, parts
        parts.applier.open()
        if self.training.compilation is not None:
            self.training.compilation.begin(len(self.modules))
        self._asked_at = -1
        self._start_journal()

    def _start_journal(self) -> None:
        """Journal how the run begins, once."""
        if not self._has_started:
            self.recorder.write(run_started(self.training, self.parts, self.clock.interval_steps))
            self._has_started = True

    # --- questions to the policy -----------------------------------------------------------------

    def _act(self) -> None:
        """Do what is due at this step."""
        clock = self.clock
        if self._first is None:
            self.steps.stop_calling()
        with self._guard("a decision"):
            if self.parts is not None and not self._lost:
                self._decide(self.parts)
            elif clock.step >= clock.ends:
                self._end_interval(self.frozen)
            self._find_due()  # here too, where an error of the policy is caught
        self._find_due()

    def _decide(self, parts: Parts) -> None:
        """Ask the policy where it is time to, then prepare what it wants for the next time."""
        clock, wants, before = self.clock, parts.policy.wants, self.frozen
        if self._meets:
            ddp.check_not_joined(parts.applier.wrapper)
        parts.applier.make_whole()
        if self._asked_at < 0:
            self._ask(Interval(step=0, frozen=before, learning_rate=self._rate()))
            self._asked_at = clock.step
        self._take_in_readings(parts)
        is_end = clock.step >= clock.ends
        is_wanted = self._asked_at < wants.next_step(self._asked_at) <= clock.step
        if is_end or is_wanted:
            measured = self._end_interval(before)
            self._together(parts.applier.check_unmoved)
            interval = Interval(
                step=clock.step,
                frozen=self.frozen,
                num_steps=measured.num_steps if is_end else 0,
                loss=measured.loss,
                learning_rate=measured.learning_rate,
                seconds=measured.iteration_wall_s,
            )
            if is_wanted or wants.interval_steps is not None or wants.steps:
                self._ask(interval)
            if is_end and parts.evaluation is not None and self.parts is parts:
                self._evaluate(parts, parts.evaluation, interval)
            self._asked_at = clock.step
        if self.parts is parts:
            parts.prepare(self.clock, self.status)
            if self._cache is not None and self.frozen != before:
                parts.move_cache(self._cache, self.clock, self.status.window)

    def _end_interval(self, frozen: int) -> IntervalMeasured:
        """Journal and return what an interval showed; compiling for a new depth is overhead."""
        clock = self.clock
        if self.training.compilation is not None:
            compiled_s = self.training.compilation.look()
            if self._measured_depth not in (None, frozen):
                clock.spend(compiled_s, compiled_s)
            self._measured_depth = frozen
        measured = clock.end_interval(frozen, self._rate(), self._together)
        if devices := accelerators_of(self.training.model):
            memory_bytes = sum(map(torch.cuda.max_memory_allocated, devices))
            measured = replace(measured, memory_bytes=memory_bytes)
        self.recorder.write(measured)
        if clock.total_steps is not None and clock.step > clock.total_steps:
            self.recorder.decline(
                "planning beyond the end of the run",
                f"attach was given total_steps={clock.total_steps}, and the training goes on. "
                "Pass the steps of the whole run, such as len(loader) * epochs",
            )
        return measured

    def _ask(self, interval: Interval) -> None:
        """Ask the policy, and apply the answer of the first rank, or refuse it."""
        parts = self.parts
        if parts is None:  # a callback for events has closed the run
            return
        depth = self._together(lambda: parts.ask(interval))[0]
        self.plan = parts.plan
        self.status = parts.journal_status(self.status, interval.readings)
        if depth is None or depth.frozen == self.frozen:
            return
        left_s = self.clock.seconds_left
        refusals = self._together(lambda: parts.applier.refusal(depth.frozen, left_s))
        if reason := next(filter(None, refusals), ""):
            refused = DepthRefused(step=self.clock.step, asked=depth.frozen, reason=reason)
            self.recorder.write(refused)
        else:
            parts.applier.apply(depth, self.status.window)
            for device in accelerators_of(self.training.model):
                torch.cuda.reset_peak_memory_stats(device)

    def _find_due(self) -> None:
        """Find the next step at which something is to be done."""
        self._due = self.clock.ends
        if self.parts is not None and not self._lost:
            self._due = min(self._due, self.parts.policy.wants.next_step(self._asked_at))
            if self.parts.evaluation is not None:
                self._due = min(self._due, self.parts.evaluation.due)

    # --- evaluations, for a policy that wants plasticity -----------------------------------------

    def _evaluate(self, parts: Parts, evaluation: "Evaluation", interval: Interval) -> None:
        """Request the plasticity that the policy wants; refresh the reference where it is due."""
        evaluation.request(interval, parts.policy.wants)
        self._take_in_readings(parts)
        if self.parts is parts:
            fitting = self._together(lambda: evaluation.refresh(parts.policy.wants))
            self.clock.interval_steps = fitting[0]

    def _take_in_readings(self, parts: Parts) -> None:
        """Give the policy the readings that have arrived, which only the first rank has."""
        evaluation = parts.evaluation
        if evaluation is None:
            return
        for reading in self._together(evaluation.take_finished)[0]:
            if self.parts is not parts:
                return
            if reading.module != parts.policy.wants.plasticity_of:
                late = "it came late: the policy no longer asks for this layer module"
                evaluation.drop(reading.evaluation, reading.module, late)
                continue
            rate, step = self._together(self._rate)[0], self.clock.step
            now = Interval(step=step, frozen=self.frozen, learning_rate=rate, readings=(reading,))
            self._ask(now)

    # --- resuming --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of everything that decides, as plain data and tensors."""
        state = {
            "schema": STATE_SCHEMA,
            "clock": self.clock.state_dict(),
            "steps": {"has_stepped": self.steps.has_stepped},
            "policy_name": self.training.policy_name,
            "status": asdict(self.status),
            "has_ended": self._has_ended and self._has_started,
            "engine": {**self.parts.state_dict(), "asked": self._asked_at} if self.parts else None,
        }
        return {**state, "checksum": tree.checksum(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; StateError, with nothing changed, if it is of another run."""
        engine, status = state["engine"], Status(**state["status"])
        cut = Cut.from_dict(engine["cut"]) if engine else None
        self.training.check_state(state, cut)
        epoch_steps = engine["epoch_steps"] if engine else None
        if cut is None and self.parts is not None:  # back to before its first step
            cut, epoch_steps = self.parts.cut, self.parts.epoch_steps
        end = "freezing had ended before the state was saved" if state["has_ended"] else ""
        parts = None
        if cut is not None and not (end or self._has_ended):
            wrapper = ddp.find_wrapper(self.training.given)
            parts = make_parts(self.training, cut, wrapper, epoch_steps, engine)
            end = parts.load_state_dict(engine, self.clock) if engine else ""
        # From here on things change.
        if end and not self._has_ended:
            self._end(end)
        elif parts is not None:
            self._install(parts)
            self._asked_at = engine["asked"] if engine else -1
        self.clock.load_state_dict(state["clock"])
        self.steps.has_stepped = bool(state["steps"]["has_stepped"])
        self.recorder.step, self.status = self.clock.step, status
        if self.parts is not None:
            self._restore(self.parts, engine)
        self._find_due()

    def _restore(self, parts: Parts, engine: Mapping[str, Any] | None) -> None:
        """Freeze what was frozen in a saved state, and go on with its readings of plasticity."""
        if self._first is not None:
            self._first.close()
            self._first = None
        if engine is not None:
            parts.applier.restore(engine)
            parts.prepare(self.clock, self.status)
            if self._cache is not None:
                parts.move_cache(self._cache, self.clock, self.status.window)
        if self._asked_at < 0 or parts.policy.wants.next_step(self._asked_at) <= self.clock.step:
            self._act()  # the state was saved in the middle of this decision

    # --- ends and faults -------------------------------------------------------------------------

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Return the result of `work` on all ranks; of this one where ranks do not meet."""
        return together(work, self._call) if self._meets else [work()]

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """End freezing on all ranks if the block raises; an interrupt passes through."""
        try:
            yield
            views = self._together(lambda: (self.frozen, self.clock.interval_steps))
            if any(view != views[0] for view in views):
                raise RankError(f"the ranks do not agree on what is frozen: {views}")
        except LostError as error:  # this rank must not thaw while the others stay frozen
            self._lost, self._meets = str(error), False
            if self.parts is not None and self.parts.evaluation is not None:
                self.parts.evaluation.disarm()
            self.recorder.decline("freezing and thawing any further", self._lost, by_each=True)
        except RankError as error:
            self._end(str(error))
        except Exception as error:
            reason = str(error)
            if not isinstance(error, (FreezingEndedError, UnsupportedModelError, ConfigError)):
                self.recorder.fault(what, error)
                reason = f"{what} failed ({type(error).__name__}: {error})"

            def fail() -> None:  # raised in an exchange, so that freezing ends on the others too
                raise FreezingEndedError(reason)

            with suppress(RankError, LostError, FreezingEndedError):
                self._together(fail)
            self._end(reason)

    def _end(self, reason: str) -> None:
        """Thaw everything, and freeze nothing any more in this run."""
        self._has_ended, self._meets = True, False
        self._start_journal()
        self._release()
        self.recorder.decline("freezing", reason)

    def _release(self) -> None:
        """Thaw everything and close all that was made for the cut."""
        actions: list[Callable[[], object]] = [partial(finish, self.training.model)]
        if self.parts is not None:
            actions.append(self.parts.applier.close)
            if self.parts.evaluation is not None:
                actions.append(partial(self.parts.evaluation.close, for_good=self._has_ended))
        if self._has_ended:
            held = (self._first, self._cache, self.training.compilation)
            actions += [part.close for part in held if part is not None]
        for action in actions:
            try:
                action()
            except Exception as error:
                self.recorder.fault("leaving the model as it was found", error)
        self.parts = None  # last, so that a second call finishes what was interrupted
        if self._has_ended:
            self._first = self._cache = None

    def _rate(self) -> float:
        return self.training.learning_rate(self.modules)
