"""What happens in the iterators of a watched loader, brought together: the batch handed out, the pass under way."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch.utils.data.dataloader import _BaseDataLoaderIter

from egeria.cache.samples.columns import IdColumn
from egeria.cache.samples.drawing import Drawing, Drawn, NoSamplesError, Pass, RecordingSampler


class Follower(Protocol):
    """Is told by a `Watch` what the loader does; raises nothing."""

    @property
    def reads_columns(self) -> bool:
        """Tell whether samples are told by a column of the batch, in the order in which this process sees them."""

    def sampler(self, sampler: Any, can_view: bool) -> Any:
        """Return what stands in for a batch sampler."""

    def begun(self, iterator: Any) -> None:
        """Hear that an iterator of the loader begins a pass."""

    def handed_out(self, iterator: Any, batch: Any) -> None:
        """Hear that it is about to hand out a batch."""

    def stopped(self, iterator: Any) -> None:
        """Hear that it raises instead: at the end of the pass, or an error of the user's."""


class SamplerFollower:
    """Knows batches by what the sampler drew for them; by a column of the batch if that is no integers."""

    def __init__(self, drawing: Drawing) -> None:
        self.current: Drawn | None = None
        self.latest: Pass | None = None
        self.failure: str | None = None
        self._drawing = drawing
        self._columns: ColumnFollower | None = None

    @property
    def reads_columns(self) -> bool:
        """Whether samples are told by a column of the batch by now."""
        return self._columns is not None

    def sampler(self, sampler: Any, can_view: bool) -> Any:
        """Return a sampler that draws the same, and records it."""
        return RecordingSampler(sampler, self._drawing, can_view=can_view)

    def begun(self, iterator: Any) -> None:
        """From now on the batches to come are those of this pass."""
        source = getattr(iterator, "_sampler_iter", None)
        if isinstance(source, Pass):
            self.latest = source
        else:
            self.failure = _strange(iterator)
        if self._columns is not None:
            self._columns.begun(iterator)

    def handed_out(self, iterator: Any, batch: Any) -> None:
        """The oldest batch that was taken is the current one."""
        self.current = self._advanced(iterator)
        if self.current is None and self._drawing.refusal is not None:
            if self._columns is None:
                self._columns = ColumnFollower(IdColumn(None, self._drawing.refusal))
            self._columns.handed_out(iterator, batch)
            self.current, self.failure = self._columns.current, self._columns.failure

    def stopped(self, iterator: Any) -> None:
        """A batch whose making failed is gone too."""
        self._advanced(iterator)
        self.current = None

    def _advanced(self, iterator: Any) -> Drawn | None:
        source = iterator._sampler_iter
        if not isinstance(source, Pass):  # persistent workers in the middle of a pass when the watch began
            return None
        self.latest = source
        # With workers, batches come in the order of drawing; this counts those that came, failed ones too.
        return source.handed_out(getattr(iterator, "_rcvd_idx", source.num_taken))


class ColumnFollower:
    """Knows batches by a column of theirs."""

    reads_columns = True

    def __init__(self, column: IdColumn) -> None:
        self.current: Drawn | None = None
        self.latest: Pass | None = None
        self.failure: str | None = None
        self._column = column
        self._num_batches = 0
        self._epoch = 0
        self._is_used = False

    def sampler(self, sampler: Any, can_view: bool) -> Any:
        """Leave the sampler alone."""
        return sampler

    def begun(self, iterator: Any) -> None:
        """Count the passes that hand something out."""
        if not isinstance(iterator, _BaseDataLoaderIter):
            self.failure = _strange(iterator)
        self._epoch += self._is_used
        self._is_used = False

    def handed_out(self, iterator: Any, batch: Any) -> None:
        """Read the numbers of the samples."""
        self._is_used = True
        self.current = None
        if self.failure is not None:
            return
        try:
            samples = self._column.read(batch)
        except NoSamplesError as error:
            self.failure = str(error)
        except Exception as error:  # a mapping of the user's may raise anything
            self.failure = f"reading the numbers of the samples from the batch failed: {error!r}"
        else:
            views = np.zeros_like(samples)
            self.current = Drawn(number=self._num_batches, epoch=self._epoch, samples=samples, views=views)
            self._num_batches += 1

    def stopped(self, iterator: Any) -> None:
        """Nothing is handed out."""
        self.current = None


def _strange(iterator: Any) -> str:
    return (
        f"the iterators of this loader ({type(iterator).__name__}) do not draw from its batch sampler as those "
        "of torch do; pass a plain torch DataLoader"
    )
