"""What is made when a model is cut: the policy, what applies its answers, and the cache."""

import math
import operator
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from egeria import policy as policies
from egeria.cache import Cache, ShardSampler
from egeria.distributed import fsdp2
from egeria.distributed.ranks import world_size
from egeria.errors import ConfigError, StateError
from egeria.events import PlanMade, RunStarted, StageChanged
from egeria.model.cut import Cut
from egeria.moves import resolve
from egeria.report.summary import backward_shares
from egeria.session.apply import Applier
from egeria.session.checks import length_of
from egeria.session.clock import Clock
from egeria.session.training import FreezingEndedError, Training, facts_of

if TYPE_CHECKING:
    from egeria.session.evaluation import Evaluation


@dataclass(slots=True)
class Parts:
    """The cut of a model, the policy made for it, and what applies its answers."""

    training: Training
    cut: Cut
    plan: policies.Plan | None
    policy: policies.Policy
    applier: Applier
    epoch_steps: int | None  # optimizer steps of an epoch; None if unknown
    evaluation: "Evaluation | None" = None  # None if the policy reads no plasticity

    def announce(self) -> None:
        """Journal the plan, and what can never be frozen."""
        modules, recorder, applier = self.cut.modules, self.training.recorder, self.applier
        if applier.deepest < len(modules) - 1:
            what = f"freezing {modules[applier.deepest].name} and what follows"
            recorder.decline(what, applier.limit)
        if (plan := self.plan) is not None:
            trained = [applier.count(entry) / max(1, entry.num_parameters) for entry in modules]
            skipped = plan.skipped_share(backward_shares([m.share for m in modules], trained))
            text, reason, step = str(plan), plan.reason, recorder.step
            recorder.write(PlanMade(step=step, plan=text, reason=reason, skipped_share=skipped))

    def ask(self, interval: policies.Interval) -> policies.Depth | None:
        """Return the policy's answer in plain values; TypeError if the depth is not an integer."""
        answer = self.policy.observe(interval)
        plan: Any = getattr(self.policy, "plan", None)
        if self.plan is not None and plan != self.plan:
            self.plan = plan
            self.announce()
        return answer and policies.Depth(operator.index(answer.frozen), str(answer.reason))

    def journal_status(
        self, before: policies.Status, readings: Sequence[policies.Reading]
    ) -> policies.Status:
        """Journal what the policy concluded from readings, and a new stage; return its status."""
        recorder, found = self.training.recorder, getattr(self.policy, "status", None)
        status = found if isinstance(found, policies.Status) else before
        if self.evaluation is not None:
            for reading in readings:
                self.evaluation.journal(reading, status)
        if status.stage != before.stage:
            stage, reason = status.stage, status.reason
            recorder.write(StageChanged(step=recorder.step, stage=stage, reason=reason))
        return status

    def move_cache(self, cache: Cache, clock: Clock, window: int) -> None:
        """Move the boundary of the cache to the end of the layer modules that are frozen now."""
        frozen, wants = self.cut.modules[: self.applier.depth], self.policy.wants
        if frozen and (reason := _reason_to_compute(self.training)):
            cache.refuse(frozen[-1].name, reason)
            return
        end = min(wants.next_step(clock.step), clock.total_steps or math.inf)
        if wants.interval_steps is not None and wants.plasticity_of is not None:
            # `window` readings, and as many stationary ones, before the next freeze
            end = min(clock.step + (2 * max(1, window) - 1) * clock.interval_steps, end)
        steps, epoch = max(0.0, end - clock.step), self.epoch_steps
        cache.follow(frozen, steps / epoch if epoch and steps < math.inf else None)

    def prepare(self, clock: Clock, status: policies.Status) -> None:
        """Prepare the next evaluation of plasticity, if the policy wants one."""
        wanted = self.policy.wants.plasticity_of
        is_coming = wanted is not None or status.stage == policies.BOOTSTRAPPING
        if self.evaluation is None and is_coming:
            self.evaluation = self._make_evaluation(clock)
        if self.evaluation is not None:
            self.evaluation.prepare(wanted)

    def _make_evaluation(self, clock: Clock) -> "Evaluation":
        from egeria.session.evaluation import make_evaluation  # noqa: PLC0415  (off is absent)

        return make_evaluation(self.training, self.cut, clock)

    def load_state_dict(self, state: Mapping[str, Any], clock: Clock) -> str:
        """Go on with the readings of a saved state; return why they cannot go on, or nothing.

        The model is not changed. Raises StateError where it cannot be frozen so deep.
        """
        if state["frozen"] > self.applier.deepest:
            raise StateError(
                f"A run's state fits its own model and optimizers, found {state['frozen']} frozen "
                f"layer modules where at most {self.applier.deepest} may be. Attach those it had."
            )
        try:
            if state["evaluator"] is not None:
                self.evaluation = self._make_evaluation(clock)
                self.evaluation.load_state_dict(state["evaluator"])
        except FreezingEndedError as error:
            return str(error)
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        named, front = self.training.named(), self.cut.modules[: self.applier.depth]
        trains = {n for n, e in named.items() if e.requires_grad and self.applier.freezer.is_whole}
        return {
            "cut": asdict(self.cut),
            "parameters": {n: list(e.shape) for n, e in named.items()},
            "cut_by": asdict(self.training.config.modules),
            "policy": self.policy.state_dict(),
            "plan_reason": self.plan.reason if self.plan else "",
            "epoch_steps": self.epoch_steps,
            "frozen": len(front),
            "trained": [n for m in front for n in m.parameters if n in trains],
            "detaches": self.applier.detaches,
            "keeps_norms": self.applier.freezer.keeps_norms,
            "evaluator": self.evaluation.state_dict() if self.evaluation else None,
        }


