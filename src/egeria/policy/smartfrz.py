"""What SmartFRZ freezes by: a predictor that looks at the weights."""

from __future__ import annotations

from egeria.policy.base import FrontPolicy
from egeria.policy.protocol import PREDICTION, Decision, Interval


class SmartFrz(FrontPolicy):
    """'smartfrz': freezes the front modules of which a trained predictor says so, at the end of
    each interval.

    The predictor sees 30 snapshots of 1,024 weights of a layer module, evenly spaced over the
    interval, a twentieth of the training. Front to back, so that a freeze saves; nothing thaws.

    Source: SmartFRZ (arXiv 2401.16720), which asks at the end of each epoch. Only like it: the
    paper's text leaves open what it was trained on; see `egeria.smartfrz`.
    """

    needs = frozenset({PREDICTION})

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Freeze as far as the predictor says so without a gap."""
        scores, limit = interval.freeze_scores, self._config.policy.freeze_score
        if scores is None:
            return ()
        depth, passed = self._frozen, []
        while depth < self._deepest_freeze:
            score = scores[depth]
            if self._trainable[depth]:
                if score is None or not score > limit:
                    break
                passed.append(score)
            depth += 1
        if not passed:
            return ()
        return self._move_to(depth, f"the predictor gives {min(passed):.0%} for a freeze")

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return the steps to the next time that the predictor is asked; None where nothing is left
        to freeze.
        """
        return float(interval_steps) if self._frozen < self._deepest_freeze else None
