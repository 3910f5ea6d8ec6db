"""Opening a generation: from the cheapest question to the dearest, up to the first no."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from egeria.cache.decision import Outlook, Surveyor, foresee, weigh
from egeria.cache.gate import Prospects
from egeria.cache.generation import Generation
from egeria.cache.layout import Layouts
from egeria.cache.samples.feed import Drawn, SampleFeed
from egeria.cache.store.directory import CacheDirectory
from egeria.cache.store.disk import DiskStore
from egeria.cache.ways import Watching
from egeria.config import CacheConfig
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.layers.skipping.prefix import Prefix
from egeria.layers.sources import checksum


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What was seen behind a boundary when it is decided."""

    batch: Batch
    """A training batch."""
    drawn: Drawn
    """Its samples."""
    watched: Watching
    """The pace of the iterations before it."""
    outlook: Outlook
    longest: int | None
    """The greatest padded length so far."""

    def prospects(self, feed: SampleFeed) -> Prospects:
        """Return what it promises, before anything is tried out."""
        times = {"iteration_s": self.watched.iteration_s, "prefix_s": self.watched.prefix_s}
        return foresee(self.batch, self.drawn, feed, outlook=self.outlook, **times)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """A generation, or None; why, and the numbers that decided."""

    generation: Generation | None
    reason: str
    numbers: dict[str, float]


def open_generation(
    model: nn.Module,
    modules: Sequence[LayerModule],
    feed: SampleFeed,
    settings: CacheConfig,
    *,
    sight: Sight,
    place: Callable[[], CacheDirectory],
    number: int,
    repeating: bool,
) -> Opening:
    """Return a generation for the frozen layer modules where storing pays.

    Args:
        model: the model in training.
        modules: its frozen layer modules, front to back.
        feed: the loader.
        settings: of the cache.
        sight: what was seen.
        place: makes or returns where stores go.
        number: of the generation.
        repeating: whether a sample comes with the same input each time.

    Raises:
        UncacheableError: the front cannot be skipped.
        StoreError: the disk cannot be used.
    """
    batch, drawn = sight.batch, sight.drawn
    prospects = sight.prospects(feed)
    verdict = weigh(prospects, settings)
    if not verdict.pays:
        return Opening(generation=None, reason=verdict.reason, numbers=prospects.to_dict())
    prefix = Prefix.find(model, modules, batch, len(drawn.samples))
    boundary = modules[-1].name
    decision = Surveyor(prefix, batch, drawn, feed, settings).survey(
        place(),
        prospects,
        number=number,
        boundary=boundary,
        repeating=repeating,
        longest=sight.longest,
    )
    reason, opened = decision.verdict.reason, decision.opened
    if opened is not None and not repeating and not feed.use_views(opened.num_views):
        opened.store.close(remove=True)
        reason, opened = feed.views_refusal or "the augmentation of a sample cannot be fixed", None
    numbers = decision.prospects.to_dict()
    if opened is None:
        return Opening(generation=None, reason=reason, numbers=numbers)
    what = (opened.layouts, opened.store, feed, settings)
    generation = _generation(prefix, *what, sight=sight, number=number)
    return Opening(generation=generation, reason=reason, numbers=numbers)


def join_generation(
    model: nn.Module,
    modules: Sequence[LayerModule],
    feed: SampleFeed,
    settings: CacheConfig,
    *,
    sight: Sight,
    place: CacheDirectory,
    number: int,
) -> Opening:
    """Return a generation on the store that another process of the host has opened, if it has.

    Args:
        model: the model in training.
        modules: its frozen layer modules, front to back.
        feed: the loader.
        settings: of the cache.
        sight: what was seen.
        place: where the store is.
        number: of the generation.

    Raises:
        UncacheableError: the front cannot be skipped.
        StoreError: the disk cannot be used.
    """
    batch, boundary = sight.batch, modules[-1].name
    prefix = Prefix.find(model, modules, batch, len(sight.drawn.samples))
    rows = prefix.compute(batch, None)
    if not place.published(number):
        return Opening(generation=None, reason="the first process of this host stores nothing", numbers={})
    store = place.join(number)
    own = Layouts.of(prefix.row_leaves, rows, storage=settings.storage, longest=sight.longest)
    layouts = own.like(store.layouts)
    reason = "" if layouts else "the first process of this host stores rows of another kind"
    if store.front != checksum(prefix.weights()):
        reason = "the frozen layers of this process have other values, such as statistics of its own"
    if store.boundary != boundary:
        reason = f"the first process of this host stores what {store.boundary} puts out"
    if not reason and store.is_viewed and not feed.use_views(store.num_views):
        reason = feed.views_refusal or "the augmentation of a sample cannot be fixed"
    if layouts is None or reason:
        store.close()
        return Opening(generation=None, reason=reason, numbers={})
    generation = _generation(prefix, layouts, store, feed, settings, sight=sight, number=number)
    return Opening(generation=generation, reason="the first process of this host has opened the store", numbers={})


def _generation(
    prefix: Prefix,
    layouts: Layouts,
    store: DiskStore,
    feed: SampleFeed,
    settings: CacheConfig,
    *,
    sight: Sight,
    number: int,
) -> Generation:
    return Generation(
        prefix,
        layouts,
        store,
        feed,
        number=number,
        verify_batches=settings.verify_batches,
        iteration_s=sight.watched.iteration_s,
        device=next(prefix.model.parameters()).device,
    )
