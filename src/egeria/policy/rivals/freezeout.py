"""'freezeout': a cosine to zero for each layer module, the front ones first."""

from __future__ import annotations

import math

from egeria.policy.rivals.timed import Move, Timed

START = 0.8
POWERS = {"linear": 1, "squared": 2, "cubic": 3}


class FreezeOut(Timed):
    """Anneals the learning rate of each layer module to zero at its own time, and freezes it then.

    Module `i` of `0..L`, where `L` is the last, ends at the share `r_i = (t_0 + (1 - t_0) * i / L) ** p` of
    the training, with `p` = 1, 2 or 3 for 'linear', 'squared' or 'cubic'. Until then its rate is
    `lr_i(t) = lr_i(0) / 2 * (1 + cos(pi * t / r_i))` with `lr_i(0) = lr`, or `lr / r_i` where scaled. `lr` is
    the initial rate of the optimizer: as in the source this is the schedule of the whole run, and it takes the
    place of the user's, for the last module (`r_L = 1`) too.

    Source: Brock et al., "FreezeOut" (arXiv 1706.04983), with the 1/2 that the printed formula lacks.
    """

    def _timetable(self) -> tuple[Move, ...]:
        ends = self._ends()[:-1]
        return tuple(Move(share=end, depth=depth) for depth, end in enumerate(ends, start=1))

    def rate_shares(self, step: int) -> tuple[float, ...] | None:
        """Return the rate of each layer module for the step after `step`, as a share of the initial one."""
        if not self._config.freezing.enabled:
            return None
        done = step / self._length
        return tuple(self._rate(done, end) for end in self._ends())

    def _ends(self) -> tuple[float, ...]:
        settings = self._config.policy
        start = START if settings.start is None else settings.start
        last = max(1, self._num_freezable())
        power = POWERS[settings.shape]
        return tuple((start + (1 - start) * index / last) ** power for index in range(len(self._trainable)))

    def _rate(self, done: float, end: float) -> float:
        if done >= end:
            return 0.0
        first = 1 / end if self._config.policy.scaled else 1.0
        return first / 2 * (1 + math.cos(math.pi * done / end))

    def _says(self, depth: int) -> str:
        return f"{super()._says(depth)}: their learning rate has come down to 0"
