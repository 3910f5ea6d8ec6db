"""The transformer of the bench and what it is judged by, against numbers by hand."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("tokenizers")

from benchmarks.workloads.text.decoding import bleu, translate
from benchmarks.workloads.text.subwords import BEGIN, END, PADDING, Subwords
from benchmarks.workloads.text.transformer import Size, Transformer
from benchmarks.workloads.text.translation import Corpus, Pairs, TranslationLoss, TranslationQuality

pytestmark = pytest.mark.bench

CPU = torch.device("cpu")
SENTENCES = ["a man rides a horse", "two dogs play in the snow", "ein Mann reitet", "zwei Hunde spielen im Schnee"]


def small_transformer(vocabulary=30, dropout=0.0, num_layers=2):
    torch.manual_seed(0)
    size = Size(vocabulary=vocabulary, width=32, inner_width=64, num_heads=2, num_layers=num_layers, dropout=dropout)
    return Transformer(size)


def random_pairs(*lengths):
    generator = torch.Generator().manual_seed(1)

    def row(length):
        return torch.cat([torch.randint(3, 30, (length - 1,), generator=generator), torch.tensor([END])])

    return Pairs([row(source) for source, _ in lengths], [row(target) for _, target in lengths])


def scores_of(model, batch):
    return model(**{name: tensor for name, tensor in batch.items() if name != "labels"})


class TestTransformer:
    def test_padding_changes_neither_scores_nor_loss(self):
        pairs, model = random_pairs((4, 5), (11, 9)), small_transformer()
        alone, together = pairs.__getitems__([0]), pairs.__getitems__([0, 1])
        assert together["source"].shape == (2, 11)
        assert together["source"][0, 4:].tolist() == [PADDING] * 7
        assert together["labels"][0].tolist() == [*pairs.targets[0].tolist(), *[-100] * 4]
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(scores_of(model, together)[:1, :5], scores_of(model, alone), **close)
        other = pairs.__getitems__([1])
        sums = [
            functional.cross_entropy(scores_of(model, batch).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            for batch in (alone, other, together)
        ]
        torch.testing.assert_close(sums[0] + sums[1], sums[2], **close)

    def test_a_position_sees_nothing_behind_it(self):
        pairs, model = random_pairs((6, 8)), small_transformer()
        batch = pairs.__getitems__([0])
        before = scores_of(model, batch)
        batch["target"][0, 5] = (batch["target"][0, 5] + 1) % 30
        after = scores_of(model, batch)
        assert torch.equal(before[:, :5], after[:, :5])
        assert not torch.isclose(before[:, 5:], after[:, 5:]).all(dim=2).any()


class Uniform(nn.Module):
    """Gives every token of a vocabulary of eight the same score, but for one it is sure of."""

    def __init__(self, sure_of=None):
        super().__init__()
        self.sure_of = sure_of

    def forward(self, *, source, attention_mask, target, decoder_attention_mask):
        scores = torch.zeros(*target.shape, 8)
        if self.sure_of is not None:
            scores[..., self.sure_of] = 50.0
        return scores


class TestTranslation:
    def quality(self, pairs, subwords=None, references=()):
        corpus = Corpus(folder="none", bleu_tokenization="13a")
        return TranslationQuality(
            pairs=pairs, references=references, subwords=subwords, corpus=corpus, device=CPU, batch_size=2
        )

    def test_perplexity_is_the_number_of_tokens_that_seem_alike(self):
        pairs = Pairs([torch.tensor([3, 2])] * 3, [torch.tensor([4, 5, 2]), torch.tensor([6, 2]), torch.tensor([2])])
        assert self.quality(pairs).perplexity(Uniform()) == pytest.approx(8.0)
        # Sure of END: 3 of the 6 tokens cost nothing, the other 3 cost 50 nats.
        assert self.quality(pairs).perplexity(Uniform(END)) == pytest.approx(math.exp(25), rel=1e-4)

    def test_the_smoothed_loss_by_hand(self):
        pairs = Pairs([torch.tensor([3, 2])] * 2, [torch.tensor([2]), torch.tensor([2, 2])])
        loss = TranslationLoss(device=CPU, label_smoothing=0.1)(Uniform(END), pairs.__getitems__([0, 1]))
        # A tenth of the weight lies on all eight tokens, seven of which cost 50 nats.
        assert float(loss) == pytest.approx(0.1 * 50 * 7 / 8, rel=1e-4)

    def test_an_overfitted_pair_is_translated_whatever_is_beside_it(self):
        subwords = Subwords.learned(SENTENCES, 300)
        pairs = Pairs(subwords.encode(SENTENCES[:2]), subwords.encode(SENTENCES[2:]))
        model = small_transformer(vocabulary=subwords.size)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        loss, batch = TranslationLoss(device=CPU, label_smoothing=0.0), pairs.__getitems__([0, 1])
        for _ in range(60):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            assert subwords.decode(translate(model, pairs.sources, CPU)) == SENTENCES[2:]
            assert subwords.decode(translate(model, pairs.sources[:1], CPU)) == SENTENCES[2:3]
            assert self.quality(pairs).perplexity(model) < 1.2

    def test_bleu(self):
        pytest.importorskip("sacrebleu")
        assert bleu(["ein Mann reitet ein Pferd"], ["ein Mann reitet ein Pferd"], "13a") == pytest.approx(100.0)
        assert bleu(["nichts davon stimmt hier"], ["ein Mann reitet ein Pferd"], "13a") < 5

    def test_subwords_give_back_any_text_and_are_learned_alike(self):
        first, second = (Subwords.learned(SENTENCES * 20, 320) for _ in range(2))
        texts = [*SENTENCES, "naïve Öl „Zitat“ 中 &quot;"]
        rows = first.encode(texts)
        assert all(row[-1] == END and not {PADDING, BEGIN} & set(row.tolist()) for row in rows)
        assert first.decode([row.tolist() for row in rows]) == texts
        assert [row.tolist() for row in second.encode(texts)] == [row.tolist() for row in rows]
        assert len(rows[0]) < len(SENTENCES[0].encode())
