"""What cannot be skipped, and says why; and what is noticed while rows are served."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cached import (
    EPOCH,
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
)
from egeria.events import CacheUsed
from loops import differences

transformers = pytest.importorskip("transformers", reason="transformers is in the dev extra")


# Models


class Between(Chain):
    """Does something between its first and its second block."""

    def __init__(self, between):
        super().__init__()
        self.between = between

    def forward(self, x):
        x = self.between(self, self.blocks[0](x))
        return self.head(self.blocks[3](self.blocks[2](self.blocks[1](x))))


def noised(model, x):
    return x + 0.1 * torch.randn_like(x)


def centred(model, x):
    return x - x.mean()


class Reaching(Chain):
    """Reads its second block far behind, as U-Net does."""

    def forward(self, x):
        second = self.blocks[1](self.blocks[0](x))
        return self.head(self.blocks[3](self.blocks[2](second)) + second)


class Telling(Chain):
    """Its second block leaves a note that the model reads."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = Noting()

    def forward(self, x):
        return super().forward(x) + self.blocks[1].note


class TellingTheLoop(Telling):
    """Its second block leaves a note that the model does not read itself."""

    def forward(self, x):
        return Chain.forward(self, x)


class Noting(Block):
    def forward(self, x):
        y = super().forward(x)
        self.note = y.detach().mean()
        return y


class Parcel:
    def __init__(self, content):
        self.content = content


