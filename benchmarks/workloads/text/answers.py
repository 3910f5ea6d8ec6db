"""Scoring answers as SQuAD 1.1 does: exact match and F1 of the words, the best over what people answered."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and needless white space."""
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(answer: str, truth: str) -> float:
    """Return 1 where both are the same once normalised, else 0."""
    return float(normalized(answer) == normalized(truth))


def f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall of the words, 0 to 1."""
    found, expected = normalized(answer).split(), normalized(truth).split()
    num_common = sum((Counter(found) & Counter(expected)).values())
    return 2 * num_common / (len(found) + len(expected)) if num_common else 0.0


def score(answers: Mapping[str, str], truths: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return the means over all questions in per cent, 'f1' and 'exact_match'.

    Args:
        answers: by the question's identifier; a question without one counts as wrong.
        truths: what people answered, by the question's identifier.
    """

    def mean(measure: Callable[[str, str], float]) -> float:
        best = [max(measure(answers.get(key, ""), truth) for truth in given) for key, given in truths.items()]
        return 100.0 * sum(best) / len(best)

    return {"f1": mean(f1), "exact_match": mean(exact_match)}
