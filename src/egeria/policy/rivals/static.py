"""'static': freezing by a timetable of the user's own."""

from __future__ import annotations

from egeria.config.timetable import read_timetable
from egeria.errors import ConfigError
from egeria.policy.rivals.timed import Move, Timed


class StaticSchedule(Timed):
    """Follows `policy.schedule`, such as "0.54:2 0.79:3 0.9:0"; an entry with fewer modules thaws the others.

    Where the schedule asks for more layer modules than may freeze, those that may do.

    Raises:
        ConfigError: there is no schedule, or the length of the run is not known.
    """

    def _timetable(self) -> tuple[Move, ...]:
        text = self._config.policy.schedule
        if text is None:
            raise ConfigError(
                "The policy 'static' follows policy.schedule, text such as \"0.54:2 0.9:0\", found None. "
                "Set it where the configuration is built or in its TOML file."
            )
        return tuple(Move(share=share, depth=depth) for share, depth in read_timetable(text))
