"""Translating greedily, and BLEU of what comes out."""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads.text.batching import pad_rows, sorted_batches
from benchmarks.workloads.text.subwords import BEGIN, END, PADDING


def translate(
    network: nn.Module, sources: Sequence[Tensor], device: torch.device, batch_size: int = 64
) -> list[list[int]]:
    """Return the translations, each token the likeliest behind those before; without `BEGIN` and `END`.

    The network is asked for the whole sentence at each token: it may be wrapped, so that its parts
    cannot be called on their own, and what this costs is little beside training.

    Args:
        network: a `Transformer`, in inference mode.
        sources: numbers of each sentence [S].
        device: of the network.
        batch_size: sentences translated together.
    """
    found: list[list[int]] = [[] for _ in sources]
    for batch in sorted_batches([len(source) for source in sources], batch_size):
        rows = _translate_batch(network, [sources[index] for index in batch], device)
        for index, row in zip(batch, rows, strict=True):
            found[index] = row
    return found


def _translate_batch(network: nn.Module, sources: Sequence[Tensor], device: torch.device) -> list[list[int]]:
    padded, mask = (tensor.to(device) for tensor in pad_rows(sources, PADDING))
    target = torch.full((len(sources), 1), BEGIN, device=device)
    has_ended = torch.zeros(len(sources), dtype=torch.bool, device=device)
    for _ in range(padded.shape[1] * 3 // 2 + 8):  # a translation is hardly longer; an untrained network never ends
        scores = network(
            source=padded, attention_mask=mask, target=target, decoder_attention_mask=torch.ones_like(target)
        )
        chosen = scores[:, -1].argmax(1).masked_fill(has_ended, END)
        target = torch.cat([target, chosen[:, None]], dim=1)
        has_ended |= chosen == END
        if bool(has_ended.all()):
            break
    return [row[: row.index(END)] if END in row else row for row in target[:, 1:].tolist()]


def bleu(translations: Sequence[str], references: Sequence[str], tokenization: str) -> float | None:
    """Return BLEU of a corpus in per cent; None where sacrebleu is not installed, which is said once.

    Args:
        translations: one for each reference.
        references: one for each sentence.
        tokenization: of sacrebleu: '13a' for plain text, 'none' for text that is split into words already.
    """
    corpus_bleu = _corpus_bleu()
    if corpus_bleu is None:
        return None
    return float(corpus_bleu(list(translations), [list(references)], tokenize=tokenization, force=True).score)


@cache
def _corpus_bleu() -> Callable[..., Any] | None:
    try:
        from sacrebleu import corpus_bleu  # noqa: PLC0415
    except ImportError:
        print("BLEU is left out: sacrebleu is not installed (pip install 'egeria[bench]').", file=sys.stderr)
        return None
    return corpus_bleu
