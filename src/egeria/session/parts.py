"""What is made for one cut of the model into layer modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from egeria.controller import AbsentController, Controller
from egeria.layers.modules import LayerModule
from egeria.policy import PLASTICITY, Policy
from egeria.session.applying import Applier
from egeria.session.checks import MakeController
from egeria.session.compiling import Compiling
from egeria.session.cutting import Cut
from egeria.session.evaluation import Evaluation
from egeria.session.following import Training
from egeria.session.timing import Budget, IntervalClock, IterationTimer


@dataclass(frozen=True, kw_only=True, slots=True)
class CutParts:
    """What decides for a cut, what it decides by, and what carries it out."""

    policy: Policy
    evaluation: Evaluation
    applier: Applier

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all three."""
        return {
            "policy": self.policy.state_dict(),
            "evaluator": self.evaluation.state_dict(),
            "frozen": self.applier.depth,
            "trainable": list(self.applier.trainable),
            "input_needs_grad": self.applier.training.hooks.input_needs_grad,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what decides; what is in force follows by `restore`, when nothing else acts on
        the model.
        """
        self.policy.load_state_dict(saved["policy"])
        self.evaluation.load_state_dict(saved["evaluator"])

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Freeze what a saved state had frozen."""
        decided = self.policy.frozen
        self.applier.training.hooks.input_needs_grad = saved["input_needs_grad"]
        self.applier.restore(min(decided, saved["frozen"]), decided)


@dataclass(frozen=True, slots=True)
class PartsMaker:
    """Makes the parts of a cut, for one run."""

    training: Training
    make_policy: Callable[[Cut], Policy]
    make_controller: MakeController
    compiling: Compiling
    budget: Budget
    timer: IterationTimer
    clock: Callable[[], IntervalClock]
    """Returns that of the run, which another takes the place of where a state is loaded."""

    def make(self, cut: Cut) -> CutParts:
        """Return new parts; nothing is frozen by them yet."""
        training = self.training
        training.hooks.open()
        policy, controller = self.make_policy(cut), cast(Controller, AbsentController())
        if PLASTICITY in policy.needs and training.ranks.leads:
            controller = self.make_controller(
                cut.modules, lambda: self.timer.left_s(self.clock().step)
            )
        return CutParts(
            policy=policy,
            evaluation=Evaluation(
                training, cut.modules, policy, controller, self.budget, self.timer
            ),
            applier=Applier(
                training, cut.modules, self.compiling, cut.deepest_freeze, cut.trainable
            ),
        )

    def resume(
        self, modules: Sequence[LayerModule], saved: Mapping[str, Any], norms: Mapping[str, bool]
    ) -> tuple[CutParts, Cut]:
        """Return parts that decide as those of a saved state, and their cut; where that fails
        nothing has changed.

        Args:
            modules: the layer modules of the saved state.
            saved: the state of its parts.
            norms: which normalisation layers had come trained when its run began.
        """
        came_trained = dict(self.training.norms)
        self.training.norms.update(norms)
        try:
            cut = Cut.resumed(self.training, modules, saved)
            parts = self.make(cut)
            parts.load_state_dict(saved)
        except BaseException:
            self.training.norms.update(came_trained)
            raise
        return parts, cut
