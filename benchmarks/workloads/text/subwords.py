"""Words in pieces: byte-pair encoding over two languages, learned from the training text."""

from collections.abc import Iterable, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

PADDING, BEGIN, END = 0, 1, 2
SPECIAL = ("<pad>", "<s>", "</s>")
"""In the order of their numbers."""


class Subwords:
    """Turns sentences into numbers and back; any text, since its alphabet are bytes.

    Args:
        tokenizer: a byte-level one whose first tokens are `SPECIAL`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def learned(cls, sentences: Iterable[str], vocabulary_size: int) -> "Subwords":
        """Learn the pieces from sentences of both languages; the same from the same sentences."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(sentences, trainer)
        return cls(tokenizer)

    @property
    def size(self) -> int:
        """Pieces in the vocabulary."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, sentences: Sequence[str]) -> list[Tensor]:
        """Return the numbers of each sentence [T], closed by `END`."""
        found = self._tokenizer.encode_batch(list(sentences), add_special_tokens=False)
        return [torch.tensor([*encoding.ids, END]) for encoding in found]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the sentences; special tokens leave no trace."""
        return [str(text) for text in self._tokenizer.decode_batch([list(row) for row in rows])]
