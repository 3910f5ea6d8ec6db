"""Law 3 in loops as users write them, and with disks as they are: stored activations are as good as computed ones."""

import copy
import gc
import io
import os
import pickle
import resource
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from cached import (
    BATCH,
    EPOCH,
    EPOCHS,
    FILE,
    MEMORY,
    NUM_SAMPLES,
    OFF,
    SERVING,
    WIDTH,
    Block,
    Chain,
    Training,
    Vectors,
    assert_refused,
    assert_served,
    compared,
    files_in,
    shuffled,
)
from egeria.events import CacheDecided, CacheUsed
from loops import FAST, differences
from scripted import ScriptedController

each_store = pytest.mark.parametrize("cache", [MEMORY, FILE], ids=["memory", "file"])


# Models


@each_store
@pytest.mark.parametrize("depth", [1, 4])
def test_rows_are_served_and_training_is_the_same(cache, depth, tmp_path):
    trained = compared(tmp_path, cache, depth=depth)
    assert_served(trained, 5 * NUM_SAMPLES)
    (used,) = trained.journal(CacheUsed)
    (decided,) = trained.journal(CacheDecided)
    assert decided.mode == "stored" and decided.boundary == used.boundary == f"blocks.{depth - 1}"
    assert used.checks >= 5 and used.largest_error == 0 and used.damaged == 0
    assert used.repeats >= used.hits and used.size_bytes >= NUM_SAMPLES * WIDTH * 4


def test_boundaries_that_move_begin_anew_and_a_thaw_ends_it(tmp_path):
    trained = compared(tmp_path, FILE, plan="0.05:1 0.4:3 0.8:0")
    assert [event.boundary for event in trained.journal(CacheUsed)] == ["blocks.0", "blocks.2"]
    assert all(event.hits > 50 for event in trained.journal(CacheUsed))


# When it is on


def test_it_is_off_where_nobody_asked_or_nothing_is_to_be_saved(tmp_path):
    assert Training(tmp_path / "paper", MEMORY, plan=None, policy="egeria").finish().journal(CacheDecided) == []
    for cache, count in ((MEMORY, 0), (FILE, 1)):
        short = Training(tmp_path / f"short{count}", {**cache, "gate": "auto"}, plan="0.95:2").finish()
        assert short.hits == 0 and "within 0.4 epochs" in short.reasons[0] and short.warnings == []
    assert Training(tmp_path / "off", OFF).finish().journal(CacheDecided) == []


def test_under_a_rule_it_works_where_it_is_asked_for(tmp_path):
    attach = {"plan": None, "policy": "egeria", "controller": ScriptedController()}
    trained = compared(tmp_path, FILE, more=FAST, **attach)
    assert trained.hits > 100


