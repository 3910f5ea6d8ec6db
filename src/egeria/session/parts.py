"""What is made for one cut of the model into layer modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from egeria.policy import Policy
from egeria.session.applying import Applier
from egeria.session.evaluation import Evaluation


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
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what decides; what is in force follows by `restore`, when nothing else acts on the model."""
        self.policy.load_state_dict(saved["policy"])
        self.evaluation.load_state_dict(saved["evaluator"])

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Freeze what a saved state had frozen, and let modules rest by its periods."""
        decided = self.policy.frozen
        self.applier.restore(min(decided, int(saved.get("frozen", decided))), decided, saved.get("periods"))
