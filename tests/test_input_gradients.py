"""Gradients that enter the frozen front for nobody are cut at its boundary; those that somebody reads are not."""

import warnings

import pytest
import torch
from torch import nn

from egeria import attach
from egeria.events import Declined, ModuleFrozen, RunStarted
from egeria.journal import read_journal
from egeria.layers.batch import Batch
from egeria.layers.gradients import TRIES
from egeria.policy import Freeze
from egeria.report import report
from egeria.session import EgeriaWarning
from egeria.testing import ScriptedController

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

DEPTH = 2
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def bert():
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=50))


def gpt2():
    config = transformers.GPT2Config(n_embd=16, n_layer=4, n_head=2, vocab_size=50, n_positions=16)
    config.pad_token_id = 0
    return transformers.GPT2ForSequenceClassification(config)


TARGETS = {bert: ["query", "value"], gpt2: ["c_attn"]}


def with_lora(build, *, checkpoints=False):
    torch.manual_seed(0)
    model = build()
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    model.enable_input_require_grads()
    settings = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=TARGETS[build], lora_dropout=0.0, fan_in_fan_out=build is gpt2
    )
    return peft.get_peft_model(model, settings)


class Training:
    """A loop whose front is frozen by hand after the third step, so that the frozen depth is known."""

    def __init__(self, model, directory, *, cuts=True, inputs=None):
        self.model, self.directory, self.inputs = model, directory, inputs
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EgeriaWarning)
            self.run = attach(
                model, self.optimizer, total_steps=100, directory=directory, controller=ScriptedController()
            )
        if not cuts:
            self.run._session.parts.applier._gradients.follow = lambda taps: None
        self.data = torch.Generator().manual_seed(1)
        self.gradients = []

    @property
    def applier(self):
        return self.run._session.parts.applier

    def freeze(self, depth=DEPTH):
        for module in range(depth):
            self.applier.freeze([Freeze(module=module, reason="test")], self.batch, None)
        self.applier.put_in_force()

    @property
    def batch(self):
        return Batch.of_call((), self.example(torch.Generator().manual_seed(2)), "cpu")

    def example(self, data):
        tokens = torch.randint(1, 50, (4, 6), generator=data)
        return {"input_ids": tokens, "labels": tokens[:, 0] % 2}

    def step(self, count=1):
        for _ in range(count):
            self.model.train()
            torch.manual_seed(len(self.gradients))  # dropout of the two loops that are compared
            outputs = self.model(**self.example(self.data))
            loss = outputs.loss
            loss.backward()
            self.gradients.append(
                [None if p.grad is None else p.grad.clone() for p in self.model.parameters() if p.requires_grad]
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EgeriaWarning)
                self.run.step(loss)

    def declined(self):
        return [(e.what, e.reason) for e in read_journal(self.directory).of(Declined)]

    def backward_calls(self):
        """The frozen blocks that a backward pass runs through in one more step."""
        called = []
        names = [name for module in self.run._session.modules[:DEPTH] for name in module.submodules]
        roots = {name: self.model.get_submodule(name) for name in names}

        def note(name, output):
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.grad_fn.register_hook(lambda *_: called.append(name))

        # Inside the blocks, since what leaves the last of them is cut.
        parts = [(name, part) for name, root in roots.items() for part in root.modules() if isinstance(part, nn.Linear)]
        handles = [
            part.register_forward_hook(lambda _m, _a, output, name=name: note(name, output)) for name, part in parts
        ]
        self.step()
        for handle in handles:
            handle.remove()
        return called


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("build", [bert, gpt2])
def test_no_backward_pass_runs_through_frozen_lora_blocks(tmp_path, build, checkpoints):
    cut = Training(with_lora(build, checkpoints=checkpoints), tmp_path / "cut")
    uncut = Training(with_lora(build, checkpoints=checkpoints), tmp_path / "uncut", cuts=False)
    for training in (cut, uncut):
        training.step(2)
        training.freeze()
        training.step(3)
    assert cut.backward_calls() == []
    assert uncut.backward_calls(), "without the cut gradients run through the front"
    for training in (cut, uncut):
        training.step(2)
    for ours, theirs in zip(cut.gradients, uncut.gradients, strict=True):
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not [what for what, _ in cut.declined() if "saving" in what]
    cut.applier.thaw(type("Thaw", (), {"reason": "test", "window": 2})())
    cut.applier.put_in_force()
    assert cut.backward_calls(), "a thawed model trains in front again"
    cut.run.close()
    uncut.run.close()
    fresh = with_lora(build, checkpoints=checkpoints)
    tables = [name for name in vars(fresh) if "hooks" in name]
    for ours, theirs in zip(cut.model.modules(), fresh.modules(), strict=True):
        assert [len(getattr(ours, name)) for name in tables] == [len(getattr(theirs, name)) for name in tables]
        assert "__reduce_ex__" not in vars(ours)


