"""What freezing would do to a training: `plan` says what, `advise` measures what it saves."""

import copy
import gc
import itertools
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria import tree
from egeria.config import Config, PolicyConfig, check, count, optional, satisfies
from egeria.distributed.ranks import world_size
from egeria.errors import ConfigError, brief
from egeria.events import Declined, FaultCaught
from egeria.journal import read_journal
from egeria.model.compile import is_compiled
from egeria.model.cut import make_modules, settings_of_cut
from egeria.model.hooks import copies_of_computed
from egeria.moves import resolve, wrong_shares
from egeria.policy import Plan, draw_up, find_plan
from egeria.random_state import accelerators_of, kept_random_state
from egeria.report.text import mebibytes, percent
from egeria.session import Run, attach
from egeria.session.checks import is_pretrained, read_config, unwrap_loader
from egeria.session.clock import Seconds
from egeria.session.training import facts_of

Loss = Callable[[nn.Module, Any], Tensor]
NUM_BATCHES = 8  # different batches that the iterations use
SETTLING, TIMED = 1, 3  # iterations at each depth in a round: after the change, and timed
MOST_DEPTHS = 8  # that are measured; of a model with more the others lie between these
LEAST_SAVING = 0.03  # of the training time, for a plan to be worth a try


@dataclass(frozen=True, slots=True, order=True)
class DepthCost:
    """What one iteration costs with the front `depth` layer modules frozen."""

    depth: int
    iteration_s: float  # by the wall clock, from the forward pass to `zero_grad()`
    cpu_s: float
    peak_bytes: int | None  # most CUDA memory beyond what was in use before the copy; else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What freezing could save in a training. Returned by `egeria.advise`.

    Shares are of the time of iterations, and of reading batches where the loader has no workers.
    Evaluations and whatever else the loop does are not counted.
    """

    modules: tuple[str, ...]
    """The layer modules, front to back; the last one is never frozen."""
    costs: tuple[DepthCost, ...]
    """By depth, from nothing frozen to all that may be; each of the round with the median time."""
    rounds: tuple[tuple[DepthCost, ...], ...]
    """The same of each round."""
    plan: str
    """The default plan of `egeria.attach` for this model; empty where it freezes nothing."""
    reading_s: float
    """Seconds that the training waits for a batch to be read; 0 where the loader has workers."""
    obstacles: tuple[str, ...]
    """What the library declined on the copy, with the reasons."""

    def saving(self, plan: str, costs: Sequence[DepthCost] = ()) -> float:
        """Return the share of the time that a plan such as "0.5:2 0.75:3" saves, by all rounds."""
        check("plan", plan, wrong_shares)
        plan = resolve(plan, [(name,) for name in self.modules], None)
        depths = [cost.depth for cost in costs or self.costs]  # between them it is interpolated
        times_s = [cost.iteration_s for cost in costs or self.costs]
        saved_s = -np.diff(np.interp(range(len(self.modules)), depths, times_s))
        followed = Plan.parse(plan, self.modules, total_steps=1)
        return float(followed.skipped_share(list(saved_s / (times_s[0] + self.reading_s))))

    @property
    def is_worth_it(self) -> bool:
        """Whether freezing is worth a try: the plan saves at least 3 %."""
        return self.saving(self._tried) >= LEAST_SAVING

    @property
    def verdict(self) -> str:
        """The advice in one sentence."""
        if not self.costs[-1].depth:
            return "Not worth it: nothing can be frozen."
        saved, most = map(self.saving, (self._tried, f"0:{len(self.modules)}"))
        each = [self.saving(self._tried, costs) for costs in self.rounds]
        spread = f"{percent(min(each))} to {percent(max(each))} by round"
        saves = f"saves {percent(saved)} of the training time ({spread})"
        worth = "Worth a try" if self.is_worth_it else "Not worth it"
        plan = f"the {'default ' if self.plan else ''}plan {self._tried!r}"
        return f"{worth}: {plan} {saves}, and no plan more than {percent(most)}."

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        found = {"verdict": self.verdict, "is_worth_it": self.is_worth_it}
        return {**asdict(self), **found, "plan_saving": self.saving(self.plan)}

    def __repr__(self) -> str:
        head = ("frozen", "up to", "of the steps", "iteration", "saved", "CPU", "peak memory")
        rows = [head, *map(self._row, self.costs)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [*("  ".join(map(str.rjust, row, widths)) for row in rows), "", self.verdict]
        if self.costs[-1].depth and not self.plan:
            lines.append("By default nothing is frozen here: give attach a plan, such as this one.")
        return "\n".join([*lines, *(f"Obstacle: {obstacle}" for obstacle in self.obstacles)])

    def _row(self, cost: DepthCost) -> tuple[str, ...]:
        name = self.modules[cost.depth - 1] if cost.depth else "-"
        share = percent(Plan.parse(self._tried, self.modules, 1).share_at(cost.depth))
        saved = percent(1 - cost.iteration_s / self.costs[0].iteration_s)
        wall, cpu = (f"{1000 * seconds:.1f} ms" for seconds in (cost.iteration_s, cost.cpu_s))
        return f"{cost.depth}", name, share, wall, saved, cpu, mebibytes(cost.peak_bytes)

    @property
    def _tried(self) -> str:
        """The default plan, else one that freezes half of the model for half of the training."""
        return self.plan or f"0.5:{len(self.modules) // 2}"


def advise(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Any,
    *,
    loss: Loss | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    rounds: int = 4,
) -> Advice:
    """Measure what freezing could save in a training, by up to 132 iterations of a copy of it.

    The copy is trained with ever more of its front layer modules frozen, several times over. Model,
    optimizer, the global random state and the generator of the loader are afterwards as before; not
    what else `loss` changes, nor the peak of `torch.cuda.max_memory_allocated`.

    Args:
        model: as the loop trains it, on its device; not compiled or wrapped. Memory for a second
            model and a second optimizer state is needed.
        optimizer: the optimizer, or all of them.
        loader: the loader, or a list of batches.
        loss: called with the model to use and a batch, returns the loss; autocast and the transfer
            to the device belong in it. None: `model(**batch).loss`, as Hugging Face models have it.
        config: the settings of the run; they say how the model is cut.
        rounds: how often each depth is measured.

    Raises:
        ConfigError: an argument is outside its contract, or an iteration of the copy failed.
    """
    settings, optimizers = read_config(config, "inline", None), _checked(model, optimizer)
    check("rounds", rounds, count())
    check("loss", loss, satisfies(lambda x: x is None or callable(x), "a function of a batch"))
    settings = replace(
        settings,
        # Found now, since training changes the normalisation layers.
        policy=PolicyConfig(pretrained=is_pretrained(settings, model)),
        plasticity=replace(settings.plasticity, interval_steps=SETTLING + TIMED),
        cache=replace(settings.cache, enabled=False),
    )
    with torch.enable_grad(), kept_random_state(model), _unchanged(model, optimizers):
        batches, reading_s = _read(unwrap_loader(loader))
        held_bytes = sum(map(torch.cuda.memory_allocated, accelerators_of(model)))
        training = _Training(*_copied(model, optimizers), batches, loss or _own_loss, held_bytes)
        return training.measure(settings, rounds, reading_s)


def plan(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    total_steps: int | None,
    epoch_steps: int | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
) -> Plan | None:
    """Return the plan that `attach` would follow, None under a policy without one.

    The arguments are those of `attach`, which learns `epoch_steps`, the optimizer steps of an
    epoch, from the loader. The model has its weights loaded. Its layer modules are in the order of
    definition here, and in a run in the order in which they ran.

    Raises:
        ConfigError: an argument is outside its contract.
    """
    settings, optimizers = read_config(config, None, None), _checked(model, optimizer)
    check("total_steps", total_steps, optional(count()))
    check("epoch_steps", epoch_steps, optional(count()))
    pretrained = is_pretrained(settings, model)
    cut = settings_of_cut(settings.modules, is_pretrained=pretrained)
    names = [module.name for module in make_modules(model, **cut)]
    facts = {"pretrained": pretrained, "epoch_steps": epoch_steps, **facts_of(model, optimizers)}
    return find_plan(settings.policy, names, total_steps, **facts)


def _checked(model: nn.Module, optimizer: Any) -> list[Optimizer]:
    """Return the optimizers as a list; raise ConfigError if this training cannot be copied."""
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    strange = sorted({type(e).__name__ for e in optimizers if not isinstance(e, Optimizer)})
    if not isinstance(model, nn.Module):
        found = f"a {type(model).__name__}"
    elif any(base.__module__.startswith("torch.nn.parallel") for base in type(model).__mro__):
        found = f"the wrapper {type(model).__name__}"
    elif is_compiled(model) or any(hasattr(part, "_orig_mod") for part in model.modules()):
        found = "a compiled one"
    elif kinds := {entry.device.type for entry in model.parameters()} - {"cpu", "cuda"}:
        found = f"parameters on {', '.join(sorted(kinds))}"
    elif world_size() > 1:
        found = f"a job of {world_size()} processes"
    elif strange or not optimizers:
        found = f"{', '.join(strange) or 'none'} as an optimizer"
    else:
        return optimizers
    raise ConfigError(
        "advise takes a torch.nn.Module on the CPU or CUDA with torch optimizers, in one process, "
        f"found {found}. Ask before the model is compiled or wrapped."
    )


@dataclass(frozen=True)
class _Training:
    """A copy of the user's training, whose iterations are timed at one depth after another."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    batches: Sequence[Any]
    loss: Loss
    held_bytes: int

    def measure(self, settings: Config, rounds: int, reading_s: float) -> Advice:
        found: dict[int, list[DepthCost]] = {}
        with tempfile.TemporaryDirectory() as folder:
            follow = partial(attach, self.model, self.optimizers, config=settings, directory=folder)
            each = SETTLING + TIMED
            with follow(policy="none") as run:  # finds the order of the layers, and warms up
                for place in range(each):
                    run.step(self._iterate(place))
                modules = tuple(module.name for module in run.modules)
            deepest = max(0, len(modules) - 1)
            depths = np.linspace(0, deepest, min(deepest + 1, MOST_DEPTHS)).round().astype(int)
            moves = (f"step {turn * each}:{depth}" for turn, depth in enumerate([*depths] * rounds))
            with follow(plan=" ".join(moves)) as run:
                for turn, _ in itertools.product(range(rounds), depths):
                    run.step(self._iterate(0))
                    cost = self._timed(run, turn * TIMED)  # the same batches at each depth
                    found.setdefault(cost.depth, []).append(cost)
            journal = read_journal(folder)
        costs = [found[depth] for depth in sorted(found)]
        facts = facts_of(self.model, self.optimizers)
        obstacles = [f"{event.what}: {event.reason}." for event in journal.of(Declined)]
        obstacles += [f"{event.where} failed: {event.error}." for event in journal.of(FaultCaught)]
        return Advice(
            modules=modules,
            costs=tuple(map(median_low, costs)),
            rounds=tuple(zip(*costs, strict=False)),
            # In shares of the steps, whatever their number; the first phase as in ten epochs.
            plan=str(draw_up(modules, 1, pretrained=settings.policy.pretrained is True, **facts)),
            reading_s=reading_s,
            obstacles=tuple(dict.fromkeys(obstacles)),
        )

    def _timed(self, run: Run, first: int) -> DepthCost:
        """Return the means of a few iterations; nothing waits for an accelerator between them."""
        depth, devices, last = run.frozen, accelerators_of(self.model), first + TIMED - 1
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.synchronize(device)
        began = Seconds.now()
        for place in range(first, last):
            run.step(self._iterate(place))
        loss = self._iterate(last)
        for device in devices:
            torch.cuda.synchronize(device)
        wall_s, cpu_s = Seconds.now().since(began)
        peak_bytes = sum(map(torch.cuda.max_memory_allocated, devices)) - self.held_bytes
        run.step(loss)  # the depth changes here
        return DepthCost(depth, wall_s / TIMED, cpu_s / TIMED, peak_bytes if devices else None)

    def _iterate(self, place: int) -> Tensor:
        """Make one iteration as a loop would, on a copy of a batch, and return its loss."""
        batch = copy.deepcopy(self.batches[place % len(self.batches)])
        next_step = "Pass loss=..., which does what the loop does before loss.backward()."
        with _explained("An iteration of the copy must run as in the loop", next_step):
            loss = self.loss(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return loss


@contextmanager
def _unchanged(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Restore gradients and buffers after a quiet block, and raise if there were new gradients."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    held = (parameter for group in groups for parameter in group["params"])  # a criterion's too
    gradients = {parameter: parameter.grad for parameter in (*model.parameters(), *held)}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    logger = logging.getLogger("egeria")
    try:
        for parameter in gradients:
            parameter.grad = None
        with warnings.catch_warnings():  # those about the copy are not for the user
            warnings.simplefilter("ignore")
            logger.disabled = True
            yield
    finally:
        logger.disabled = False
        is_changed = any(parameter.grad is not None for parameter in gradients)
        for buffer, values in buffers if is_changed else ():
            buffer.data.copy_(values)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        gc.collect()  # a run has reference cycles, which hold the copy
    if is_changed:
        raise ConfigError(
            "loss must train the model that it is given and nothing else, found gradients of "
            "others. Use the model that loss is given; a criterion that trains belongs in it."
        )


@contextmanager
def _explained(contract: str, next_step: str) -> Iterator[None]:
    """Raise what fails in the block as a `ConfigError`."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        what = "advise needs memory for a second model and its optimizer state"
        raise ConfigError(f"{what}, found {error!r}. Pass smaller batches.") from error
    except Exception as error:
        raise ConfigError(f"{contract}, found {brief(error)}. {next_step}") from error


def _copied(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
    """Return copies, the optimizers for the parameters of the model's copy."""
    contract = "copy.deepcopy must copy model and optimizer, and share none of their parameters"
    with _explained(contract, "Ask before the model is sharded or wrapped."):
        memo = copies_of_computed(model)
        twin, twins = copy.deepcopy((model, list(optimizers)), memo)
        for optimizer, other in zip(optimizers, twins, strict=True):
            # torch leaves out the attributes of a subclass; a scheduler may have replaced `step`.
            for name in vars(optimizer).keys() - vars(other).keys() - {"step"}:
                vars(other)[name] = copy.deepcopy(vars(optimizer)[name], memo)
        if not set(model.parameters()).isdisjoint(twin.parameters()):
            raise TypeError(f"a copy of {type(model).__name__} that shares parameters with it")
    if not twin.training:  # parts may be in eval mode on purpose
        twin.train()
    return twin, twins


def _read(loader: Any) -> tuple[list[Any], float]:
    """Return copies of the first batches, and the seconds for which the loop waits for one."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = [getattr(holder, "sampler", None) for holder in (loader, batch_sampler)]
    held = [getattr(holder, "generator", None) for holder in (loader, batch_sampler, *samplers)]
    contract = "loader must give batches that can be copied"
    with _explained(contract, "Pass a list of batches."), ExitStack() as restored:
        if isinstance(loader, Iterator):
            raise TypeError(f"a {type(loader).__name__}, which reading would use up")
        for generator in (entry for entry in held if isinstance(entry, torch.Generator)):
            restored.callback(generator.set_state, generator.get_state())
        began = Seconds.now()
        batches = list(itertools.islice(loader, NUM_BATCHES))
        reading_s = Seconds.now().since(began).wall_s / max(1, len(batches))
        if not batches:
            raise ValueError("none")
        return copy.deepcopy(batches), 0.0 if getattr(loader, "num_workers", 0) else reading_s


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a Hugging Face model computes by itself."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch that is a {type(batch).__name__} and no dictionary")
    device = next(model.parameters()).device
    return cast(Tensor, model(**tree.map_tensors(lambda part: part.to(device), batch)).loss)
