"""`ActivationCache`: skips the frozen front with what is stored on the disk, by sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from egeria.cache.base import WHAT, Cache, Opening
from egeria.cache.decision import GenerationOpener
from egeria.cache.forward_modes import TimedForward
from egeria.cache.loader import SampleFeed
from egeria.cache.samples import BatchIndices, NoSamplesError
from egeria.model.batch import Batch

OTHER_LOADER = (
    "the loader given to attach does not hand out the batches that the model is called with; give "
    "it the one that the "
    "loop iterates over, such as `accelerator.prepare` returns"
)
PATIENCE = 4
"""Times as many forwards are waited for one whose samples are known."""


@dataclass(kw_only=True, eq=False)
class ActivationCache(Cache):
    """Makes the training forwards of a model with a frozen front, with a store on the disk."""

    feed: SampleFeed | None
    """Knows the samples of batches; None where they cannot be identified."""
    directory: Path
    """Where stores go."""
    _longest: int | None = None
    _is_other_loader: bool = False
    """Whether nothing is stored only because the batches come from another loader, so far."""

    def close(self) -> None:
        """Stop everything, free what was stored and give the loader back; more than once is no
        error.
        """
        super().close()
        if self.feed is not None:
            self.feed.close()

    def _find_samples(self, batch: Batch) -> BatchIndices | None:
        """Return the samples of a batch, if they are known; learn how long they can be."""
        mask = batch.kwargs.get("attention_mask")
        if getattr(mask, "ndim", 0) == 2:
            self._longest = max(self._longest or 0, int(mask.shape[1]))  # type: ignore[union-attr]
        try:
            return None if self.feed is None else self.feed.take(batch.arguments)
        except NoSamplesError as error:
            self.refusal = str(error)
            self._decline("storing activations", self.refusal)
            if self.feed is not None:
                self.feed.close()
            self.feed = None
            return None

    def _has_seen_enough(self, timed: TimedForward, indices: BatchIndices | None) -> bool:
        is_known = indices is not None or self.feed is None
        return timed.has_seen_enough(1 if is_known else PATIENCE)

    def _choose_mode(self, batch: Batch, indices: BatchIndices | None) -> None:
        is_watched = indices is not None and bool(self._modules) and not self.refusal
        if self._is_other_loader and self.is_idle and is_watched:
            self._watch()
        super()._choose_mode(batch, indices)

    def _open(self, batch: Batch, indices: BatchIndices | None, timed: TimedForward) -> Opening:
        if self.feed is None:
            return None, self.refusal, {}
        self._is_other_loader = indices is None
        if indices is None:
            self._decline(WHAT, OTHER_LOADER)
            return None, OTHER_LOADER, {}
        opener = GenerationOpener(
            model=self.model,
            modules=self._modules,
            feed=self.feed,
            settings=self.settings,
            directory=self.directory,
            batch=batch,
            indices=indices,
            timed=timed,
            outlook=self._outlook,
            longest=self._longest,
            number=self._number,
        )
        return opener.open()

    def _decline(self, what: str, reason: str) -> None:
        self.recorder.decline(what, reason)