class Packing(Chain):
    """Its second block gives an object of its own."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = Packer()

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](x)).content
        return self.head(self.blocks[3](self.blocks[2](x)))


class Packer(Block):
    def forward(self, x):
        return Parcel(super().forward(x))


class Branching(Chain):
    """Leaves out its first block for some batches."""

    def forward(self, x):
        x = self.blocks[0](x) if x[0, 0] < 1.2 else x
        return self.head(self.blocks[3](self.blocks[2](self.blocks[1](x))))


def hooked():
    model = Chain()
    model.blocks[0].inner.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (partial(Between, noised), "is random"),
        (partial(Between, centred), "depends on the other samples"),
        (Reaching, "the rest of the model reads more of them than that"),
        (Telling, "the rest of the model reads more of them than that"),
        (TellingTheLoop, "attribute blocks.1.note differs"),
        (Packing, "an object of its own"),
        (Branching, "blocks.0 was called 0 times"),
        (hooked, "forward hook on a frozen layer"),
    ],
)
def test_what_cannot_be_skipped_is_declined_with_the_reason(build, reason, tmp_path):
    trained = compared(tmp_path, FILE, build=build, depth=3 if build is Reaching else 2)
    assert_refused(trained, reason)
    assert (trained.hits > 0) == (build is Branching)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda model, x: checkpoint(model, x, use_reentrant=False), "within a checkpoint"),
        (lambda model, x: model(x + torch.zeros(WIDTH, requires_grad=True)), "an input of the model needs a gradient"),
        (lambda model, x: model(x, np.ones(3)), "args.1 (ndarray) cannot be read"),
    ],
)
def test_calls_that_cannot_be_served_are_declined_with_the_reason(call, reason, tmp_path):
    class Given(Chain):
        def forward(self, x, thing=None):
            return super().forward(x)

    assert_refused(compared(tmp_path, FILE, call=call, build=Given), reason)


# Models of others

TINY = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}


class Words(Vectors):
    def __init__(self):
        super().__init__()
        self.rows = torch.randint(1, 50, (NUM_SAMPLES, 7), generator=torch.Generator().manual_seed(2))


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=4, n_head=2, num_labels=4, pad_token_id=0, **options
    )
    return transformers.GPT2ForSequenceClassification(config)


def mpnet():
    return transformers.MPNetForSequenceClassification(transformers.MPNetConfig(vocab_size=52, num_labels=4, **TINY))


def t5():
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_decoder_layers=2, num_heads=2
    )
    config.dropout_rate, config.decoder_start_token_id, config.use_cache = 0.0, 0, False
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("build", "reason"),
    [(partial(gpt2, use_cache=False), ""), (gpt2, "use_cache=False"), (mpnet, ""), (t5, "untie it")],
    ids=["gpt2", "gpt2 with its cache", "mpnet", "t5"],
)
def test_transformers(build, reason, tmp_path):
    def call(model, x):
        return model(x).logits if build is not t5 else model(x, decoder_input_ids=x).logits[:, 0, :4]

    trained = compared(tmp_path, FILE, build=build, dataset=Words(), call=call, depth=3)
    if reason:
        assert_refused(trained, reason)
    else:
        assert_served(trained)


# Changes while rows are served


def write_in_place(model, by=1.5):
    with torch.no_grad():
        model.blocks[0].inner.weight.mul_(by)


def load(model):
    model.load_state_dict({name: 1.5 * tensor for name, tensor in model.state_dict().items()})


def train_again(model):
    model.blocks[0].requires_grad_(True)


def pre_hook(model):
    model.blocks[0].register_forward_pre_hook(lambda module, args: (1.5 * args[0],))


def through_data(model):
    model.blocks[0].inner.weight.data.mul_(1.5)


def replace(model):
    model.blocks[0].inner.weight = nn.Parameter(1.5 * model.blocks[0].inner.weight.data, requires_grad=False)


def buffer(model):
    model.blocks[0].norm.running_mean.add_(1)


def attribute(model):
    model.blocks[0].scale = 1.5


write_a_little = partial(write_in_place, by=1 + 1e-6)  # less than rounding, as the cache counts it
AT_ONCE = (write_in_place, write_a_little, load, train_again, pre_hook, replace)
LATER = (through_data, buffer, attribute)


@pytest.mark.parametrize("change", [*AT_ONCE, *LATER])
def test_changes_of_the_front_are_noticed_at_once_or_within_an_epoch(change, tmp_path):
    trained = []
    for name, settings in (("computed", OFF), ("cached", FILE)):
        training = Training(tmp_path / name, settings, call=lambda model, x: (model(x), model(x))[1])
        training.advance_to(SERVING + 3)
        before = training.model.blocks[1].num_calls
        change(training.model)
        training.advance_to(SERVING + 3 + EPOCH)
        ran = training.model.blocks[1].num_calls - before
        trained.append(training.finish())
    cached = trained[1]
    assert cached.hits > 80 and len(cached.reasons) <= 1
    assert len(cached.reasons) == 1 or "moved" in str(cached.complaints) or "changed" in str(cached.complaints)
    if change in AT_ONCE:
        assert differences(*[training.everything() for training in trained]) == [], cached.reasons
    else:
        assert ran > 0, "within an epoch it is computed again"
        assert len(cached.warnings) >= 1


def test_a_pass_with_other_weights_is_computed(tmp_path):
    def call(model, x):
        if not model.reads:
            return model(x)
        weights = {name: 1.5 * weight for name, weight in model.named_parameters()}
        return torch.func.functional_call(model, weights, (x,))

    def loop(training):
        training.model.reads = False
        for training.model.reads in (False, True, False):
            training.advance_to(len(training.losses) + SERVING)

    assert_served(compared(tmp_path, FILE, loop, call=call), 50)


class Changing(Chain):
    """From some step on it reads its first block far behind, or gives a NaN beside its scores."""

    reads = gives_nan = False

    def forward(self, x):
        first = self.blocks[0](x)
        output = self.blocks[3](self.blocks[2](self.blocks[1](first)))
        scores = self.head(output + first if self.reads else output)
        return scores, (output[:0] if self.gives_nan else output).mean()


@pytest.mark.parametrize("change", ["reads", "gives_nan"])
def test_more_that_is_read_of_the_front_later_is_noticed_at_once_and_a_nan_of_the_users_is_none(change, tmp_path):
    def loop(training):
        training.advance_to(SERVING)
        setattr(training.model, change, True)
        training.finish()

    trained = compared(tmp_path, FILE, loop, build=Changing, call=lambda model, x: model(x)[0])
    if change == "reads":
        assert_refused(trained, "has NaN in it")
    else:
        assert_served(trained)


def test_a_fault_of_ours_costs_the_saving_alone(tmp_path, monkeypatch):
    def fail(*_):
        raise IndexError("a bug")

    def loop(training):
        with monkeypatch.context() as patch:
            training.advance_to(SERVING)
            patch.setattr("egeria.cache.generation.row_keys", fail)
            training.finish()

    trained = compared(tmp_path, MEMORY, loop)
    assert trained.hits > 50 and "it failed (" in trained.reasons[0] and "a bug" in trained.complaints[0]
    assert len(trained.warnings) == 1 and len(trained.journal(CacheUsed)) == 1
