"""The learning rate still to come: the user's scheduler, played forward on a copy."""

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import CellType, FunctionType, GeneratorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from egeria.random_state import RandomState

MOST_CALLS = 1_000_000
"""A longer schedule is not played forward; at 3 to 10 µs a call this one takes seconds."""
SAME = 1e-6
"""Relative difference under which the rate found is the one foreseen."""
MOST_OBJECTS = 10_000
"""What a function of the user's has closed over is not copied where it leads to more objects than
that."""
ENDING_SHARE = 0.2
"""Share of the calls to come that a schedule may lack at its end, by an error, where their number
is not exact."""
TRIED_CALLS = 32
"""Calls that are played twice when a run begins, to see whether the schedule can be foreseen."""


class Ahead(NamedTuple):
    """The learning rate still to come."""

    remaining_rate_sum: float
    """Its sum over the steps to the end of the run."""
    last_rate: float
    """That of the last step."""


class Foresight:
    """Returns how much learning rate is still to come: the user's scheduler, played forward on a
    copy.

    The scheduler is only read. How many optimizer steps lie between two of its calls is seen from
    the loop, so that schedules by epoch and by step are both understood.

    Functions of the user's (`LambdaLR`) are played with copies of the variables that they have
    closed over. What is global stays uncopied: a function that changes a global variable does so
    when it is played, too. Let it close over that variable instead.

    Args:
        scheduler: of `torch.optim.lr_scheduler` or made like those. Without one the rate may stay
            or be lowered by hand, so the worst of both is foreseen: it stays as it is to the end,
            where it is zero.
        total_steps: optimizer steps of the run; None where unknown.
        warn: is told what, and a message, when a rate was not the one foreseen; it says so once.
    """

    def __init__(
        self,
        scheduler: Any,
        total_steps: int | None,
        warn: Callable[[str, str], None] = lambda what, message: None,
    ) -> None:
        self._scheduler, self._total_steps, self._warn = scheduler, total_steps, warn
        self.refusal = None if scheduler is None else why_unforeseeable(scheduler)
        """Why the schedule cannot be foreseen as it is now; None where it can."""
        self.unknown: str | None = None
        """Why the rate to come was not known when it was last asked for, where waiting does not
        help."""
        self._calls: int | None = 0 if _count_calls(scheduler) == 0 else None
        """Calls of the scheduler, as it counts them, when it was last looked at; one that is new
        has none."""
        self._is_new = self._calls is not None
        """Whether the first change may be reckoned from the beginning of the run."""
        self._has_waited = False
        """Whether it was looked at in vain before that."""
        self._changes: list[tuple[int, int]] = []
        """Step and calls at the first and the newest change of that number."""
        self._played: list[float] = []
        """Rates after `_played_from` calls, and after each further one: played once, as long as
        they come true."""
        self._played_from = 0
        self._played_groups: list[int] = []

    def ahead(self, step: int, rate: float) -> Ahead | None:
        """Return the learning rate still to come.

        Args:
            step: optimizer steps done.
            rate: the learning rate now.

        Returns:
            None where it is unknown: no `total_steps` or more steps than that, a schedule that
            depends on the training (plateaus) or differs each time it is played, one that has come
            to zero, or no call seen yet.
        """
        self._observe(step)
        self.unknown = None
        if self._total_steps is None or step > self._total_steps or self.refusal == ERRATIC:
            return None
        if self._scheduler is None:
            return Ahead(rate * max(0, self._total_steps - step), 0.0)
        known = (
            [(0, 0), *self._changes] if self._is_new and len(self._changes) == 1 else self._changes
        )
        if len(known) < 2 or rate <= 0:
            return None
        (first_step, first_calls), (last_step, last_calls) = known
        period = (last_step - first_step) / (last_calls - first_calls)
        left = max(0, self._total_steps - step)
        until_next = min(left, max(0.0, last_step + period - step))
        num_calls = math.ceil((left - until_next) / period)
        shares = self._shares(num_calls, rate)
        if shares is None:
            return None
        rate_sum = rate * (until_next + sum(shares) * (left - until_next) / max(1, num_calls))
        return Ahead(rate_sum, rate * shares[-1] if shares else rate)

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen of the scheduler."""
        return {
            "calls": self._calls,
            "changes": [list(change) for change in self._changes],
            "is_new": self._is_new,
            "has_waited": self._has_waited,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._calls = state.get("calls")
        self._changes = [(step, calls) for step, calls in state.get("changes", [])]
        self._is_new, self._has_waited = bool(state.get("is_new")), bool(state.get("has_waited"))

    def _observe(self, step: int) -> None:
        calls = _count_calls(self._scheduler)
        if calls is None or calls == self._calls:
            self._has_waited = True
            return
        # Else its own state was loaded, it is called at the beginning of an epoch, or several times
        # in a step.
        is_told = (
            not self._is_new
            or self._changes
            or abs(calls - step) <= 1
            or (calls == 1 and self._has_waited)
        )
        if self._calls is not None and (
            calls < self._calls or not is_told
        ):  # the first: it was restarted
            self._changes, self._played, self._calls, self._is_new = [], [], None, False
        if self._calls is not None:
            self._changes = [*self._changes[:1], (step, calls)]
        self._calls = calls

    def _shares(self, num_calls: int, rate: float) -> list[float] | None:
        """Return the rate after each of the next calls, as a share of the rate now; None where it
        is unknown.

        Groups of parameters may have schedules of their own: those count that have this rate now.
        """
        assert self._calls is not None
        if num_calls > MOST_CALLS:
            self.unknown = (
                f"{num_calls:,} calls of the scheduler are still to come, too many to "
                "be played forward"
            )
            return None
        try:
            groups = self._scheduler.optimizer.param_groups
            fitting = [
                index
                for index, group in enumerate(groups)
                if abs(float(group["lr"]) - rate) <= SAME * rate
            ]
            if not fitting:
                self.unknown = OF_ANOTHER.format(rate=rate)
                return None
            known = (
                self._played[self._calls - self._played_from :]
                if self._calls >= self._played_from
                else []
            )
            is_true = bool(known) and abs(known[0] - rate) <= SAME * rate
            if known and fitting == self._played_groups and not is_true:
                self._warn(
                    "the learning rate foreseen",
                    WRONG.format(calls=self._calls, found=rate, foreseen=known[0]),
                )
            if not is_true or fitting != self._played_groups or len(known) <= num_calls:
                self._played = known = [rate, *play(self._scheduler, num_calls, fitting)]
                self._played_from, self._played_groups = self._calls, fitting
        except (
            Exception
        ) as error:  # whatever a scheduler of the user's own makes of being copied and stepped
            if self.refusal is None:  # else it was told when the run began
                self.unknown = NOT_TO_THE_END.format(
                    steps=self._total_steps, error=f"{type(error).__name__}: {error}"
                )
            return None
        return [later / rate for later in known[1 : num_calls + 1]]


class Foresights:
    """Foresees where several optimizers have a scheduler each: by the one that has the rate in
    question.

    Args:
        parts: of the schedulers.
    """

    def __init__(self, parts: Sequence[Foresight]) -> None:
        self._parts = parts
        refusals = [part.refusal for part in parts]
        self.refusal = None if None in refusals else refusals[0]
        """Why none of the schedules can be foreseen; None where one can."""
        self.unknown: str | None = None
        """Why the rate to come was not known when it was last asked for, where waiting does not
        help."""

    def ahead(self, step: int, rate: float) -> Ahead | None:
        """Return the learning rate still to come, as `Foresight.ahead`."""
        found = [part.ahead(step, rate) for part in self._parts]
        reasons = [part.unknown for part in self._parts]
        self.unknown = None if None in reasons else reasons[0]
        return next((ahead for ahead in found if ahead is not None), None)

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen of the schedulers."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        for part, own in zip(self._parts, state.get("parts", ()), strict=False):
            part.load_state_dict(own)


OF_ANOTHER = (
    "no group of the scheduler's optimizer has the learning rate {rate:.3g}, the largest of what "
    "may freeze, so what "
    "is still to come of it is unknown and nothing freezes meanwhile. Of several schedulers pass "
    "all, in a list"
)
NOT_TO_THE_END = (
    "the scheduler cannot be played forward to total_steps={steps} ({error}), so the rate to come "
    "is unknown and "
    "nothing freezes meanwhile. total_steps are the optimizer steps of the whole run: with "
    "gradient accumulation these "
    "are fewer than batches"
)
ERRATIC = "it gives other rates each time it is played forward"
WRONG = (
    "egeria: after {calls} calls of the scheduler the learning rate is {found:.3g}, and "
    "{foreseen:.3g} was foreseen: "
    "it depends on more than the number of calls, or was set by hand. What is still to come is "
    "foreseen anew from the "
    "rate as it is, and decisions so far may have come too early or too late. Use a scheduler "
    "that goes by the "
    "number of calls alone; in a loop of your own, attach may also get no scheduler."
)


def why_unforeseeable(scheduler: Any) -> str | None:
    """Return why the rates of a scheduler cannot be played forward from here, None where they can.

    Found are schedules that need more than a call (plateaus), that cannot be copied, and that
    differ from one time to the next. That a function of the user's looks at something outside shows
    only once it has changed.
    """
    if _count_calls(scheduler) is None:
        return "it does not count its calls in `last_epoch`"
    random_state, played = RandomState.current(), []
    try:
        played = [
            _try(scheduler) for _ in range(2)
        ]  # one after the other: with random numbers of its own
    except Exception as error:  # whatever it makes of being copied or stepped
        return f"{type(error).__name__} when a copy of it is stepped: {error}"
    finally:
        random_state.set()
    return None if played[0] == played[1] else ERRATIC


def _try(scheduler: Any) -> list[float]:
    """Return the rates after the next few calls; some schedules end with an error, which raises if
    it comes first.
    """
    rates: list[float] = []
    try:
        rates.extend(
            islice(
                _later_rates(scheduler, range(len(scheduler.optimizer.param_groups))), TRIED_CALLS
            )
        )
    except Exception:
        if not rates:
            raise
    return rates


def _count_calls(scheduler: Any) -> int | None:
    """Return how often a scheduler was called, None where it does not count; `ChainedScheduler` has
    its parts count.
    """
    parts = getattr(scheduler, "_schedulers", None)
    calls = getattr(scheduler, "last_epoch", None)
    return calls if isinstance(calls, int) else _count_calls(parts[0]) if parts else None


def play(scheduler: Any, num_calls: int, fitting: Sequence[int]) -> list[float]:
    """Return the largest rate of some groups after each of the next calls; the scheduler itself
    stays as it is.

    How many calls are to come is known by and by only where they lie far apart: one that ends with
    an error a little before keeps its last rate.
    """
    random_state, rates = RandomState.current(), list[float]()
    try:
        rates.extend(islice(_later_rates(scheduler, fitting), num_calls))
    except Exception:
        missing = num_calls - len(rates)
        if not rates or missing > max(1, ENDING_SHARE * num_calls):
            raise
        rates += [rates[-1]] * missing
    finally:
        random_state.set()
    return rates


def _later_rates(scheduler: Any, fitting: Sequence[int]) -> Iterator[float]:
    optimizer = scheduler.optimizer
    groups = [
        {
            "params": [],
            **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    # Some schedulers look for the method.
    stand_in = SimpleNamespace(
        param_groups=groups, defaults=dict(optimizer.defaults), step=lambda: None
    )
    memo: dict[int, Any] = {id(optimizer): stand_in}
    twin = copy.deepcopy(scheduler, memo)
    _own_functions(twin, memo)
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of calls without a step of the optimizer: there is none to make
            twin.step()
        yield max(float(groups[index]["lr"]) for index in fitting)


def _own_functions(scheduler: Any, memo: dict[int, Any]) -> None:
    """Give a copied scheduler functions with state of their own: `deepcopy` takes functions as they
    are.
    """
    for part in getattr(scheduler, "_schedulers", ()):
        _own_functions(part, memo)
    attributes = vars(scheduler)
    for name, value in list(attributes.items()):
        if isinstance(value, list):
            value[:] = [_own(entry, memo) for entry in value]
        else:
            attributes[name] = _own(value, memo)


def _own(function: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a function, of what it has closed over and of its defaults; anything else as
    it is.
    """
    if isinstance(function, partial):
        keywords = {name: _own(value, memo) for name, value in function.keywords.items()}
        return partial(
            _own(function.func, memo), *(_own(value, memo) for value in function.args), **keywords
        )
    if not isinstance(function, FunctionType) or id(function) in memo:
        return memo.get(id(function), function)
    cells = function.__closure__ or ()
    own_cells = tuple(memo.setdefault(id(cell), CellType()) for cell in cells)
    twin = FunctionType(function.__code__, function.__globals__, function.__name__, None, own_cells)
    memo[id(function)] = twin
    for cell, own_cell in zip(cells, own_cells, strict=True):
        if cell != CellType():  # one that is not filled yet
            own_cell.cell_contents = _own_state(cell.cell_contents, memo)
    twin.__defaults__ = _own_state(function.__defaults__, memo)
    twin.__kwdefaults__ = _own_state(function.__kwdefaults__, memo)
    vars(twin).update(_own_state(vars(function), memo))
    return twin


def _own_state(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo or isinstance(value, FunctionType):
        return _own(value, memo)
    return _own(value if _holds_training(value) else copy.deepcopy(value, memo), memo)


def _holds_training(value: Any) -> bool:
    """Return whether a value leads to models, data and the like, which must not be copied."""
    todo: list[Any] = [value]
    seen: set[int] = set()
    while todo and len(seen) <= MOST_OBJECTS:
        entry = todo.pop()
        if isinstance(entry, (nn.Module, Tensor, Optimizer, DataLoader, Dataset)):
            return True
        if id(entry) not in seen and not isinstance(
            entry, (type, ModuleType, FunctionType, GeneratorType)
        ):
            seen.add(id(entry))
            todo += filter(gc.is_tracked, gc.get_referents(entry))
    return bool(todo)
