"""The text workloads: batches, schedules, data that are missing, and a run of each that repeats."""

import lzma
import math

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from benchmarks.workloads import mixed
from benchmarks.workloads.text import WORKLOADS, news
from benchmarks.workloads.text.batching import LengthBatches, pad_rows
from benchmarks.workloads.text.characters import VOCABULARY, Gpt, Windows
from benchmarks.workloads.text.corpora import Question, read_pairs, read_sentiments
from benchmarks.workloads.text.pairs import make_pairs
from benchmarks.workloads.text.recipes import CHARACTERS
from benchmarks.workloads.text.sampling import hold_out, sample
from benchmarks.workloads.text.topics import split_by_paragraph
from benchmarks.workloads.workload import MissingDataError, Setting

pytestmark = pytest.mark.bench

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def kept(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(news, "KEPT", tmp_path_factory.mktemp("kept"))
        yield news.KEPT


BY_NAME = {workload.name: workload for workload in WORKLOADS}


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

    def test_padding_stands_on_the_right_and_the_mask_knows(self):
        rows, mask = pad_rows([torch.tensor([5]), torch.tensor([6, 7, 0])], 0)
        assert rows.tolist() == [[5, 0, 0], [6, 7, 0]]
        assert mask.tolist() == [[1, 0, 0], [1, 1, 1]]


def test_missing_data_are_named_with_their_place(tmp_path):
    for workload in WORKLOADS:
        with pytest.raises(MissingDataError, match=r"must have the file .*\.xz, not found at"):
            workload.build(Setting(data=tmp_path, tier="smoke", seed=0, device=CPU))


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

    def test_a_sample_is_always_the_same_and_keeps_the_order(self):
        assert sample(range(100), 10) == sample(range(100), 10) == sorted(sample(range(100), 10))
        assert sample("abc", None) == sample("abc", 9) == ["a", "b", "c"]

    @pytest.mark.parametrize(("num_train", "num_left"), [(60, 60), (80, 60), (None, 60)])
    def test_nothing_is_both_trained_on_and_judged_by(self, num_train, num_left):
        texts = [f"text {index % 90}" for index in range(100)]  # ten of them come twice
        train, judged = hold_out(texts, num_train, 20)
        assert len(judged) == 20
        assert len(train) >= num_left
        assert not set(train) & set(judged)
        assert (train, judged) == hold_out(texts, num_train, 20)

    def test_holding_out_leaves_the_training_as_it_is_where_there_is_enough(self):
        assert hold_out(range(100), 60, 20)[0] == sample(range(100), 60)
        assert hold_out(range(100), 60, 0) == (sample(range(100), 60), [])


def test_pairs_are_of_one_article_and_half_of_them_answered():
    questions = [
        Question(identifier=f"{n}", question=f"{n}?", context=f"{n // 2}", answers=("",), start=0, article=f"{n // 6}")
        for n in range(600)
    ]
    lone = Question(identifier="lone", question="lone?", context="lone", answers=("",), start=0, article="lone")
    pairs = make_pairs([*questions, lone], None)
    assert len(pairs) == 600
    articles = {question.context: question.article for question in questions}
    asked = {question.question: question for question in questions}
    for pair in pairs:
        assert articles[pair.paragraph] == asked[pair.question].article
        assert pair.is_answered == (pair.paragraph == asked[pair.question].context)
    assert 250 < sum(pair.is_answered for pair in pairs) < 350
    assert make_pairs(questions, 50) == make_pairs(questions, 50)


def test_topics_are_judged_by_paragraphs_that_are_not_trained_on():
    questions = [
        Question(identifier=f"{n}", question=f"{n}?", context=f"{n // 3}", answers=("",), start=0, article=f"{n // 60}")
        for n in range(600)
    ]
    train, judged = split_by_paragraph(questions, None)
    assert sorted(train + judged) == sorted((question.question, int(question.article)) for question in questions)
    contexts = {question.question: question.context for question in questions}
    assert not {contexts[text] for text, _ in train} & {contexts[text] for text, _ in judged}
    assert {topic for _, topic in judged} == {*range(10)} and len(judged) == 120
    fewer, _ = split_by_paragraph(questions, 4)
    assert {topic for _, topic in fewer} == {*range(4)} and len(fewer) == 192
    assert split_by_paragraph(questions, 4) == split_by_paragraph(questions, 4)


def built(name, data, seed=0):
    try:
        return BY_NAME[name].build(Setting(data=data, tier="smoke", seed=seed, device=CPU))
    except MissingDataError as error:
        pytest.skip(str(error))


def first_losses(name, data, seed):
    training = built(name, data, seed)
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


@pytest.mark.parametrize("name", ["transformer-tiny-multi30k", "gpt-characters-news", "bert-squad", "bert-sst2-lora"])
def test_a_run_of_the_smoke_tier_repeats_and_can_be_judged(name, data):
    _, losses = first_losses(name, data, seed=0)
    training, again = first_losses(name, data, seed=0)
    assert losses == again
    assert all(math.isfinite(loss) for loss in losses)
    training.model.eval()
    with torch.inference_mode():
        metrics = training.evaluate(training.model)
        judged = training.judge(training.model) if training.judge else metrics
    assert math.isfinite(metrics[BY_NAME[name].metric])
    assert judged.keys() <= metrics.keys()
    assert math.isfinite(judged[BY_NAME[name].metric])


@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_is_for_processors_that_are_fast_at_it(fast, data, monkeypatch):
    monkeypatch.setattr(mixed, "has_bfloat16", lambda kind: fast)
    training = built("gpt-characters", data)
    formats = set()
    for module in training.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, output: formats.add(output.dtype))
    training.loss(training.model, next(iter(training.loader)))
    with torch.inference_mode():
        training.evaluate(training.model.eval())
    assert formats == {torch.bfloat16 if fast else torch.float32}
    assert training.number_format == ("" if fast else "float32")


def test_a_position_sees_no_character_behind_it_and_windows_meet():
    recipe = CHARACTERS["smoke"]
    torch.manual_seed(0)
    network, text = Gpt(recipe), torch.arange(recipe.length)[None] % VOCABULARY
    changed = text.clone()
    changed[0, 20:] = 5
    with torch.no_grad():
        before, after = network(text), network(changed)
    assert torch.equal(before[:, :20], after[:, :20]) and not torch.equal(before[:, 20:], after[:, 20:])
    windows = Windows(torch.arange(100), 32)
    assert len(windows) == 3
    assert windows[1].tolist() == list(range(32, 65)), "the last is the character behind, the first of the next"


def test_a_body_is_trained_once_and_every_run_begins_with_it(data, kept):
    first, other = (built("gpt-characters-news", data, seed) for seed in (0, 1))
    bodies = [torch.load(path, weights_only=True) for path in kept.glob("gpt-*.pt")]  # one for each number format
    for run in (first, other):
        state = run.model.state_dict()
        assert any(all(torch.equal(value, body[name]) for name, value in state.items()) for body in bodies)
    begun = float(first.loss(first.model, next(iter(other.loader))).detach())
    assert begun < math.log(VOCABULARY) - 0.5, "it has learned, its head too"
