"""The parts that belong to one cut of the model, and how they are put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from egeria.config import Config
from egeria.controller import AbsentController, Controller
from egeria.errors import ConfigError, StateError
from egeria.layers.modules import LayerModule
from egeria.layers.order import OrderOfBatch, OrderRecorder
from egeria.layers.parse import parse_modules
from egeria.layers.shards import is_sharded
from egeria.parallel import ParallelStrategy
from egeria.policy import PLASTICITY, Annealing, Policy, UnfreezeRule, find_policy
from egeria.session.applier import Applier
from egeria.session.compiling import Compiling
from egeria.session.evaluator import Evaluator
from egeria.session.handle import ModelHandle
from egeria.session.measures import Foresight, Measures
from egeria.session.ranks import Ranks, Subject
from egeria.session.rates import LayerRates, Wanted
from egeria.session.recorder import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What judges and freezes one cut of the model."""

    modules: tuple[LayerModule, ...]
    policy: Policy
    applier: Applier
    evaluator: Evaluator


@dataclass(frozen=True, kw_only=True)
class EngineBuilder:
    """Everything an engine is made from; a model that runs in another order than defined needs a second one."""

    model: nn.Module
    handle: ModelHandle
    optimizers: Sequence[Optimizer]
    config: Config
    rule: UnfreezeRule
    scheduler: Any
    total_steps: int | None
    parallel: ParallelStrategy
    ranks: Ranks
    compiling: Compiling
    recorder: Recorder
    make_controller: Callable[[tuple[str, ...]], Controller]

    def parse(self, order: Sequence[str] | None = None) -> tuple[LayerModule, ...]:
        """Cut the model into layer modules.

        Raises:
            UnsupportedModelError: it cannot be cut.
        """
        settings = self.config.modules
        return parse_modules(
            self.model,
            pattern=settings.pattern,
            target_share=settings.target_share,
            minimum_share=settings.minimum_share,
            order=order,
        )

    def build(self, modules: tuple[LayerModule, ...], watched: OrderRecorder | None = None) -> Engine:
        """Put the parts together for these layer modules.

        Args:
            modules: the cut.
            watched: what the first forward showed, once there was one.
        """
        policy = self.make_policy(modules, watched)
        controller: Controller = AbsentController()
        if PLASTICITY in policy.needs and self.ranks.leads:
            controller = self.make_controller(tuple(module.tap for module in modules[:-1]))
        return Engine(
            modules=modules,
            policy=policy,
            applier=Applier(
                self.model,
                self.handle,
                modules=modules,
                config=self.config,
                parallel=self.parallel,
                compiling=self.compiling,
                recorder=self.recorder,
            ),
            evaluator=Evaluator(self.model, self.handle, controller, self.config, self.recorder),
        )

    @property
    def policy_name(self) -> str:
        """The name of the policy, or of what makes it."""
        name = self.config.policy.name
        return name if isinstance(name, str) else getattr(name, "__qualname__", type(name).__name__)

    def make_policy(self, modules: Sequence[LayerModule], watched: OrderRecorder | None = None) -> Policy:
        """Make a policy for these layer modules.

        Raises:
            ConfigError: it cannot be had, or what was made is none.
        """
        limits = self.describe(modules, watched)
        policy = find_policy(self.config.policy.name)(
            self.config,
            trainable=limits["trainable"],
            rule=self.rule,
            total_steps=self.total_steps,
            deepest_freeze=limits["deepest_freeze"],
        )
        if not isinstance(policy, Policy):
            raise ConfigError(
                f"policy.name takes a callable that makes an egeria.policy.Policy, found one that makes "
                f"{type(policy).__name__}. Give what it makes the attributes and methods of that protocol."
            )
        return policy

    def measures(self, policy: Policy | None, spend: Callable[[float, float], None]) -> Measures:
        """Make what measures for a policy; None needs nothing, and what the leader measures holds for all.

        Where each process has a part of the parameters, each measures that.
        """
        in_parts = is_sharded(self.model)
        return Measures(
            self.model,
            self.optimizers,
            policy.needs if policy and (self.ranks.leads or in_parts) else (),
            foresight=Foresight(self.scheduler, self.total_steps),
            add_up=partial(self.ranks.sums, Subject.MEASURES) if in_parts else list,
            recorder=self.recorder,
            spend=spend,
        )

    def rates(
        self, policy: Policy | None, wanted: Callable[[], Wanted | None], spend: Callable[[float, float], None]
    ) -> LayerRates | None:
        """Make what gives each layer module its own learning rate; None where the policy leaves them alone."""
        if not isinstance(policy, Annealing):
            return None
        return LayerRates(
            self.model,
            self.optimizers,
            wanted,
            keeps_tied=self.config.freezing.tied == "keep",
            recorder=self.recorder,
            spend=spend,
        )

    def check_policy_name(self, name: str) -> None:
        """Check that a saved state is of the policy of this run.

        Raises:
            StateError: it is of another.
        """
        if name != self.policy_name:
            raise StateError(
                f"A run goes on under the policy it began with; this state is of {name!r}, and the run has "
                f"{self.policy_name!r}. Attach with policy={name!r}, or go on without loading the state."
            )

    def check(self, modules: Sequence[LayerModule]) -> None:
        """Check that layer modules from a saved state are of this model.

        Raises:
            StateError: they name other parameters.
        """
        theirs = {name for module in modules for name in module.parameters}
        ours = {name for name, _ in self.model.named_parameters()}
        if theirs != ours:
            raise StateError(
                f"A run's state fits the model it was saved from; this state is of another model, which differs in "
                f"{', '.join(sorted(theirs ^ ours)[:3])}. Attach the model that the state was saved from."
            )

    def watch_order(self, modules: Sequence[LayerModule]) -> OrderRecorder | OrderOfBatch:
        """Record the order in which the layers are called, from the user's own first forward.

        Where that is compiled, from one of our own on the same batch.
        """
        names = [name for module in modules for name in module.submodules]
        if self.compiling.is_on:
            return OrderOfBatch(self.model, names, self.handle.keep_next)
        return OrderRecorder(self.model, names)

    def learning_rate(self, modules: Sequence[LayerModule]) -> float:
        """Return the largest rate of the groups that train what may freeze; of all groups where there are none."""
        own = {id(self.model.get_parameter(name)) for module in modules[:-1] for name in module.parameters}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        fitting = [group for group in groups if any(id(parameter) in own for parameter in group["params"])]
        return max(float(group["lr"]) for group in fitting or groups)

    def describe(self, modules: Sequence[LayerModule], watched: OrderRecorder | None = None) -> dict[str, Any]:
        """Return the facts about a cut that the policy and the journal need."""
        returned_to = watched.returned_to if watched else frozenset()
        trainable = [any(self.model.get_parameter(name).requires_grad for name in m.parameters) for m in modules]
        return {
            "modules": [module.to_dict() for module in modules],
            "trainable": trainable,
            "deepest_freeze": min(self._keeps_optimizers_busy(modules), _is_a_chain(modules, returned_to)),
        }

    def _keeps_optimizers_busy(self, modules: Sequence[LayerModule]) -> int:
        """Return how many front modules may freeze such that every optimizer keeps something to train.

        An optimizer without any gradient is an error to `GradScaler.step` ("No inf checks were recorded").
        """
        owner = {id(self.model.get_parameter(n)): index for index, m in enumerate(modules) for n in m.parameters}
        last = len(modules) - 1
        deepest = last
        for optimizer in self.optimizers:
            parameters = [entry for group in optimizer.param_groups for entry in group["params"] if entry.requires_grad]
            deepest = min(deepest, max((owner.get(id(entry), last) for entry in parameters), default=last))
        return deepest


def _is_a_chain(modules: Sequence[LayerModule], returned_to: Collection[str]) -> int:
    """Return how many front modules are left for good once the forward pass has moved on.

    To freeze one that is called again behind active modules saves nothing: the backward pass runs through it.
    """
    return next((index for index, module in enumerate(modules) if module.tap in returned_to), len(modules) - 1)
