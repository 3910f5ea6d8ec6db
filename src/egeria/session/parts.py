"""What exists from the cut of a model on: what decides, what carries it out, and the cache."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from egeria import policy as policies
from egeria.cache import Cache, ShardSampler
from egeria.distributed import fsdp2
from egeria.distributed.ranks import exchange, world_size
from egeria.errors import ConfigError
from egeria.events import PlanMade, RunStarted
from egeria.model.cut import Cut
from egeria.moves import resolve
from egeria.report.summary import backward_shares
from egeria.session.apply import Applier
from egeria.session.checks import length_of
from egeria.session.clock import Clock
from egeria.session.training import Training, facts_of

if TYPE_CHECKING:
    from egeria.session.evaluation import Evaluation


@dataclass(kw_only=True, slots=True)
class Parts:
    """The cut of a model, the policy that was made for it, and what freezes by it."""

    training: Training
    cut: Cut
    plan: policies.Plan | None
    policy: policies.Policy
    applier: Applier
    evaluation: Evaluation | None = None  # None where the policy reads no plasticity

    def announce(self) -> None:
        """Journal the plan, and what can never be frozen."""
        modules, recorder, applier = self.cut.modules, self.training.recorder, self.applier
        if applier.deepest < len(modules) - 1:
            what = f"freezing {modules[applier.deepest].name} and what follows"
            recorder.decline(what, applier.limit)
        if self.plan is None:
            return
        trained = [applier.count(entry) / max(1, entry.num_parameters) for entry in modules]
        skipped = self.plan.skipped_share(backward_shares([m.share for m in modules], trained))
        plan, reason, step = str(self.plan), self.plan.reason, recorder.step
        recorder.write(PlanMade(step=step, plan=plan, reason=reason, skipped_share=skipped))

    def ask(self, interval: policies.Interval) -> policies.Depth | None:
        """Return the policy's answer in plain values; TypeError if the depth is no whole number."""
        answer = self.policy.observe(interval)
        return answer and policies.Depth(operator.index(answer.frozen), str(answer.reason))

    def due(self, asked: int) -> float:
        """Return the next step at which there is something to do, `asked` being the last one."""
        step = self.policy.wants.next_step(asked)
        return step if self.evaluation is None else min(step, self.evaluation.due)

    def prepare(self, clock: Clock, status: policies.Status) -> None:
        """Prepare the next evaluation, if there is to be one."""
        wanted = self.policy.wants.plasticity_of
        is_coming = wanted is not None or status.stage == policies.BOOTSTRAPPING
        if self.evaluation is None and is_coming:
            self.evaluation = self._make_evaluation(clock)
        if self.evaluation is not None:
            self.evaluation.prepare(wanted)

    def _make_evaluation(self, clock: Clock) -> Evaluation:
        from egeria.session.evaluation import make_evaluation  # noqa: PLC0415  (off is absent)

        return make_evaluation(self.training, self.cut, clock)

    def state_dict(self) -> dict[str, Any]:
        """Return what `make_parts` and `restore` need in a resumed run."""
        return {
            "cut": asdict(self.cut),
            "parameters": list(self.training.named()),
            "cut_by": asdict(self.training.config.modules),
            "policy": self.policy.state_dict(),
            "plan_reason": self.plan.reason if self.plan else "",
            "frozen": self.applier.depth,
            "detaches": self.applier.detaches,
            "evaluator": self.evaluation.state_dict() if self.evaluation else None,
        }

    def restore(self, engine: Mapping[str, Any], clock: Clock) -> None:
        """Freeze what a saved state had frozen, and read plasticity as its run did."""
        if engine["evaluator"] is not None:
            self.evaluation = self._make_evaluation(clock)
            self.evaluation.load_state_dict(engine["evaluator"])
        self.applier.detaches = engine["detaches"]
        self.applier.restore(engine["frozen"])


