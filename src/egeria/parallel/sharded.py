"""Models sharded by `fully_shard` (FSDP2): what is frozen drops out of the reduction by itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import distributed, nn

from egeria.layers.shards import choose_dtypes_again, reshard, without_wrapper
from egeria.parallel.numbers import Numbers
from egeria.parallel.refusals import refuse_model, refuse_shards


class Sharded:
    """Processes that hold a part of each parameter, and put them together for each forward and backward pass.

    A parameter without a gradient has none to reduce, and after the frozen front nothing is put together a second
    time, so that there is nothing to wrap again. All processes of the job take part.
    """

    def __init__(self) -> None:
        self.rank, self.num_ranks = distributed.get_rank(), distributed.get_world_size()
        self._called: nn.Module = nn.Module()
        self._numbers = Numbers(distributed.group.WORLD)

    def take(self, model: nn.Module) -> nn.Module:
        """Return the model, its parameters in parts."""
        self._called, bare = model, without_wrapper(model)
        reshard(bare)
        return bare

    def refusal(self) -> str | None:
        """Refuse what cannot be watched, and what is in parts of another kind."""
        return refuse_model(without_wrapper(self._called)) or refuse_shards(self._called)

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all processes, by rank.

        Raises:
            RuntimeError: a process did not answer within the timeout of the process group.
        """
        return self._numbers.exchange(row)

    def settle(self) -> None:
        """Put parameters in parts, where an evaluation of the loop's own has left whole ones: no change would stick."""
        reshard(without_wrapper(self._called))

    def rewrap(self, frozen: Collection[str] = ()) -> nn.Module:
        """Return what was given to `take`, ready for what trains now."""
        for module in without_wrapper(self._called).modules():
            choose_dtypes_again(module)
        return self._called
