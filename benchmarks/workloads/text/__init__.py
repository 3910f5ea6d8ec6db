"""Text: translation, question answering, sentiment."""

from __future__ import annotations

from functools import partial

from benchmarks.workloads.text import squad, sst2, translation
from benchmarks.workloads.text.recipes import BASE_WMT, SQUAD, SST2, TINY_MULTI30K
from benchmarks.workloads.workload import Workload

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        name="transformer-tiny-multi30k",
        metric="perplexity",
        higher_is_better=False,
        is_relative=True,
        paper="+19 % (Transformer-Tiny, WMT16 EN-DE)",
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
        build=partial(
            translation.build,
            corpus=translation.Corpus(folder="wmt_ende_slice", bleu_tokenization="none"),
            recipes=BASE_WMT,
        ),
    ),
    Workload(
        name="bert-squad",
        metric="f1",
        higher_is_better=True,
        is_relative=True,
        paper="+41 % (BERT-Base, SQuAD 1.0)",
        build=partial(squad.build, recipes=SQUAD),
    ),
    Workload(
        name="bert-sst2",
        metric="accuracy",
        higher_is_better=True,
        is_relative=False,
        paper="",
        build=partial(sst2.build, recipes=SST2),
    ),
)
