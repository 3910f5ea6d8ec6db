"""Text: translation, characters, question answering, sentiment, labels of words, pairs, topics."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.workloads.text import characters, mpnet, news, pairs, squad, sst2, tags, topics, translation
from benchmarks.workloads.text.fine_tuning import Recipe
from benchmarks.workloads.text.recipes import (
    BASE_WMT,
    CHARACTERS,
    NEWS,
    NEWS_BODIES,
    PAIRS,
    SQUAD,
    SST2,
    SST2_LORA,
    SST2_LORA_CHECKPOINTS,
    SST2_MPNET,
    TAGS,
    TINY_MULTI30K,
    TOPICS,
)
from benchmarks.workloads.text.schedules import linear
from benchmarks.workloads.workload import Training, Workload


def _accuracy(
    name: str, build: Callable[..., Training], recipes: Mapping[str, Recipe], *, is_held_out: bool = False, **how: Any
) -> Workload:
    """Return a workload that tells classes apart; `how` goes to `build`."""
    return Workload(
        name=name,
        metric="accuracy",
        higher_is_better=True,
        is_relative=False,
        paper="",
        is_held_out=is_held_out,
        tiers=tuple(recipes),
        build=partial(build, recipes=recipes, **how),
    )


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        name="transformer-tiny-multi30k",
        metric="perplexity",
        higher_is_better=False,
        is_relative=True,
        paper="+19 % (Transformer-Tiny, WMT16 EN-DE)",
        tiers=tuple(TINY_MULTI30K),
        build=partial(
            translation.build,
            corpus=translation.Corpus(folder="multi30k_ende", bleu_tokenization="13a"),
            recipes=TINY_MULTI30K,
        ),
    ),
    Workload(
        name="transformer-base-wmt",
        metric="perplexity",
        higher_is_better=False,
        is_relative=True,
        paper="+43 % (Transformer-Base, WMT16 EN-DE)",
        tiers=tuple(BASE_WMT),
        build=partial(
            translation.build,
            corpus=translation.Corpus(folder="wmt_ende_slice", bleu_tokenization="none"),
            recipes=BASE_WMT,
        ),
    ),
    Workload(
        name="gpt-characters",
        metric="perplexity",
        higher_is_better=False,
        is_relative=True,
        paper="",
        tiers=tuple(CHARACTERS),
        build=partial(characters.build, recipes=CHARACTERS),
    ),
    Workload(
        name="gpt-characters-news",
        metric="perplexity",
        higher_is_better=False,
        is_relative=True,
        paper="",
        is_held_out=True,
        tiers=tuple(NEWS),
        build=partial(news.build, recipes=NEWS, bodies=NEWS_BODIES),
    ),
    Workload(
        name="bert-squad",
        metric="f1",
        higher_is_better=True,
        is_relative=True,
        paper="+41 % (BERT-Base, SQuAD 1.0)",
        tiers=tuple(SQUAD),
        build=partial(squad.build, recipes=SQUAD),
    ),
    _accuracy("bert-sst2", sst2.build, SST2),
    _accuracy("bert-sst2-lora", sst2.build, SST2_LORA, adapt=sst2.with_adapters),
    _accuracy("bert-sst2-lora-checkpoints", sst2.build, SST2_LORA_CHECKPOINTS, adapt=sst2.with_checkpoints),
    _accuracy("mpnet-sst2", sst2.build, SST2_MPNET, load=mpnet.classifier),
    _accuracy("bert-tags", tags.build, TAGS),
    _accuracy("bert-pairs", pairs.build, PAIRS),
    _accuracy("bert-cases", tags.build, TAGS, read=tags.read_cased, tags=tags.CASES, schedule=linear),
    _accuracy("bert-topics", topics.build, TOPICS, is_held_out=True),
)
