"""Laws 2 and 8: what the paper's rule decides, whoever reads the plasticity for it."""

import time

import pytest

from laws.models import each_model_in_time, each_that_freezes
from laws.support import Training, decisions, differences, paper, readings
from scripted import ScriptedController

pytestmark = pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")  # a law holds whatever is warned of
NUM_INTERVALS, INTERVAL, NUM_REAL = 18, 24, 2
"""Steps of an interval, and how many of them, at its end, train; the others leave time to a process."""
RATES = {8: 0.01, 30: 0.1}
"""By step that trains."""
LONGEST_PAUSE_S = 10.0


def train(name, controller, directory, expected=None):
    """Train `NUM_REAL` steps in each interval, then make steps without gradients while readings are expected.

    A process gives its readings later than a controller in this process does, never later than the next step that
    changes anything: all that is decided is decided on the same weights. The very first step trains too.
    """
    options = {**paper(INTERVAL), "controller": controller, "rates": RATES, "total_steps": NUM_INTERVALS * INTERVAL}
    training = Training(name, directory=directory, **options)
    found = []
    for interval in range(NUM_INTERVALS):
        if not interval:
            training.train(1)
        is_late = expected is not None
        for idle in range(INTERVAL - NUM_REAL - (not interval)):
            is_late = is_late and len(readings(directory)) < expected[interval]
            if is_late:
                time.sleep(min(LONGEST_PAUSE_S, 0.02 * 1.35**idle))
            training.idle()
        found.append(len(readings(directory)))
        assert not expected or found[-1] >= expected[interval], "the process gave no reading in time"
        training.train(NUM_REAL)
    training.close()
    return training, found


@each_model_in_time
@pytest.mark.dist
@pytest.mark.timeout(400)
def test_law_2_inline_and_process_decide_alike(name, tmp_path):
    inline, num_read = train(name, "inline", tmp_path / "inline")
    process, _ = train(name, "process", tmp_path / "process", num_read)
    assert differences(inline.everything(), process.everything()) == []
    decided, read = {}, {}
    for kind in ("inline", "process"):  # but for what came of the very last interval, which the process had no time for
        moves = [(step // INTERVAL, depth) for step, depth in decisions(tmp_path / kind)]
        decided[kind] = [move for move in moves if move[0] < NUM_INTERVALS]
        read[kind] = readings(tmp_path / kind)[: num_read[-1]]
    assert decided["process"] == decided["inline"]
    assert [module for _, module, _ in read["process"]] == [module for _, module, _ in read["inline"]]
    values = [pytest.approx(value, rel=1e-5, abs=1e-12) for *_, value in read["inline"]]
    assert [value for *_, value in read["process"]] == values
    if not inline.spec.is_refused:
        assert len(values) > 8 and any(depth for _, depth in decided["inline"]), "nothing was read, or froze"
        assert any(step % INTERVAL for step, *_ in read["process"]), "all came at once, as no process gives readings"


# Law 8: algorithm 1 by hand. W = 3, T = 20 % of the largest of the first three slopes of a layer module, a reading at
# the end of each interval of two steps from the third on: the loss does not change, so that the critical period is
# over after the second. The least-squares slope through three equally spaced values is (third - first) / 2.
#
# Layer module 0:                                    Layer module 1, with a history of its own:
#  i  reading  mean of 3  slope          stationary   i  reading  mean of 3  slope            stationary
#  1    9        9        -                  0        1    4        4        -                    0
#  2    7        8        -                  0        2    2        3        -                    0
#  3    5        7        (7-9)/2 = -1       0        3    0        2        (2-4)/2 = -1         0
#  4    3        5        (5-8)/2 = -1.5     0        4    1        1        (1-3)/2 = -1         0
#  5    1        3        (3-7)/2 = -2       0        5    2        1        (1-2)/2 = -0.5       0
#         T = 0.2 * 2 = 0.4                                  T = 0.2 * 1 = 0.2
#  6    2        2        (2-5)/2 = -1.5     0        6    0        1        (1-1)/2 = 0          1
#  7    1.8      1.6      (1.6-3)/2 = -0.7   0        7    4        2        (2-1)/2 = 0.5        0, all over again
#  8    2.2      2        (2-2)/2 = 0        1        8    2        2        (2-1)/2 = 0.5        0
#  9    2        2        (2-1.6)/2 = 0.2    2        9    0        2        (2-2)/2 = 0          1
# 10    2.1      2.1      (2.1-2)/2 = 0.05   3       10    4        2        0                    2
#         frozen                                     11    2        2        0                    3, frozen
#
# The learning rate falls to a tenth: everything thaws at the end of that interval, and W is half of 3, but at least 2.
# The slope through two values is their difference; each T stays what it was.
#  1    3        3        -                  0        1    1        1        -                    0
#  2    5        4        1                  0        2    1        1        0                    1
#  3    4        4.5      0.5                0        3    1        1        0                    2, frozen
#  4    5        4.5      0                  1
#  5    4.5      4.75     0.25               2, frozen (by a T of the slopes since the thaw, 0.2, it would not be)
SCRIPT = {0: [9, 7, 5, 3, 1, 2, 1.8, 2.2, 2, 2.1, 3, 5, 4, 5, 4.5], 1: [4, 2, 0, 1, 2, 0, 4, 2, 0, 4, 2, *(1, 1, 1)]}
FALLS_AT = 51


@each_that_freezes
def test_law_8_algorithm_1_by_hand(name, tmp_path):
    given = {0: 0, 1: 0, 2: 0}

    def read(evaluation, module):
        given[module] += 1
        return SCRIPT[module][given[module] - 1] if module < 2 else 2.0**evaluation  # which is never stationary

    options = {**paper(), "controller": ScriptedController(read)}
    training = Training(name, directory=tmp_path, total_steps=80, rates={FALLS_AT: 0.1}, **options)
    moves, before = [], 0
    for step in range(1, 81):
        training.train(1)
        if training.run.frozen != before:
            before = training.run.frozen
            moves.append((step, before, given[0], given[1]))
    training.close()
    after_thaw = [(depth, first, second) for _, depth, first, second in moves[3:]]
    assert moves[:2] == [(2 * (2 + 10), 1, 10, 0), (2 * (2 + 10 + 11), 2, 10, 11)]
    assert moves[2][:2] == (FALLS_AT + 1, 0)
    assert after_thaw == [(1, 10 + 5, 11), (2, 10 + 5, 11 + 3)]
    assert decisions(tmp_path) == [(step, depth) for step, depth, _, _ in moves]
