"""Execution order is recorded without a trace, and beats definition order."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from cuts import cut, run_order
from egeria.errors import UnsupportedModelError
from egeria.layers.modules import parse_modules
from egeria.layers.order import OrderRecorder, merge_order


class Backwards(nn.Module):
    """Defined back to front; one layer is never called, one dropout serves both ends."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        return self.dropout(self.last(self.middle(self.first(self.dropout(x)))))


def test_execution_order_beats_definition_order():
    model = Backwards()
    order = run_order(model, lambda: model(torch.randn(2, 4)))
    assert list(cut(model)) == ["last", "unused", "middle", "first"]
    assert cut(model, order=order) == {
        "first": ["first"],
        "middle": ["middle"],
        "last": ["last", "unused", "dropout"],
    }


def test_layers_that_did_not_run_are_no_atoms():
    model = Backwards()
    with pytest.raises(UnsupportedModelError, match="found \\['first'\\]"):
        parse_modules(model, order=["first", "dropout"])


NAMES = ["dropout", "last", "unused", "middle", "first"]


def num_hooks(model):
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def test_the_recorder_sees_the_order_of_calls():
    model = Backwards()
    with OrderRecorder(model, NAMES) as recorder:
        assert recorder.order == ()
        model(torch.randn(2, 4))
    assert recorder.order == ("first", "middle", "last", "dropout")
    assert num_hooks(model) == 0


def test_only_the_first_complete_forward_counts():
    model = Backwards()
    with OrderRecorder(model, NAMES) as recorder:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 3))
        assert recorder.order == ("dropout", "first")
        model(torch.randn(2, 4))
        model(torch.randn(2, 4))
    assert recorder.order == ("first", "middle", "last", "dropout")


def test_without_a_call_of_the_model_every_call_counts():
    model = Backwards()
    with OrderRecorder(model, NAMES) as recorder:
        model.middle(model.first(torch.randn(2, 4)))
    assert recorder.order == ("first", "middle")


def test_layers_never_called_stay_behind_their_predecessor():
    assert merge_order(NAMES, ("first", "middle", "last", "dropout")) == (
        "first",
        "middle",
        "last",
        "unused",
        "dropout",
    )


def test_hooks_are_gone_when_the_forward_raises():
    model = Backwards()
    with pytest.raises(RuntimeError, match="shapes"), OrderRecorder(model, NAMES):
        model(torch.randn(2, 3))
    assert num_hooks(model) == 0


def test_hooks_are_gone_when_a_name_is_wrong():
    model = Backwards()
    with pytest.raises(AttributeError, match="nothing"):
        OrderRecorder(model, ["first", "nothing"])
    assert num_hooks(model) == 0


def test_hooks_go_with_an_abandoned_recorder():
    model = Backwards()
    recorder = OrderRecorder(model, NAMES)
    assert num_hooks(model) == 2 * len(NAMES) + 1, "what holds no parameters has one less"
    del recorder
    gc.collect()
    assert num_hooks(model) == 0


def test_a_watched_model_can_be_copied_and_pickled_and_other_hooks_stay():
    model = Backwards()
    handle = model.first.register_forward_pre_hook(print)
    recorder = OrderRecorder(model, NAMES)
    copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    recorder.close()
    recorder.close()
    assert num_hooks(model) == 1
    handle.remove()
