"""'linear': the schedule of Composer's layer freezing."""

from __future__ import annotations

from egeria.policy.rivals.timed import Move, Timed

START = 0.5


class LinearSchedule(Timed):
    """Freezes evenly from `start` on, until a `level` of the layer modules is frozen at the end.

    `depth(t) = floor(level * (t - start) / (1 - start) * (L - 1))` for `L` layer modules, so module `i`,
    counted from 0, freezes at `t = start + (1 - start) * (i + 1) / (level * (L - 1))`.

    Source: MosaicML Composer, `LayerFreezing`. It counts leaf layers in the order of definition and acts
    at the end of an epoch; here it is layer modules in the order of execution, and the end of an interval.
    """

    def _timetable(self) -> tuple[Move, ...]:
        settings = self._config.policy
        start = START if settings.start is None else settings.start
        reached = settings.level * self._num_freezable()
        return tuple(
            Move(share=start + (1 - start) * depth / reached, depth=depth)
            for depth in range(1, self._num_freezable() + 1)
        )
