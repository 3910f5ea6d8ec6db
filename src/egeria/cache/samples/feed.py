"""Which samples of the data set a loader's batches are made of: those handed out, and those to come."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from egeria.cache.samples.columns import IdColumn
from egeria.cache.samples.drawing import Drawing, Drawn, NoSamplesError
from egeria.cache.samples.following import ColumnFollower, SamplerFollower
from egeria.cache.samples.views import Finding, ViewedDataset, examine
from egeria.cache.samples.watching import Watch

__all__ = ["Drawn", "NoSamplesError", "SampleFeed"]


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
        NoSamplesError: the samples cannot be told. Where the first batch decides, `current` raises it.
    """

    def __init__(self, loader: Any, *, id_column: str | None, base_seed: int) -> None:
        if not isinstance(loader, DataLoader):
            raise NoSamplesError(
                "samples are told apart by the sampler of a torch DataLoader, but the loader is a "
                f"{type(loader).__name__}; pass the DataLoader that the batches come from"
            )
        self.num_samples = _length(loader.dataset)
        self.num_batches = None if isinstance(loader.dataset, IterableDataset) else _length(loader)
        self._draws_ahead = loader.num_workers == 0
        self._is_open = True
        reason = f"the samples are to be told by the column '{id_column}'" if id_column else _refusal(loader)
        finding = Finding()
        self._finding = finding
        self._drawing = Drawing(refusal=reason, views_work=lambda: finding.refusal is None)
        self._dataset: ViewedDataset | None = None
        self._follower: SamplerFollower | ColumnFollower
        if reason is not None:
            self._follower = ColumnFollower(IdColumn(id_column, reason))
        else:
            self._follower = SamplerFollower(self._drawing)
            if not isinstance(loader.dataset, MapDataPipe):  # torch takes those apart itself
                self._dataset = ViewedDataset(loader.dataset, base_seed, finding)
        self._watch = Watch(loader, self._follower, self._dataset)
        self._finalizer = weakref.finalize(self, self._watch.close)
        self._finalizer.atexit = False

    @property
    def current(self) -> Drawn | None:
        """Return what the loader handed out last; None before the first batch, after the last and after `close`.

        Handed out, not trained on: in a loop that takes a batch in advance (to copy it to the device,
        say) this is the batch after the one the model sees, and their fingerprints will not agree.

        Raises:
            NoSamplesError: the samples cannot be told after all.
        """
        if self._is_open and self._follower.failure is not None:
            raise NoSamplesError(self._follower.failure)
        return self._follower.current if self._is_open else None

    @property
    def numbers_by_sight(self) -> bool:
        """Tell whether samples are numbered in the order in which this process sees them."""
        return self._follower.reads_columns

    def upcoming(self, count: int) -> list[Drawn]:
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
            Whether it could be done; `views_refusal` tells why not.

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
        return self._finding.refusal

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