def make_parts(
    training: Training,
    cut: Cut,
    wrapper: Any,
    epoch_steps: int | None = None,
    engine: Mapping[str, Any] | None = None,
) -> Parts:
    """Make the parts of a run, or of a resumed one by its saved state; nothing is frozen yet."""
    names, settings = tuple(module.name for module in cut.modules), training.config.policy
    if engine is not None and settings.name in policies.PLANNED:
        settings = replace(settings, plan=engine["policy"]["plan"])
    elif settings.plan is not None:
        known = [f"{name}." for name, _ in training.model.named_modules()]
        starts = [tuple(f"{name}." for name in module.submodules) for module in cut.modules]
        held = [[name[:-1] for name in known if name.startswith(start)] for start in starts]
        settings = replace(settings, plan=resolve(settings.plan, held, epoch_steps))
    facts = facts_of(training.model, training.optimizers)
    pretrained, total_steps = training.is_pretrained, training.total_steps
    plan = policies.find_plan(settings, names, total_steps, pretrained=pretrained, **facts)
    if plan is not None:
        settings = replace(settings, plan=str(plan))
    applier = Applier(training, cut, wrapper)
    policy = policies.find_maker(replace(training.config, policy=settings))(
        modules=names,
        trainable=cut.trainable,
        deepest=applier.deepest,
        total_steps=total_steps,
        lr_rule=training.rule,
    )
    if not isinstance(policy, policies.Policy):
        raise ConfigError(
            "policy.name takes a callable that makes an egeria.policy.Policy, found one that makes "
            f"{type(policy).__name__}. Give that the attributes and methods of the protocol."
        )
    if engine is not None:
        policy.load_state_dict(engine["policy"])
        if plan is not None and isinstance(policy, policies.PlanPolicy):
            plan = replace(policy.plan, modules=names, reason=engine["plan_reason"] or plan.reason)
    return Parts(training=training, cut=cut, plan=plan, policy=policy, applier=applier)


def run_started(training: Training, parts: Parts | None, interval_steps: int) -> RunStarted:
    """Return the event by which a journal begins; without parts nothing can be frozen."""
    modules, trainable, deepest = list[dict[str, Any]](), list[bool](), 0
    if parts is not None:
        cut, deepest, count = parts.cut, parts.applier.deepest, parts.applier.count
        modules = [{**asdict(entry), "num_trainable": count(entry)} for entry in cut.modules]
        trainable = list(cut.trainable)
    return RunStarted(
        step=0,
        config=training.config.to_dict(),
        modules=modules,
        trainable=trainable,
        deepest_freeze=deepest,
        rule=training.rule_name,
        total_steps=training.total_steps,
        interval_steps=interval_steps,
        environment=training.environment,
    )


def make_cache(training: Training, spend: Callable[[float, float], None]) -> Cache | None:
    """Return what skips the frozen forward pass of a run; None where nothing does.

    All processes of a job call this. Where nobody asked for it, it takes a plan, which tells how
    long a front stays frozen.
    """
    config, policy_name = training.config.cache, training.config.policy.name
    directory = exchange(training.recorder.directory)[0]  # only the first process knows it
    is_unasked = config.enabled == "auto" and policy_name == "egeria"
    if config.enabled is False or policy_name == "none" or is_unasked:
        return None
    # How many processes of the job share the memory of this host, as the launcher says.
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Cache(
        model=training.model,
        settings=config,
        recorder=training.recorder,
        spend=spend,
        directory=directory,
        loader=training.loader,
        num_batches=length_of(training.loader),
        num_local=int(told) if told.isdecimal() and int(told) > 0 else world_size(),
    )


def follow_depth(
    cache: Cache, parts: Parts, clock: Clock, window: int, epoch_steps: int | None
) -> None:
    """Move the boundary of the cache behind the frozen layer modules, which have changed.

    Args:
        cache: of the run.
        parts: of the run.
        clock: of the run.
        window: of the policy, in evaluations.
        epoch_steps: optimizer steps of an epoch; None where that is not known.
    """
    frozen, wants = parts.cut.modules[: parts.applier.depth], parts.policy.wants
    if frozen and (reason := _reason_to_compute(parts.training)):
        cache.refuse(frozen[-1].name, reason)
        return
    moves = wants.next_step(clock.step)
    if wants.interval_steps is not None and wants.plasticity_of is not None:
        moves = clock.step + (2 * max(1, window) - 1) * clock.interval_steps
    steps = max(0.0, min(moves, clock.total_steps or math.inf) - clock.step)
    cache.follow(frozen, steps / epoch_steps if epoch_steps and steps < math.inf else None)


def _reason_to_compute(training: Training) -> str:
    """Return why the forward pass of a model is not skipped; empty where it may be."""
    if training.compilation is not None:
        return "the model is compiled, and its graphs have the whole forward pass in them"
    if fsdp2.is_sharded(training.model):
        return (
            "its parameters are sharded over the processes (fully_shard), which gather them in "
            "every forward pass; the cache works with DistributedDataParallel"
        )
    if world_size() == 1:
        return ""
    if any(isinstance(module, nn.SyncBatchNorm) for module in training.model.modules()):
        return "it has SyncBatchNorm layers, for which all processes must run a batch together"
    if isinstance(getattr(training.loader, "sampler", None), ShardSampler):
        return ""
    return (
        "each of several processes stores what it computes, and only a loader with "
        "`egeria.ShardSampler` gives a process the same samples in every epoch"
    )
