"""What is made for one cut of the model into layer modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from egeria.policy import Annealing, Policy
from egeria.session.applying import Applier
from egeria.session.evaluation import Evaluation
from egeria.session.optimizer_steps import Wanted


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
            "periods": list(self.applier.periods),
            "landing": self.applier.landing.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what decides; what is in force follows by `restore`, when nothing else acts on the model."""
        self.policy.load_state_dict(saved["policy"])
        self.evaluation.load_state_dict(saved["evaluator"])

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Freeze what a saved state had frozen, let modules rest by its periods, and land what was landing."""
        decided = self.policy.frozen
        depth = min(decided, int(saved.get("frozen", decided)))
        self.applier.restore(depth, decided, saved.get("periods"), saved.get("landing", {}))

    def wanted_rates(self, step: int) -> Wanted | None:
        """Return the learning rates that the policy wants for the step after `step`, if it sets them."""
        shares = self.policy.rate_shares(step) if isinstance(self.policy, Annealing) else None
        return None if shares is None else (self.applier.modules, shares)
