"""`SampleFeed`: the sample numbers of the batches that a loader hands out, and of those to come."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter

from egeria import tree
from egeria.cache.augmentation import BatchKind, ViewedDataset, examine
from egeria.cache.loader import (
    BatchIndices,
    EpochIterator,
    LoaderHook,
    NoSamplesError,
    RecordingBatchSampler,
    SharedDrawState,
)

__all__ = ["BatchIndices", "NoSamplesError", "SampleFeed"]


class SampleFeed:
    """Follows a loader: knows each batch by the numbers of its samples, and the batches to come.

    Until `upcoming` or `use_views` is called, the loader draws and augments bit for bit as without it.
    Where the sampler cannot tell the samples (an `IterableDataset`, `batch_size=None`, `in_order=False`,
    indices that are no integers), they are read from a column of the batch; then nothing is known of
    the batches to come, and there are no views.

    Args:
        loader: the training `DataLoader`.
        id_column: key of a batch, a mapping, that holds one integer for each row; read instead of
            following the sampler. None looks for one where that is needed, in the first batch.
        base_seed: root of all seeds of stateless augmentation; the same in every process and after a resume.

    Raises:
        NoSamplesError: the samples cannot be identified. Where the first batch decides, `current` raises it.
    """

    def __init__(self, loader: Any, *, id_column: str | None, base_seed: int) -> None:
        if not isinstance(loader, DataLoader):
            raise NoSamplesError(
                "samples are identified by the sampler of a torch DataLoader, but the loader is a "
                f"{type(loader).__name__}; pass the DataLoader that the batches come from"
            )
        self.num_samples = _length(loader.dataset)
        self.num_batches = None if isinstance(loader.dataset, IterableDataset) else _length(loader)
        self._draws_ahead = loader.num_workers == 0
        self._is_open = True
        reason = f"the samples are to be identified by the column '{id_column}'" if id_column else _refusal(loader)
        batch_kind = BatchKind()
        self._batch_kind = batch_kind
        self._drawing = SharedDrawState(refusal=reason, views_work=lambda: batch_kind.refusal is None)
        self._dataset: ViewedDataset | None = None
        self._follower: SamplerFollower | ColumnFollower
        if reason is not None:
            self._follower = ColumnFollower(IdColumn(id_column, reason))
        else:
            self._follower = SamplerFollower(self._drawing)
            if not isinstance(loader.dataset, MapDataPipe):  # torch takes those apart itself
                self._dataset = ViewedDataset(loader.dataset, base_seed, batch_kind)
        self._watch = LoaderHook(loader, self._follower, self._dataset)
        self._finalizer = weakref.finalize(self, self._watch.close)
        self._finalizer.atexit = False

    @property
    def current(self) -> BatchIndices | None:
        """Return what the loader handed out last; None before the first batch, after the last and after `close`.

        Handed out, not trained on: in a loop that takes a batch in advance (to copy it to the device,
        say) this is the batch after the one the model sees, and their fingerprints will not agree.

        Raises:
            NoSamplesError: the samples cannot be identified after all.
        """
        if self._is_open and self._follower.failure is not None:
            raise NoSamplesError(self._follower.failure)
        return self._follower.current if self._is_open else None

    @property
    def numbers_by_sight(self) -> bool:
        """Return whether samples are numbered in the order in which this process sees them."""
        return self._follower.reads_columns

    def upcoming(self, count: int) -> list[BatchIndices]:
        """Return the next batches of this pass, in order, at most `count`.

        Without workers the sampler draws so many in advance, from now on. With workers these are the
        batches that they work at or have ready.
        """
        latest = self._follower.latest
        if not self._is_open or latest is None:
            return []
        if self._draws_ahead:
            self._drawing.num_ahead = max(self._drawing.num_ahead, count)
            latest.draw_ahead(count)
        return latest.coming(count)

    def use_views(self, num_views: int | None) -> bool:
        """Make the augmentation stateless, with so many views of each sample, one after the other from epoch to epoch.

        Holds for batches drawn from now on; with workers that persist since before the loader was
        watched, from the next epoch on. Without workers the data set is called two to six times for
        one sample, with every random state restored. With workers it is left to them to find out
        whether views are possible (a file opened here would be inherited by workers forked later), so
        `views_refusal` may turn up later; until then batches that cannot be viewed come freely augmented,
        `viewed` all the same.

        Args:
            num_views: None goes back to augmentation as the user wrote it.

        Returns:
            Whether it could be done; `views_refusal` says why not.

        Raises:
            ValueError: fewer than one view.
        """
        if num_views is not None and num_views < 1:
            raise ValueError(f"num_views must be at least 1 or None, found {num_views}")
        if num_views is None:
            self._drawing.num_views = None
            return True
        if self._draws_ahead and self._dataset is not None and self._follower.current is not None:
            examine(self._dataset, int(self._follower.current.samples[0]))
        if self.views_refusal is not None:
            return False
        if self._drawing.num_views != num_views:
            self._drawing.num_views = num_views
            self._drawing.views_since_epoch = max(0, self._drawing.num_epochs - 1)
        self._watch.restart_workers()
        return True

    @property
    def views_refusal(self) -> str | None:
        """Return why there can be no views, or None as long as nothing speaks against them."""
        if not self._is_open:
            return "the loader is not watched any more"
        if self._drawing.refusal is not None:
            return f"{self._drawing.refusal}, so the seed of a sample is not known when it is made"
        if self._dataset is None:
            return "the data set is a MapDataPipe, which torch takes apart itself; use a map-style data set"
        return self._batch_kind.refusal

    def close(self) -> None:
        """Give the loader back exactly as it was, also in the middle of an epoch; what is drawn is still handed out."""
        self._is_open = False
        self._finalizer()


def _refusal(loader: DataLoader[Any]) -> str | None:
    """Return why the sampler of a loader does not tell the samples of a batch, or None."""
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset has no sample numbers"
    if loader.batch_size is None and loader.batch_sampler is None:
        return "with batch_size=None the loader draws no batches of samples"
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "with in_order=False the batches come in another order than they are drawn"
    return None


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


class SamplerFollower:
    """Knows batches by what the sampler drew for them; by a column of the batch if that is no integers."""

    def __init__(self, drawing: SharedDrawState) -> None:
        self.current: BatchIndices | None = None
        self.latest: EpochIterator | None = None
        self.failure: str | None = None
        self._drawing = drawing
        self._columns: ColumnFollower | None = None

    @property
    def reads_columns(self) -> bool:
        """Whether samples are identified by a column of the batch by now."""
        return self._columns is not None

    def sampler(self, sampler: Any, can_view: bool) -> Any:
        """Return a sampler that draws the same, and records it."""
        return RecordingBatchSampler(sampler, self._drawing, can_view=can_view)

    def begun(self, iterator: Any) -> None:
        """From now on the batches to come are those of this pass."""
        source = getattr(iterator, "_sampler_iter", None)
        if isinstance(source, EpochIterator):
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

    def _advanced(self, iterator: Any) -> BatchIndices | None:
        source = iterator._sampler_iter
        if not isinstance(source, EpochIterator):  # persistent workers in the middle of a pass when the watch began
            return None
        self.latest = source
        # With workers, batches come in the order of drawing; this counts those that came, failed ones too.
        return source.handed_out(getattr(iterator, "_rcvd_idx", source.num_taken))


class ColumnFollower:
    """Knows batches by a column of theirs."""

    reads_columns = True

    def __init__(self, column: IdColumn) -> None:
        self.current: BatchIndices | None = None
        self.latest: EpochIterator | None = None
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
            self.current = BatchIndices(number=self._num_batches, epoch=self._epoch, samples=samples, views=views)
            self._num_batches += 1

    def stopped(self, iterator: Any) -> None:
        """Nothing is handed out."""
        self.current = None


def _strange(iterator: Any) -> str:
    return (
        f"the iterators of this loader ({type(iterator).__name__}) do not draw from its batch sampler as those "
        "of torch do; pass a plain torch DataLoader"
    )


NAMES = ("sample_id", "example_id", "idx", "index", "id")


class IdColumn:
    """The entry of a batch that holds an integer for each row, and dense numbers for the integers seen in it.

    Args:
        name: its key; None looks for one of NAMES in the first batch.
        reason: why such a column is needed; begins the message when there is none.
    """

    def __init__(self, name: str | None, reason: str) -> None:
        self._name = name
        self._reason = reason
        self._numbers: dict[int, int] = {}

    def read(self, batch: Any) -> np.ndarray:
        """Return the sample number of each row, int64 [B]: ids are numbered in the order of first sight.

        Raises:
            NoSamplesError: there is no such column in the batch.
        """
        names = NAMES if self._name is None else (self._name,)
        for name in names:
            ids = _ids(batch, name)
            if ids is not None:
                self._name = name  # from now on this one
                numbers = self._numbers
                return np.array([numbers.setdefault(sample, len(numbers)) for sample in ids], dtype=np.int64)
        wanted = f"the key '{names[0]}'" if len(names) == 1 else "one of the keys " + ", ".join(names)
        raise NoSamplesError(
            f"{self._reason}, and the batch is no mapping with {wanted} that holds one integer for each sample: "
            "let the data set return mappings with the number of the sample under 'sample_id', or name its key"
        )


def _ids(batch: Any, name: str) -> list[int] | None:
    if not isinstance(batch, Mapping) or name not in batch:
        return None
    column = batch[name]
    if isinstance(column, Tensor):
        column = column.detach().cpu().numpy()
    try:
        ids = np.asarray(column)
    except ValueError:
        return None
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or ids.size != len(ids):
        return None
    sizes = {len(tensor) for tensor in tree.leaves(batch) if tensor.dim() and tensor is not batch[name]}
    return [int(sample) for sample in ids.reshape(-1)] if not sizes or len(ids) in sizes else None