def make_parts(
    training: Training,
    cut: Cut,
    wrapper: Any,
    epoch_steps: int | None = None,
    engine: Mapping[str, Any] | None = None,
) -> Parts:
    """Return the parts of a new run, or of one resumed from `engine`; nothing is frozen yet."""
    names, settings = tuple(module.name for module in cut.modules), training.config.policy
    if settings.plan is not None:
        known = [f"{name}." for name, _ in training.model.named_modules()]
        starts = [tuple(f"{name}." for name in module.submodules) for module in cut.modules]
        held = [[name[:-1] for name in known if name.startswith(start)] for start in starts]
        settings = replace(settings, plan=resolve(settings.plan, held, epoch_steps))
    facts = {"pretrained": training.is_pretrained, "epoch_steps": epoch_steps}
    facts |= facts_of(training.model, training.optimizers)
    plan = policies.find_plan(settings, names, training.total_steps, **facts)
    if plan is not None and engine is not None:
        saved = engine["policy"]["plan"]
        if settings.plan is not None and str(plan) != saved:
            training.recorder.decline("another plan", f"the state goes on with {saved!r}")
        plan = policies.Plan.parse(saved, names, training.total_steps, engine["plan_reason"])
    applier = Applier(training, cut, wrapper)
    told = {} if plan is None else {"plan": plan, "epoch_steps": epoch_steps}
    policy = policies.find_maker(replace(training.config, policy=settings))(
        modules=names,
        trainable=cut.trainable,
        deepest=applier.deepest,
        total_steps=training.total_steps,
        lr_rule=training.rule,
        **told,
    )
    if not isinstance(policy, policies.Policy):
        raise ConfigError(
            "policy.name takes what makes an egeria.policy.Policy, found one that makes "
            f"{type(policy).__name__}. Give that the attributes and methods of the protocol."
        )
    if engine is not None:
        policy.load_state_dict(engine["policy"])
    return Parts(training, cut, plan, policy, applier, epoch_steps)


def run_started(training: Training, parts: Parts | None, interval_steps: int) -> RunStarted:
    """Return the first event of a journal; without parts nothing can be frozen."""
    modules = parts.cut.modules if parts else ()
    count: Any = parts and parts.applier.count
    facts: Any = [{**asdict(entry), "num_trainable": count(entry)} for entry in modules]
    return RunStarted(
        step=0,
        config=training.config.to_dict(),
        modules=facts,
        trainable=list(parts.cut.trainable) if parts else [],
        deepest_freeze=parts.applier.deepest if parts else 0,
        rule=training.rule_name,
        total_steps=training.total_steps,
        interval_steps=interval_steps,
        environment=environment(training),
    )


def environment(training: Training) -> dict[str, Any]:
    """Return facts for the journal: model, data, machine and versions."""
    device, data = training.device_type, dict[str, Any]()
    with suppress(Exception):  # loaders and data sets raise various things
        dataset = training.loader.dataset
        name = getattr(getattr(dataset, "info", None), "dataset_name", None)  # of Hugging Face
        data["data"] = name if isinstance(name, str) and name else type(dataset).__name__
        data["num_samples"] = len(dataset)
    return {
        "model": type(training.model).__name__,
        "num_parameters": sum(e.numel() for e in training.model.parameters() if not is_lazy(e)),
        **data,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "steps_per_epoch": length_of(training.loader),
    }


def make_cache(training: Training, spend: Callable[[float, float], None]) -> Cache | None:
    """Return what skips the frozen forward pass, or None."""
    config, policy_name = training.config.cache, training.config.policy.name
    # Only a plan says for how long a front stays frozen.
    is_unasked = config.enabled == "auto" and policy_name == "egeria"
    if config.enabled is False or policy_name == "none" or is_unasked:
        return None
    # The launcher says how many processes of the job share the memory of this host.
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Cache(
        model=training.model,
        settings=config,
        recorder=training.recorder,
        spend=spend,
        directory=training.directory,
        num_batches=length_of(training.loader),
        num_local=int(told) if told.isdecimal() and int(told) > 0 else world_size(),
    )


def _reason_to_compute(training: Training) -> str:
    """Return why the forward pass of a model may not be skipped, or an empty string."""
    if training.compilation is not None:
        return "the model is compiled, and its graphs contain the whole forward pass"
    if fsdp2.is_sharded(training.model):
        return (
            "its parameters are sharded (fully_shard), and all ranks gather them in every forward "
            "pass; the cache works with DistributedDataParallel"
        )
    if world_size() == 1:
        return ""
    if any(isinstance(module, nn.SyncBatchNorm) for module in training.model.modules()):
        return "it has SyncBatchNorm layers, for which all ranks must run a batch together"
    if isinstance(getattr(training.loader, "sampler", None), ShardSampler):
        return ""
    return (
        "each rank stores what it computes, and only a loader with `egeria.ShardSampler` gives it "
        "the same samples in every epoch"
    )
