"""What users, data sets and other runs do under the activation cache: training comes out as without it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from cached import (
    EPOCH,
    FILLING,
    NUM_SAMPLES,
    SERVING,
    Pictures,
    Training,
    assert_equal,
    assert_no_stubs,
    assert_turned_off,
    nothing_but_journals,
    plain,
    small_resnet,
)
from egeria.events import CacheUsed

TESTS = Path(__file__).parent


def both(tmp_path, **changes):
    """Yield the same training with the cache and without."""
    for cached in (True, False):
        yield Training(tmp_path / ("cached" if cached else "plain"), cached=cached, **changes)


# The data


def replace(pictures):
    pictures.images = pictures.images.flip(0)


def disturb_a_few(pictures):
    pictures.images = pictures.images.clone()
    pictures.images[::10] += 1


def normalise(pictures):
    pictures.transform = lambda image: image / 2


@pytest.mark.parametrize("change", [replace, normalise])
def test_the_inputs_change(tmp_path, change):
    with nothing_but_journals(tmp_path):
        first, second = both(tmp_path)
        for training in (first, second):
            training.advance_to(SERVING)
            change(training.dataset)
            training.finish()
        assert_equal(first, second)
    assert_turned_off(first, "other inputs")


def test_the_inputs_of_a_few_samples_change(tmp_path):
    with nothing_but_journals(tmp_path):
        first, second = both(tmp_path)
        for training in (first, second):
            training.advance_to(SERVING)
            disturb_a_few(training.dataset)
            training.finish()
        assert_equal(first, second)
    assert first.warnings == []
    used = first.journal(CacheUsed)[-1]
    assert 0 < used.mismatches <= 2 * NUM_SAMPLES // 10
    assert used.hits > 3 * NUM_SAMPLES


# The weights


def copied(model, optimizer):
    model.load_state_dict({name: 1.5 * tensor for name, tensor in model.state_dict().items()})


def assigned(model, optimizer):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["conv1.weight"] *= 1.5
    kept = {name: parameter for name, parameter in model.named_parameters() if name != "conv1.weight"}
    model.load_state_dict({**state, **kept}, assign=True)


def pointed_elsewhere(model, optimizer):
    model.conv1.weight.data = 1.5 * model.conv1.weight.data


def of_the_statistics(model, optimizer):
    model.bn1.running_mean.add_(1)


@pytest.mark.parametrize("change", [copied, assigned, pointed_elsewhere, of_the_statistics])
def test_the_weights_of_the_frozen_part_are_changed(tmp_path, change):
    with nothing_but_journals(tmp_path):
        first, second = both(tmp_path)
        for training in (first, second):
            training.advance_to(SERVING)
            change(training.model, training.optimizer)
            training.finish()
        assert_equal(first, second)
    assert_turned_off(first, "the weights of the frozen layers were changed")


# The user's own forward


class Fuse:
    """Fails in the last layer, behind normalisation that has already moved its statistics."""

    def __init__(self):
        self.error = None
        self.num_calls = 0

    def __call__(self, *call):
        self.num_calls += 1
        if self.error is not None:
            raise self.error


def with_fuse(fuse):
    model = small_resnet()
    model.linear.register_forward_pre_hook(fuse)
    return model


def failing_at(tmp_path, step, error):
    """Yield the same training with the cache and without; both failed once, at a step."""
    for cached in (True, False):
        fuse = Fuse()
        training = Training(tmp_path / str(cached), cached=cached, build=partial(with_fuse, fuse))
        training.advance_to(step)
        fuse.error = error
        with pytest.raises(type(error), match="in the middle"):
            training.advance(1)
        fuse.error = None
        assert_no_stubs(training.model)
        yield training


@pytest.mark.parametrize("step", [FILLING, SERVING])
@pytest.mark.parametrize("error", [ValueError("in the middle"), KeyboardInterrupt("in the middle")])
def test_the_forward_of_the_user_fails(tmp_path, step, error):
    with nothing_but_journals(tmp_path):
        first, second = failing_at(tmp_path, step, error)
        hits = first.generation.use.hits
        for training in (first, second):
            training.finish()
        assert_equal(first, second)
    assert first.warnings == [] and first.complaints == []
    assert first.num_hits > hits, "what the user does wrong is no reason to give up"


def test_a_forward_that_fails_with_stubs_alone(tmp_path):
    """The failure of the stubbed pass leaves no trace, and the user never hears of it but by a warning."""
    with nothing_but_journals(tmp_path):
        fuse = Fuse()
        training = Training(tmp_path / "run", build=partial(with_fuse, fuse))
        training.advance_to(SERVING)
        fuse.error = OneTime(fuse)
        num_calls = fuse.num_calls
        training.advance(1)
        assert fuse.num_calls == num_calls + 2
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "failed with stubs")


class OneTime(RuntimeError):
    """Raised once: on being made into a message it takes itself out."""

    def __init__(self, fuse):
        super().__init__("failed with stubs")
        self._fuse = fuse

    def with_traceback(self, trace):
        self._fuse.error = None
        return super().with_traceback(trace)


# The end of a run


def test_close_in_the_middle_of_an_epoch(tmp_path):
    with nothing_but_journals(tmp_path):
        first, second = both(tmp_path)
        for training in (first, second):
            training.advance_to(SERVING)
            training.close()
            left = sorted(entry.name for entry in training.directory.rglob("*") if entry.is_file())
            assert left == ["journal.jsonl"]
            training.finish()
        assert_equal(first, second)
    assert first.warnings == []


def test_a_run_that_is_dropped(tmp_path):
    with nothing_but_journals(tmp_path):
        first, second = both(tmp_path)
        for training in (first, second):
            training.advance_to(SERVING)
            training.run = None
            gc.collect()
            assert vars(training.loader) == training.loader_before
            assert all(parameter.requires_grad for parameter in training.model.parameters())
            training.advance(10 * EPOCH)
        assert_equal(first, second)


# Other runs


def test_two_runs_in_one_directory(tmp_path):
    place = {"directory": str(tmp_path / "shared")}
    with nothing_but_journals(tmp_path):
        other = Pictures()
        other.images = other.images.flip(1)
        runs = [
            Training(tmp_path / "first", settings=place),
            Training(tmp_path / "second", settings=place, depth=2, dataset=other),
        ]
        for _ in range(EPOCH):
            for training in runs:
                training.advance(7)
        for training in runs:
            training.finish()
            assert training.warnings == []
            assert training.num_hits > 2 * NUM_SAMPLES
        assert_equal(runs[0], plain(tmp_path / "0"))
        assert_equal(runs[1], plain(tmp_path / "1", depth=2, dataset=other))


KILLED = """
import os
import sys
import time
from pathlib import Path
from cached import FILLING, Training

