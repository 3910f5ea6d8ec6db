"""Text: translation, characters, question answering, sentiment, labels of words, pairs, topics."""

from __future__ import annotations

from functools import partial

from benchmarks.workloads.text import characters, pairs, squad, sst2, tags, topics, translation
from benchmarks.workloads.text.recipes import (
    BASE_WMT,
    CHARACTERS,
    PAIRS,
    SQUAD,
    SST2,
    SST2_LORA,
    TAGS,
    TINY_MULTI30K,
    TOPICS,
)
from benchmarks.workloads.text.schedules import linear
from benchmarks.workloads.workload import Workload

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
        name="bert-squad",
        metric="f1",
        higher_is_better=True,
        is_relative=True,
        paper="+41 % (BERT-Base, SQuAD 1.0)",
        tiers=tuple(SQUAD),
        build=partial(squad.build, recipes=SQUAD),
    ),
    Workload(
        name="bert-sst2",
        metric="accuracy",
        higher_is_better=True,
        is_relative=False,
        paper="",
        tiers=tuple(SST2),
        build=partial(sst2.build, recipes=SST2),
    ),
    Workload(
        name="bert-sst2-lora",
        metric="accuracy",
        higher_is_better=True,
        is_relative=False,
        paper="",
        is_held_out=True,
        tiers=tuple(SST2_LORA),
        build=partial(sst2.build, recipes=SST2_LORA, adapt=sst2.with_adapters),
    ),
    Workload(
        name="bert-sst2-last-layer",
        metric="accuracy",
        higher_is_better=True,
        is_relative=False,
        paper="",
        tiers=tuple(SST2),
        build=partial(sst2.build, recipes=SST2, adapt=sst2.last_layer),
    ),
    Workload(
        name="bert-tags",
        metric="accuracy",
        higher_is_better=True,
        is_relative=False,
        paper="",
        tiers=tuple(TAGS),
        build=partial(tags.build, recipes=TAGS),
    ),
    Workload(
        name="bert-pairs",
        metric="accuracy",
        higher_is_better=True,
        is_relative=False,
        paper="",
        tiers=tuple(PAIRS),
        build=partial(pairs.build, recipes=PAIRS),
    ),
    Workload(
        name="bert-cases",
        metric="accuracy",
        higher_is_better=True,
        is_relative=False,
        paper="",
        tiers=tuple(TAGS),
        build=partial(tags.build, recipes=TAGS, read=tags.read_cased, tags=tags.CASES, schedule=linear),
    ),
    Workload(
        name="bert-topics",
        metric="accuracy",
        higher_is_better=True,
        is_relative=False,
        paper="",
        is_held_out=True,
        tiers=tuple(TOPICS),
        build=partial(topics.build, recipes=TOPICS),
    ),
)
