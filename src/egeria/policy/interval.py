"""How often to evaluate: the paper's guideline for `n` (§4.2.2)."""

from __future__ import annotations

DEFAULT_INTERVAL_STEPS = 100
# Bootstrapping, smoothing delay and the halved window after a thaw take 1 + 0.5 + 0.25 of a pass.
PASSES = 1 + 0.5 + 0.25


def choose_interval(
    *,
    interval_steps: int | None,
    total_steps: int | None,
    window: int,
    num_modules: int,
    evaluations: int | None = None,
) -> tuple[int, str]:
    """Return `n` in optimizer steps and the reason for it.

    Args:
        interval_steps: the user's own value; it wins.
        total_steps: optimizer steps of the whole run, None where unknown.
        window: `W`.
        num_modules: layer modules of the model.
        evaluations: how many a run is to have by its policy; None for the paper's guideline.
    """
    if interval_steps is not None:
        return interval_steps, "set in plasticity.interval_steps"
    if total_steps is None:
        return DEFAULT_INTERVAL_STEPS, "default: give attach total_steps to derive it from the length of the run"
    if evaluations is not None:
        return max(1, total_steps // evaluations), f"{total_steps} steps / {evaluations} evaluations of the policy"
    steps = round(total_steps / (2 * window) / num_modules / PASSES)
    return max(1, steps), f"guideline: {total_steps} steps / (2 x {window}) / {num_modules} modules / {PASSES}"