def work(seconds):
    """Keep this thread busy: sleeping costs no CPU time."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


class Slow(Block):
    """Takes 10 ms more."""

    def forward(self, x):
        work(0.01)
        return super().forward(x)


def slow_chain():
    model = Chain()
    model.blocks[0] = Slow()
    return model


@pytest.mark.parametrize("is_slower", [False, True])
def test_it_ends_where_iterations_do_not_become_shorter(is_slower, tmp_path):
    def call(model, inputs):
        before = model.blocks[0].num_calls
        output = model(inputs)
        if is_slower and model.blocks[0].num_calls == before:
            work(0.03)
        return output

    trained = compared(tmp_path, {"enabled": "auto"}, build=slow_chain, call=call, dataset=Vectors(2 * NUM_SAMPLES))
    if is_slower:
        assert "an iteration with stored activations takes" in trained.reasons[0]
    else:
        assert_served(trained)
    assert trained.warnings == []


def test_inputs_that_are_augmented_at_random_end_it(tmp_path):
    def loop(training):
        training.dataset.transform = lambda row: row + torch.rand(1)
        training.finish()

    quiet = compared(tmp_path / "memory", MEMORY, loop)
    assert quiet.hits == 0 and "inputs do not come again: of the last 336" in quiet.reasons[0] and not quiet.warnings
    assert_refused(compared(tmp_path / "file", FILE, loop), "inputs do not come again")


def test_inputs_that_change_later_are_computed(tmp_path):
    def loop(training):
        training.advance_to(SERVING)
        training.dataset.rows = training.dataset.rows.clone()
        training.dataset.rows[::4] += 1
        training.finish()

    assert_served(compared(tmp_path, FILE, loop))


# Loops


def test_gradients_that_are_accumulated_and_a_validation_in_between(tmp_path):
    def loop(training):
        with training.noting():
            for _ in range(EPOCHS):
                training.model.train()
                for number, (inputs, labels) in enumerate(training.loader):
                    loss = cross_entropy(training.model(inputs), labels)
                    loss.backward()
                    if number % 2:
                        training.advance_optimizer(loss)
                training.model.eval()
                with torch.no_grad():
                    training.losses.append(training.model(training.dataset.rows).sum().item())

    assert_served(compared(tmp_path, MEMORY, loop, plan="0.02:2"))


@pytest.mark.parametrize("calls", ["forward", "twice", "cut"])
def test_ways_to_call_the_model(calls, tmp_path):
    def call(model, inputs):
        if calls == "forward":
            return model.forward(inputs)
        if calls == "twice":
            return model(inputs) + model(-inputs)
        return torch.cat([model(inputs[:4]), model(inputs[4:])])

    assert_served(compared(tmp_path, MEMORY, call=call))


def test_epochs_that_end_with_very_few_rows(tmp_path):
    def loader(dataset):
        return DataLoader(dataset, batch_size=BATCH)

    assert_served(compared(tmp_path, MEMORY, dataset=Vectors(40 + 2), loader=loader), 150)


class Checkpointed(Chain):
    is_reentrant = False

    def forward(self, x):
        x = x.clone().requires_grad_() if self.is_reentrant else x
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.head(self.dropout(x))


class Reentrant(Checkpointed):
    is_reentrant = True


def test_checkpointed_layers_are_served(tmp_path):
    assert_served(compared(tmp_path / "new", MEMORY, build=Checkpointed))
    old = compared(tmp_path / "old", FILE, build=Reentrant)
    assert old.hits == 0 and "reentrant checkpoint" in old.complaints[0], "nothing is frozen there"


def test_a_run_that_is_resumed_fills_its_store_anew(tmp_path):
    def train(name, steps, state=None):
        training = Training(tmp_path / name, FILE)
        if state is not None:
            for part in ("model", "optimizer", "run"):
                getattr(training, part).load_state_dict(state[part])
            training.losses = [0.0] * SERVING
            training.batches = training.batches_from(SERVING // EPOCH)
            torch.set_rng_state(state["random"])
        training.advance_to(steps)
        state = {part: copy.deepcopy(getattr(training, part).state_dict()) for part in ("model", "optimizer", "run")}
        state["random"] = torch.get_rng_state()
        return training.close(), state

    _, state = train("stopped", SERVING)
    resumed, _ = train("resumed", EPOCHS * EPOCH, state)
    whole, _ = train("whole", EPOCHS * EPOCH)
    resumed.losses[:SERVING] = whole.losses[:SERVING]
    assert resumed.hits > 200 and differences(whole.everything(), resumed.everything()) == []


# Sentences


class Sentences(Vectors):
    """Sentences of several lengths."""

    def __init__(self):
        super().__init__()
        self.rows = [row[:length] for row, length in zip(self._words(), self._lengths(), strict=True)]

    def _words(self):
        return torch.randint(1, 50, (NUM_SAMPLES, 24), generator=torch.Generator().manual_seed(2))

    def _lengths(self):
        return torch.randint(3, 24, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(3)).tolist()


def padded(samples):
    words = nn.utils.rnn.pad_sequence([row for row, _ in samples], batch_first=True)
    mask = (torch.arange(words.shape[1]) < torch.tensor([len(row) for row, _ in samples])[:, None]).long()
    return {"input_ids": words, "attention_mask": mask}, torch.stack([label for _, label in samples])


def bert(kind):
    transformers = pytest.importorskip("transformers")
    tiny = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    return getattr(transformers, kind)(transformers.BertConfig(vocab_size=50, num_labels=4, **tiny))


def assert_equal_but_for_rounding(directory, kind, call, cache=MEMORY, depth=2):
    """Train on sentences without the cache and with it; return the latter."""
    changes = {
        "build": partial(bert, f"BertFor{kind}Classification"),
        "dataset": Sentences(),
        "loader": partial(shuffled, collate_fn=padded),
        "call": call,
        "depth": depth,
    }
    computed, cached = (
        Training(directory / name, settings, **changes).finish() for name, settings in (("off", OFF), ("on", cache))
    )
    assert torch.tensor(computed.losses).allclose(torch.tensor(cached.losses), rtol=1e-4)
    return cached


@each_store
def test_sentences_are_found_again_whatever_they_are_padded_to(cache, tmp_path):
    trained = assert_equal_but_for_rounding(
        tmp_path, "Sequence", lambda model, inputs: model(**inputs).logits, cache, depth=3
    )
    assert_served(trained, 5 * NUM_SAMPLES)


def test_what_a_model_gives_at_padding_does_not_count_where_the_loss_leaves_it_out(tmp_path):
    def mean_of_words(model, inputs):
        mask = inputs["attention_mask"][..., None]
        return (model(**inputs).logits * mask).sum(1) / mask.sum(1)

    assert_served(assert_equal_but_for_rounding(tmp_path, "Token", mean_of_words), 5 * NUM_SAMPLES)


def test_where_padding_shows_in_the_loss_it_counts(tmp_path):
    trained = assert_equal_but_for_rounding(tmp_path, "Token", lambda model, inputs: model(**inputs).logits.mean(1))
    assert 0 < trained.hits < 5 * NUM_SAMPLES and trained.reasons == []


# The model while it is served


def test_copies_and_saved_models_compute_by_themselves(tmp_path):
    training = Training(tmp_path, MEMORY)
    training.advance_to(SERVING)
    file = io.BytesIO()
    torch.save(training.model, file)
    file.seek(0)
    twins = [copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))]
    for twin in [*twins, torch.load(file, weights_only=False)]:
        calls = twin.blocks[0].num_calls
        with torch.no_grad():
            twin.head.weight.zero_()
        batch = next(iter(DataLoader(training.dataset, batch_size=BATCH)))[0]
        assert torch.equal(twin.train()(batch), twin.head.bias.expand(BATCH, 4))
        assert twin.blocks[0].num_calls == calls + 1
    training.finish()
    assert_served(training)


def test_a_forward_that_the_user_gave_the_model_comes_back(tmp_path):
    def build():
        model = Chain()
        model.forward = partial(_doubled, model)
        return model

    training = Training(tmp_path, MEMORY, build=build)
    own = training.model.forward
    training.advance_to(SERVING)
    assert training.model.forward is not own
    assert copy.deepcopy(training.model).forward.func is _doubled
    training.run.close()
    assert training.hits > 50 and training.model.forward is own


def _doubled(model, x):
    return 2 * Chain.forward(model, x)


@pytest.mark.parametrize(("kind", "step"), [(ValueError, 3), (KeyboardInterrupt, SERVING)])
def test_a_pass_that_is_interrupted_or_fails_leaves_nothing(kind, step, tmp_path):
    def loop(training):
        training.advance_to(step)
        fuse = training.model.head.register_forward_pre_hook(partial(_fail, kind("of the user")))
        state = torch.get_rng_state()
        with pytest.raises(kind, match="of the user"):
            training.advance_to(step + 1)
        fuse.remove()
        assert [name for name, m in training.model.named_modules() if name and "forward" in vars(m)] == []
        torch.set_rng_state(state)
        training.advance_to(EPOCHS * EPOCH - 1)

    assert_served(compared(tmp_path, MEMORY, loop))


def _fail(error, *_):
    raise error


def test_a_run_that_is_dropped_or_closed_in_a_pass_frees_everything(tmp_path):
    def drop(training):
        training.advance_to(SERVING)
        training.run = None
        gc.collect()
        assert "forward" not in vars(training.model) and training.loader_now == training.loader_before
        training.advance_to(EPOCHS * EPOCH)

    assert compared(tmp_path / "dropped", FILE, drop).hits > 50

    def close(training):
        training.advance_to(SERVING)
        hook = training.model.head.register_forward_pre_hook(lambda *_: training.run.close())
        training.advance_to(SERVING + 1)
        hook.remove()

    for cache in (MEMORY, FILE):
        assert compared(tmp_path / f"closed{cache['enabled']}", cache, close).hits > 50


# Disks that are full, files that are damaged

FILLING = EPOCH + 5
"""Steps after which some samples came from the store, and others are still to be written."""


def at(step, harm):
    """Return a loop in which the file of the store is harmed after a step."""

    def loop(training):
        training.advance_to(step)
        for path in training.files:
            harm(path)
        training.finish()

    return loop


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, 100)


@pytest.mark.parametrize("harm", [flip_a_bit, truncate])
def test_damaged_rows_are_computed_and_stored_again(harm, tmp_path):
    trained = compared(tmp_path, FILE, at(SERVING, harm))
    (used,) = trained.journal(CacheUsed)
    assert used.damaged == (1 if harm is flip_a_bit else used.damaged) > 0 and used.hits > 250
    assert len(trained.warnings) == 1 and "stored rows that are damaged" in trained.warnings[0]
    assert trained.complaints == ["they are computed again"]


@pytest.mark.parametrize("limit", [0, 2**13])
def test_a_full_disk_costs_the_rows_that_do_not_fit(limit, tmp_path):
    """Files may be no larger, which is what a quota looks like."""
    before, events = resource.getrlimit(resource.RLIMIT_FSIZE), []

    def loop(training):
        training.run.on_event(events.append)  # the journal cannot be written either
        training.advance_to(FILLING if limit else 3)
        size = max((path.stat().st_size for path in training.files), default=0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100 if limit else 64, before[1]))
        try:
            training.advance_to(SERVING)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        training.finish()

    trained = compared(tmp_path, FILE, loop)
    (warning,) = (message for message in trained.warnings if "The journal" not in message)
    assert "File too large" in warning
    (used,) = (event for event in events if isinstance(event, CacheUsed))
    assert (used.hits > 0) == bool(limit)


def test_a_limit_holds_and_says_nothing_unless_nothing_fits(tmp_path):
    small = compared(tmp_path / "small", {**FILE, "limit_bytes": 2000, "verify_batches": 5})
    assert_refused(small, "what may be used holds too few samples")
    (used,) = small.journal(CacheUsed)
    assert 0 < used.size_bytes <= 2000
    assert_refused(compared(tmp_path / "none", {**FILE, "limit_bytes": 10}), "not one batch fits")
    quiet = compared(tmp_path / "memory", {**MEMORY, "memory_share": 1e-12})
    assert "not one batch fits" in quiet.reasons[0] and quiet.warnings == []


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    trained = compared(tmp_path, {**FILE, "directory": str(tmp_path / "file" / "below")})
    assert_refused(trained, "Not a directory")


def test_the_file_is_in_the_directory_that_was_named_and_has_no_name(tmp_path):
    training = Training(tmp_path / "run", {**MEMORY, "directory": str(tmp_path / "fast")})
    training.advance_to(SERVING)
    (path,) = files_in(tmp_path / "fast")
    assert path.stat().st_size > 0 and path.stat().st_nlink == 0 and training.files == []
    assert [*(tmp_path / "fast").iterdir()] == []
    assert_served(training.finish())
    assert files_in(tmp_path / "fast") == []