training = Training(Path(sys.argv[1]), settings={"directory": sys.argv[2]})
training.advance_to(FILLING)
write = os.pwritev

def slowly(descriptor, blocks, offset):
    write(descriptor, [blocks[0][: len(blocks[0]) // 2]], offset)
    print("writing", flush=True)
    time.sleep(60)

os.pwritev = slowly
training.finish()
"""


def test_a_run_killed_while_it_writes_leaves_nothing(tmp_path):
    shared = tmp_path / "shared"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), str(shared)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "writing\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert shared.is_dir() and list(shared.iterdir()) == []


def doubled(self, images):
    return 2 * type(self).forward(self, images)


def test_copies_keep_a_forward_that_the_user_gave_the_model(tmp_path):
    def build():
        model = small_resnet()
        model.forward = partial(doubled, model)
        return model

    training = Training(tmp_path, build=build)
    training.advance_to(SERVING)
    images = torch.randn(4, *training.dataset[0][0].shape)
    training.model.eval()
    for twin in (copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))):
        assert twin.forward.args == (twin,) and torch.equal(twin(images), training.model(images))
    training.run.close()


def test_copies_made_while_the_cache_skips_compute_everything_themselves(tmp_path):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path)
        training.advance_to(SERVING)
        assert "forward" in vars(training.model)
        copied = copy.deepcopy(training.model)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        images = torch.randn(4, *training.dataset[0][0].shape)
        assert not copied.train()(images).any(), "it runs with its own weights"
        training.finish()