def test_an_embedding_whose_gradient_the_loop_reads_is_not_cut(tmp_path):
    model = with_lora(bert)
    kept = []

    def keep(_module, _args, output):
        kept[:] = [output]

    model.get_input_embeddings().register_forward_hook(keep)
    training = Training(model, tmp_path)
    training.step()
    training.freeze()
    training.step(TRIES + 2)
    assert kept[0].grad is not None and kept[0].grad.abs().sum() > 0
    reasons = [reason for what, reason in training.declined() if "saving" in what]
    assert len(reasons) == 1 and "requires_grad_" in reasons[0]
    training.run.close()


def test_a_gradient_that_a_tensor_hook_reads_is_not_cut(tmp_path):
    model, read = with_lora(bert), []
    model.get_input_embeddings().register_forward_hook(
        lambda _m, _a, output: output.register_hook(read.append) and None
    )
    training = Training(model, tmp_path)
    training.freeze()
    training.step(TRIES + 2)
    assert len(read) == TRIES + 2
    training.run.close()


def test_an_input_that_requires_grad_keeps_its_gradient(tmp_path):
    torch.manual_seed(0)
    model = peft.get_peft_model(bert(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=TARGETS[bert]))
    training = Training(model, tmp_path)
    inputs = torch.randn(4, 6, 16, requires_grad=True)
    training.example = lambda data: {"inputs_embeds": inputs, "labels": torch.tensor([0, 1, 0, 1])}
    training.step()
    training.freeze()
    for _ in range(TRIES + 2):
        inputs.grad = None
        training.step()
        assert inputs.grad is not None
    assert any("trainable tensor outside" in reason for _, reason in training.declined())
    training.run.close()


def penalty(model):
    """Penalise the gradient of the input, which only `autograd.grad` returns."""
    inputs = torch.randn(4, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return gradient.square().mean()


def plain(model):
    return model(torch.randn(4, 8)).square().mean()


def train_with_penalty(directory, loss_of, *, resumes=False):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)], nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {"policy": {"plan": "0.1:2"}, "plasticity": {"interval_steps": 2}}
    arguments = {"total_steps": 40, "controller": "inline", "config": config}
    run = attach(model, optimizer, directory=directory / "first", **arguments)
    for step in range(20):
        if resumes and step == 10:
            state = run.state_dict()
            run.close()
            run = attach(model, optimizer, directory=directory / "second", **arguments)
            run.load_state_dict(state)
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    assert run.frozen == DEPTH
    run.close()


@pytest.mark.filterwarnings("ignore:egeria")
@pytest.mark.parametrize(
    ("loss_of", "resumes"), [(lambda model: penalty(model) + plain(model), False), (penalty, False), (penalty, True)]
)
def test_a_gradient_that_the_loop_takes_from_autograd_is_not_cut(tmp_path, loss_of, resumes):
    train_with_penalty(tmp_path, loss_of, resumes=resumes)


@pytest.mark.parametrize("kind", ["prompt", "p", "prefix"])
def test_trainable_prompts_are_declined_with_the_reason(tmp_path, kind):
    settings = {"task_type": "SEQ_CLS", "num_virtual_tokens": 3}
    make = {"prompt": peft.PromptTuningConfig, "p": peft.PromptEncoderConfig, "prefix": peft.PrefixTuningConfig}[kind]
    torch.manual_seed(0)
    training = Training(peft.get_peft_model(bert(), make(**settings)), tmp_path)
    training.step(3)
    assert training.run.frozen == 0 and training.run._session.parts is None
    assert [what for what, reason in training.declined() if "trains prompts" in reason] == ["freezing"]
    training.run.close()


def test_shares_are_of_trainable_parameters(tmp_path):
    training = Training(with_lora(bert), tmp_path)
    training.step(2)
    training.freeze()
    training.step()
    training.run.close()
    journal = read_journal(tmp_path)
    fresh = with_lora(bert)
    counts = {name: p.numel() for name, p in fresh.named_parameters() if p.requires_grad}
    front = [f"layer.{number}." for number in range(DEPTH)]
    share = sum(n for name, n in counts.items() if any(part in name for part in front)) / sum(counts.values())
    assert journal.of(ModuleFrozen)[-1].parameter_share == pytest.approx(share)
    entries = journal.of(RunStarted)[-1].modules
    assert sum(entry["num_trainable"] for entry in entries) == sum(counts.values())
    modules = report(tmp_path).summary.modules
    assert sum(module.parameter_share for module in modules[:DEPTH]) == pytest.approx(share)
