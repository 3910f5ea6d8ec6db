"""'random': freezing at times that mean nothing, which every rule should beat."""

from __future__ import annotations

import random

from egeria.policy.rivals.timed import Move, Timed

START = 0.1


class RandomTimes(Timed):
    """Draws a time from [start, 1] for each layer module but the last, and sorts them: the front freezes first.

    Source: our own control. The times depend on `policy.seed` and the number of layer modules alone.
    """

    def _timetable(self) -> tuple[Move, ...]:
        settings = self._config.policy
        start = START if settings.start is None else settings.start
        generator = random.Random(settings.seed)
        times = sorted(start + (1 - start) * generator.random() for _ in range(self._num_freezable()))
        return tuple(Move(share=share, depth=depth) for depth, share in enumerate(times, start=1))
