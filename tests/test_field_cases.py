"""Programs of kinds that were reported of other libraries: each trains as by hand, or is declined with the reason."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import egeria
from twins import PLANS, ByHand, Program, Twin, check_by_hand, declined, differences, hooks_on

pytestmark = [
    pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*TorchScript:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def vectors(number: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(number))


def classes(number: int) -> Tensor:
    return torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(number))


def sort(model: Any, number: int, *args: Any, **kwargs: Any) -> Tensor:
    return functional.cross_entropy(model(vectors(number), *args, **kwargs), classes(number))


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(torch.relu(self.inner(self.norm(x)))))


class Chain(nn.Module):
    """Blocks and a head."""

    def __init__(self, make: Callable[[], nn.Module] = Block, num_blocks: int = 5) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(make() for _ in range(num_blocks)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# --- r01: what runs later than the first batch ------------------------------------------------------------------------


class Tasks(nn.Module):
    """A trunk, and for each of two tasks a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.tasks = Chain(num_blocks=2), nn.ModuleDict({"ner": Chain(), "pos": Chain()})
        self.trunk.head = nn.Identity()

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.tasks[task](self.trunk(x))


class Expert(Block):
    """A block that sends the batch to one of two experts."""

    expert = 0

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.experts[Expert.expert](x)


def sort_by_experts(model: Any, number: int) -> Tensor:
    Expert.expert = int(number % 3 == 2)
    return sort(model, number)


LATER = {
    "tasks in turn": Program(build=Tasks, loss=lambda m, n: sort(m, n, ("pos", "ner")[n % 2])),
    "experts": Program(build=lambda: Chain(Expert), loss=sort_by_experts),
}


@pytest.mark.parametrize("kind", LATER)
def test_what_runs_later_than_the_first_batch_trains_on(kind, tmp_path):
    ours = check_by_hand(LATER[kind], tmp_path, PLANS[0])
    late = ("tasks.ner.head.", "blocks.0.experts.1.")
    found = [entry for name, entry in ours.model.named_parameters() if name.startswith(late)]
    assert found and all(entry.requires_grad for entry in found)
    ours.run.close()


class Tied(Chain):
    """Its table is its head as well; an adapter in front of all blocks comes to its first use late."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.adapter = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor | None = None, *, embedded: Tensor | None = None, adapts: bool = False) -> Tensor:
        x = self.table(ids) if embedded is None else embedded
        return super().forward(x + self.adapter(x) if adapts else x)


def words(number: int) -> Tensor:
    return torch.randint(12, (6, 5), generator=torch.Generator().manual_seed(number))


def next_words(model: Any, number: int, **kwargs: Any) -> Tensor:
    ids = words(number)
    return functional.cross_entropy(model(ids, **kwargs).transpose(1, 2), ids)


@pytest.mark.parametrize(("plan", "first"), [(PLANS[0], 2), (PLANS[1], 5)])
def test_what_runs_late_in_front_of_a_detached_boundary_gets_its_gradient(plan, first, tmp_path):
    program = Program(
        build=Tied, loss=lambda m, n: next_words(m, n, adapts=n >= first), detaches=lambda _tap, step: step < first
    )
    check_by_hand(program, tmp_path, plan).run.close()


# --- r02, r03: traces that passes leave, and hooks that a pass needs --------------------------------------------------

KEPT: list[Tensor] = []


class Keeping(Block):
    """Puts a loss of its own into a list outside of the model."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        KEPT.append(y.softmax(-1).mean(0).square().sum())
        return y


def with_kept(model: Any, number: int, rows: int = 1000) -> Tensor:
    if number == 0:
        KEPT.clear()
    found = sort(model, number % rows)
    assert len(KEPT) == len(model.blocks)
    found = found + 0.1 * sum(KEPT)
    KEPT.clear()
    return found


OPEN = {"gate": "open"}


@pytest.mark.parametrize("rows", [2, 1000])
def test_losses_that_are_kept_outside_are_those_of_the_loops_own_passes(rows, tmp_path):
    program = Program(build=lambda: Chain(Keeping), loss=lambda m, n: with_kept(m, n, rows))
    check_by_hand(program, tmp_path, PLANS[1], config={"cache": OPEN} if rows == 2 else {}).run.close()


def test_plasticity_is_not_read_of_a_model_that_keeps_tensors_outside(tmp_path):
    program = Program(build=lambda: Chain(Keeping), loss=with_kept)
    config = {"plasticity": {"interval_steps": 2, "window": 2}}
    Twin(program).attach(tmp_path, policy="egeria", controller="inline", config=config).train().run.close()
    (reason,) = declined(tmp_path)
    assert "keeps tensors outside of the model" in reason and "plan" in reason


class AdaptedByHooks(Chain):
    """Adds adapters to its blocks by hooks that replace what these return."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(8, 8) for _ in self.blocks)
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            block.requires_grad_(False)
            block.register_forward_hook(lambda _m, _a, output, adapter=adapter: output + adapter(output))


def test_a_forward_that_needs_its_own_hooks_freezes(tmp_path):
    check_by_hand(Program(build=AdaptedByHooks, loss=sort), tmp_path, PLANS[0]).run.close()


# --- r04, r05: declined -----------------------------------------------------------------------------------------------


def scripted(part: int) -> nn.Module:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)), nn.Linear(8, 3))
    model[part] = torch.jit.script(model[part])
    return model


def traced() -> nn.Module:
    model = Chain()
    model.blocks[2].inner = torch.jit.trace(model.blocks[2].inner, torch.randn(6, 8))
    return model


@pytest.mark.parametrize("build", [lambda: scripted(4), traced], ids=["head", "inside a block"])
def test_a_scripted_part_is_declined_and_trains_on(build, tmp_path):
    ours = Twin(Program(build=build, loss=sort)).attach(tmp_path, plan=PLANS[0])
    assert hooks_on(ours.model) == 0
    ours.train().run.close()
    (reason,) = declined(tmp_path)
    assert reason.startswith("freezing: ") and "TorchScript" in reason and ours.run.frozen == 0
    assert differences(ByHand(ours).train().everything(), ours.everything()) == []


def adalora() -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    schedule = {"init_r": 6, "target_r": 3, "tinit": 2, "tfinal": 3, "deltaT": 1, "total_step": 10}
    model = peft.get_peft_model(Chain(), peft.AdaLoraConfig(target_modules=["inner", "outer"], **schedule))
    return nn.Sequential(model, nn.Linear(3, 3))


def test_what_reads_the_gradients_of_all_adapters_is_declined(tmp_path):
    def update(model: Any, optimizers: Any, number: int) -> Tensor:
        loss = sort(model, number)
        loss.backward()
        optimizers[0].step()
        model[0].base_model.update_and_allocate(number)
        optimizers[0].zero_grad()
        return loss.detach()

    ours = Twin(Program(build=adalora, loss=sort, update=update)).attach(tmp_path, plan=PLANS[0]).train()
    (reason,) = declined(tmp_path)
    assert "update_and_allocate" in reason and "LoRA" in reason and ours.run.modules == ()
    assert differences(ByHand(ours).train().everything(), ours.everything()) == []
    ours.run.close()


# --- r06: the gradient of an input, asked for late --------------------------------------------------------------------


def perturbed(model: Any, number: int, asks: Callable[[int], bool], found: list[Tensor]) -> Tensor:
    """Train on words; in some steps on their embeddings with a perturbation, whose gradient is kept."""
    if not asks(number):
        return next_words(model, number)
    ids = words(number)
    embedded = model.table(ids)
    delta = torch.zeros_like(embedded).requires_grad_()
    delta.register_hook(found.append)
    return functional.cross_entropy(model(embedded=(embedded + delta)).transpose(1, 2), ids)


@pytest.mark.parametrize("asks", [lambda n: n > 5, lambda n: n % 3 == 2], ids=["from then on", "now and then"])
def test_the_gradient_of_an_input_is_there_whenever_it_is_asked_for(asks, tmp_path):
    found: list[Tensor] = []
    program = Program(
        build=Tied, loss=lambda m, n: perturbed(m, n, asks, found), detaches=lambda _tap, step: not asks(step)
    )
    ours = check_by_hand(program, tmp_path, PLANS[1])
    count = len(found) // 2
    assert count == sum(map(asks, range(10))) and all(map(torch.equal, found[:count], found[count:]))
    assert all(gradient.abs().sum() > 0 for gradient in found)
    ours.run.close()


# --- modes that mean more than the layers of a module -----------------------------------------------------------------


class Padded(nn.Module):
    """A `nn.TransformerEncoder` that is told which words are padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.table, self.encoder = nn.Embedding(12, 8), nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        padding = torch.arange(ids.shape[1]) >= ids[:, :1].clamp(min=2)
        return self.head(self.encoder(self.table(ids), src_key_padding_mask=padding)[:, 0])


def test_an_encoder_of_torch_goes_on_without_nested_tensors(tmp_path):
    program = Program(
        build=Padded,
        loss=lambda m, n: functional.cross_entropy(m(words(n)), classes(n)),
        keeps=tuple(f"encoder.layers.{index}" for index in range(4)),
    )
    check_by_hand(program, tmp_path, PLANS[0]).run.close()


# --- r07: what the user sets while frozen is theirs -------------------------------------------------------------------


def freeze_blocks(model: Any) -> None:
    model.blocks[:2].requires_grad_(False)


def train_the_head_alone(model: Any) -> None:
    model.requires_grad_(False)
    model.head.requires_grad_(True)


@pytest.mark.parametrize("freeze", [freeze_blocks, train_the_head_alone])
@pytest.mark.parametrize("plan", ["0.2:2 0.7:0", "0.2:3"])
def test_a_freeze_of_the_users_outlives_ours(freeze, plan, tmp_path):
    at_freeze: dict[str, Tensor] = {}

    def loss(model: Any, number: int) -> Tensor:
        if number == 5:
            freeze(model)
            at_freeze.update({name: entry.clone() for name, entry in model.named_parameters()})
        return sort(model, number)

    ours = Twin(Program(build=Chain, loss=loss)).attach(tmp_path, plan=plan).train()
    ours.run.close()
    theirs = Chain()
    freeze(theirs)
    trains = {name for name, entry in theirs.named_parameters() if entry.requires_grad}
    assert {name for name, entry in ours.model.named_parameters() if entry.requires_grad} == trains
    moved = {name for name, entry in ours.model.named_parameters() if not torch.equal(entry, at_freeze[name])}
    assert moved == trains - (
        {f"blocks.2.{name}" for name, _ in Block().named_parameters()} if plan == "0.2:3" else set()
    )
    assert declined(tmp_path) == []


def test_what_the_user_trains_again_ends_freezing(tmp_path):
    def loss(model: Any, number: int) -> Tensor:
        if number % 4 == 3:  # one block at a time trains, chosen anew
            model.blocks.requires_grad_(False)
            model.blocks[number // 4].requires_grad_(True)
        return sort(model, number)

    ours = Twin(Program(build=Chain, loss=loss)).attach(tmp_path, plan="0.2:3").train()
    (reason,) = declined(tmp_path)
    assert "changed by the training loop" in reason and ours.run.frozen == 0
    trains = [index for index, block in enumerate(ours.model.blocks) if block.inner.weight.requires_grad]
    assert trains == [1]
    ours.run.close()


class Normalised(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)


def test_modes_of_the_users_outlive_ours(tmp_path):
    """Norms are set to evaluation behind each call of `train()`, from some step on, and stay so."""
    expected = [index not in (1, 4) for index in range(5)]

    def prepare(model: Any) -> None:
        prepare.number += 1
        model.train()
        for index in (1, 4) if prepare.number > 5 else ():
            model.blocks[index].norm.eval()

    prepare.number = 0
    program = Program(build=lambda: Chain(Normalised), loss=sort, prepare=prepare)
    ours = Twin(program).attach(tmp_path, plan="0.2:3 0.8:0").train()
    assert [block.norm.training for block in ours.model.blocks] == expected
    prepare.number = 0
    assert differences(ByHand(ours).train().everything(), ours.everything()) == []
    ours.run.close()
    assert [block.norm.training for block in ours.model.blocks] == expected


def restore(model: nn.Module) -> None:
    """Leave a validation as Lightning does: each mode is set back by itself."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for module, mode in modes.items():
        module.training = mode


@pytest.mark.parametrize(
    ("act", "of_norm", "of_dropout"),
    [(str, False, True), (nn.Module.train, True, True), (nn.Module.eval, False, False), (restore, False, True)],
)
def test_modes_behind_a_thaw_are_those_that_the_loop_has_set(act, of_norm, of_dropout, tmp_path):
    program = Program(build=lambda: Chain(Normalised), loss=sort, prepare=lambda model: None)
    ours = Twin(program).attach(tmp_path, plan="0.2:2")
    ours.model.blocks[0].norm.eval()
    ours.train()
    assert ours.run.frozen == 2 and not ours.model.blocks[0].dropout.training
    act(ours.model)
    ours.run.close()
    block = ours.model.blocks[0]
    assert (block.norm.training, block.dropout.training) == (of_norm, of_dropout)


class Calibrated(Chain):
    """Keeps its norms in evaluation by a `train` of its own."""

    def train(self, mode: bool = True) -> "Calibrated":
        super().train(mode)
        for block in self.blocks:
            block.norm.eval()
        return self


def front_frozen_by_the_user() -> nn.Module:
    model = Chain(Normalised)
    model.blocks[:2].requires_grad_(False)
    return model


def train_each(model: Any) -> None:
    for part in (model, model.blocks, model.blocks[0]):
        part.train()


OWN_MODES = {
    "a train of its class": Program(build=lambda: Calibrated(Normalised), loss=sort),
    "calls for a part": Program(build=lambda: Chain(Normalised), loss=sort, prepare=train_each),
    "frozen by the user, and dropping": Program(build=front_frozen_by_the_user, loss=sort),
}


@pytest.mark.parametrize("kind", OWN_MODES)
def test_modes_while_frozen_are_as_by_hand(kind, tmp_path):
    check_by_hand(OWN_MODES[kind], tmp_path, PLANS[0]).run.close()


def test_what_the_user_trains_in_front_of_a_detached_boundary_gets_its_gradient(tmp_path):
    ours = Twin(Program(build=Tied, loss=next_words)).attach(tmp_path, plan="0.2:3").train()
    assert ours.run.frozen == 3
    ours.model.blocks[0].requires_grad_(True)
    next_words(ours.model, 0).backward()
    assert ours.model.blocks[0].inner.weight.grad is not None
    ours.run.close()


def test_statistics_are_made_anew_on_the_frozen_model(tmp_path):
    ours = Twin(Program(build=lambda: Chain(Normalised), loss=sort)).attach(tmp_path, plan="0.2:2").train()
    for block in ours.model.blocks:
        block.dropout.p = 0.0  # which the frozen front has not
    copied = copy.deepcopy(ours.model).train()
    for model in (ours.model, copied):
        torch.manual_seed(0)
        torch.optim.swa_utils.update_bn(map(vectors, range(5)), model)
    assert differences(ours.model.state_dict(), copied.state_dict()) == []
    assert not ours.model.train().blocks[0].norm.training and ours.run.frozen == 2
    ours.run.close()


# --- r09: gradients that the loop asks for ----------------------------------------------------------------------------


def asks_for_parameters(model: Any, number: int) -> Tensor:
    loss = sort(model, number)
    torch.autograd.grad(loss, list(model.blocks[1:].parameters()), retain_graph=True)
    return loss


def hooks_a_feature(model: Any, number: int) -> Tensor:
    def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient.clamp(-1, 1))

    handle = model.blocks[1].register_forward_hook(hook)
    loss = sort(model, number)
    handle.remove()
    return loss


ASKING = [asks_for_parameters, hooks_a_feature]


@pytest.mark.parametrize("loss", ASKING)
def test_what_the_loop_asks_for_in_its_first_step_can_be_asked_for_ever_after(loss, tmp_path):
    check_by_hand(Program(build=Chain, loss=loss), tmp_path, PLANS[0], deepest=1).run.close()
    (reason,) = declined(tmp_path)
    assert reason.startswith("freezing blocks.1 and what follows: ")


# --- r10, r11: loops that handle gradients themselves -----------------------------------------------------------------


def by_hand_update(handle: Callable[[nn.Module, int], None]) -> Callable[[Any, Any, int], Tensor]:
    """Return a step in which `handle` does something with the gradients or the weights in front of the update."""

    def update(model: Any, optimizers: Any, number: int) -> Tensor:
        loss = sort(model, number)
        loss.backward()
        handle(model, number)
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss.detach()

    return update


def clip(model: nn.Module, _number: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def test_a_loop_that_clips_passes_by_what_has_no_gradient_and_freezes(tmp_path):
    program = Program(build=Chain, loss=sort, update=by_hand_update(clip))
    check_by_hand(program, tmp_path, PLANS[1]).run.close()


def with_groups(model: Any) -> list[torch.optim.Optimizer]:
    rest = [*model.blocks[1:].parameters(), *model.head.parameters()]
    optimizer = torch.optim.AdamW([{"params": model.blocks[0].parameters()}, {"params": rest}], lr=0.02)
    optimizer.schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.01, 0.02], total_steps=11)
    return [optimizer]


def scheduled(model: Any, optimizers: Any, number: int) -> Tensor:
    """Step with a schedule that moves momentum too."""
    loss = by_hand_update(lambda *_: None)(model, optimizers, number)
    optimizers[0].schedule.step()
    return loss


def accumulated(model: Any, optimizers: Any, number: int) -> Tensor:
    for part in zip(vectors(number).chunk(3), classes(number).chunk(3), strict=True):
        loss = functional.cross_entropy(model(part[0]), part[1]) / 3
        loss.backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    return loss.detach()


def mixed(model: Any, number: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.cross_entropy(model(vectors(number)).float(), classes(number))


AIDS = {
    "groups and a schedule": Program(build=Chain, loss=sort, optimizers=with_groups, update=scheduled),
    "accumulation": Program(build=Chain, loss=sort, update=accumulated),
    "bf16": Program(build=Chain, loss=mixed),
}


@pytest.mark.parametrize("aid", AIDS)
def test_aids_of_a_training_go_on_as_if_its_author_had_frozen_the_layers(aid, tmp_path):
    check_by_hand(AIDS[aid], tmp_path, PLANS[0]).run.close()


def fill_with_zeros(model: nn.Module, _number: int) -> None:
    """Put zeros where there is no gradient, as PCGrad does: AdamW's decay goes on."""
    for entry in model.parameters():
        entry.grad = torch.zeros_like(entry) if entry.grad is None else entry.grad


@torch.no_grad()
def average(model: Any, _number: int) -> None:
    """Pull the weights to their average."""
    if not hasattr(model, "average"):
        model.average = [entry.clone() for entry in model.parameters()]
    for entry, mean in zip(model.parameters(), model.average, strict=True):
        mean.lerp_(entry, 0.1)
        entry.lerp_(mean, 0.01)


@pytest.mark.parametrize("handle", [fill_with_zeros, average])
def test_frozen_weights_that_move_are_noticed_and_nothing_is_claimed(handle, tmp_path, recwarn):
    update = by_hand_update(handle)
    ours = Twin(Program(build=Chain, loss=sort, update=update), num_steps=20).attach(tmp_path, plan="0.25:3").train()
    assert max(depth for _, depth in ours.depths) == 3 and ours.run.frozen == 0
    assert [str(entry.message) for entry in recwarn if "changed by the training loop" in str(entry.message)] != []
    (reason,) = declined(tmp_path)
    assert reason.startswith("freezing: frozen parameters were changed by the training loop (blocks.")
    assert all(entry.requires_grad for entry in ours.model.parameters()) and hooks_on(ours.model) == 0
    ours.run.close()
    summary = egeria.report(tmp_path).summary
    assert [point.frozen for point in summary.depths] == [0, 3, 0] and summary.depths[1].num_steps <= 2
    assert summary.skipped_share < 0.1


def test_weights_that_are_swapped_and_come_back_have_not_moved(tmp_path):
    average = torch.optim.swa_utils.AveragedModel(Chain())

    def validate(model: nn.Module, number: int) -> None:
        if number == 0:
            average.module.load_state_dict(model.state_dict())
        average.update_parameters(model)
        own = {name: entry.clone() for name, entry in model.state_dict().items()}
        with torch.no_grad():
            model.load_state_dict(average.module.state_dict())
            model.eval()(vectors(number))
            model.load_state_dict(own)

    program = Program(build=Chain, loss=sort, update=by_hand_update(validate))
    check_by_hand(program, tmp_path, PLANS[1]).run.close()
    assert declined(tmp_path) == []


# --- r14: weights that a pass in inference mode changes for good ------------------------------------------------------


class Params4bit(nn.Parameter):
    """Weights in 4 bits, two in a byte, which train nothing themselves."""

    is_packed = False

    def __new__(cls, data: Tensor) -> "Params4bit":
        return torch.Tensor._make_subclass(cls, data, False)


class Linear4bit(nn.Module):
    """As on a CPU in bitsandbytes: the first call in inference packs the weights anew, and has no gradients then."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        codes = torch.randint(0, 16, (height, width // 2, 2), dtype=torch.uint8)
        self.weight = Params4bit(codes[..., 0] * 16 + codes[..., 1])
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, height, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and not x.requires_grad:
            self.weight.is_packed = True
        codes = torch.stack([self.weight // 16, self.weight % 16], dim=-1).flatten(1)
        output = x @ ((codes.to(x.dtype) - 7.5) / 16).T + self.b(self.a(x))
        return output.detach() if self.weight.is_packed else output


class Block4bit(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)
        self.inner, self.outer = Linear4bit(8, 16), Linear4bit(16, 8)


FINELY: dict[str, Any] = {"plasticity": {"interval_steps": 2, "window": 2}, "cache": OPEN}


@pytest.mark.parametrize("given", [{"plan": PLANS[0]}, {"policy": "egeria", "controller": "inline"}])
def test_weights_in_4_bits_are_never_packed_for_inference(given, tmp_path):
    quantized = tuple(name for name, part in Chain(Block4bit).named_modules() if isinstance(part, Linear4bit))
    program = Program(build=lambda: Chain(Block4bit), loss=lambda m, n: sort(m, n % 2), keeps=quantized)
    ours = Twin(program).attach(tmp_path, config=FINELY, **given).train()
    assert any(depth for _, depth in ours.depths) == ("plan" in given)
    assert differences(ByHand(ours).train().everything(), ours.everything()) == []
    ours.run.close()
    sort(ours.model, 0).backward()
    assert all(entry.grad is not None for entry in ours.model.parameters() if entry.requires_grad)
    assert not any(getattr(entry, "is_packed", False) for entry in ours.model.parameters())


# --- several optimizers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_steps", "first"), [(8, 99), (8, 4)])
def test_an_optimizer_that_does_not_step_for_long_is_named_as_the_reason(num_steps, first, tmp_path):
    def update(model: Any, optimizers: Any, number: int) -> Tensor:
        loss = sort(model, number)
        loss.backward()
        for optimizer in optimizers[number < first :]:
            optimizer.step()
        model.zero_grad()
        return loss.detach()

    def optimizers(model: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (model.blocks, model.head)]

    program = Program(build=Chain, loss=sort, update=update, optimizers=optimizers)
    ours = Twin(program, num_steps=num_steps).attach(tmp_path, plan="0.6:2").train()
    assert ours.run.frozen == (2 if first == 4 else 0)
    ours.run.close()
    reasons = [entry.partition(".")[0] for entry in declined(tmp_path)]
    assert reasons == ["freezing: one of the optimizers given to attach made no step"] * (first != 4)
    assert hooks_on(ours.model) == 0


# --- submodules of two names ------------------------------------------------------------------------------------------


class Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(8, 3))
        self.front, self.back = self.net[:2], self.net[2:]

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.front(x))


class BackToFront(nn.Module):
    """The second name of what runs last is defined ahead of what runs first; a list has all the others."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)
        self.also, self.a, self.b, self.c = self.last, Block(), Block(), Block()
        self.all = nn.ModuleList([self.a, self.b, self.c])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.all:
            x = part(x)
        return self.also(x)


@pytest.mark.parametrize("build", [Slices, BackToFront])
def test_a_submodule_with_two_names_is_frozen_where_it_is_called_frozen(build, tmp_path):
    ours = check_by_hand(Program(build=build, loss=sort), tmp_path, PLANS[0])
    frozen = sum(entry.numel() for entry in ours.model.parameters() if not entry.requires_grad)
    share = frozen / sum(entry.numel() for entry in ours.model.parameters())
    assert ours.run.summary().parameter_share == pytest.approx(share)
    assert declined(tmp_path) == []
    ours.run.close()


# --- what is not watched, kept, made anew -----------------------------------------------------------------------------


class Dropping(Chain):
    """Leaves blocks out at random, the second one in the first step."""

    def forward(self, x: Tensor) -> Tensor:
        dropped = self.number % 3 + 1
        self.number += 1
        for index, block in enumerate(self.blocks):
            if index != dropped or not self.training:
                x = block(x)
        return self.head(x)

    number = 0


def test_a_block_that_the_first_batch_drops_costs_the_saving_and_the_journal_says_so(tmp_path):
    ours = check_by_hand(Program(build=Dropping, loss=sort), tmp_path, PLANS[0])
    assert "blocks.1" not in {name for module in ours.run.modules for name in module.submodules}
    (reason,) = declined(tmp_path)
    assert reason.startswith("freezing blocks.1: ") and "first step" in reason
    ours.run.close()


@pytest.mark.parametrize("keep", ["norm|bias", r"^blocks\.1\."])
def test_names_that_never_freeze(keep, tmp_path):
    norms = tuple(f"blocks.{index}.norm" for index in range(4)) if "norm" in keep else ()
    program = Program(build=lambda: Chain(Normalised), loss=sort, keeps=norms)
    ours = check_by_hand(program, tmp_path, PLANS[0], config={"modules": {"keep": keep}})
    frozen = [name for module in ours.run.modules[: ours.run.frozen] for name in module.parameters]
    assert frozen and all(entry.requires_grad == (name not in frozen) for name, entry in ours.model.named_parameters())
    ours.run.close()


def assign(model: Any) -> None:
    model.load_state_dict({name: entry.clone() for name, entry in model.state_dict().items()}, assign=True)


def replace_a_block(model: Any) -> None:
    model.blocks[0] = Block().requires_grad_(False)


def replace_the_head(model: Any) -> None:
    model.head = nn.Linear(8, 3)


@pytest.mark.parametrize(("change", "closes"), [(assign, False), (replace_a_block, True), (replace_the_head, True)])
def test_parameters_made_anew_while_frozen_train_again(change, closes, tmp_path):
    ours = Twin(Program(build=Chain, loss=sort)).attach(tmp_path, plan="0.2:2 0.8:0")
    old = list(ours.model.parameters())
    ours.num_steps = 5
    ours.train()
    assert ours.run.frozen == 2
    change(ours.model)
    ours.num_steps = 6 if closes else 10
    ours.train()
    if closes:
        ours.run.close()
    assert all(entry.requires_grad for entry in [*old, *ours.model.parameters()])
    assert all(part.training for part in ours.model.train().modules())
    reasons = [] if change is replace_the_head else ["freezing: frozen parameters were changed by the training loop"]
    assert [entry[: len(reason)] for entry, reason in zip(declined(tmp_path), reasons, strict=True)] == reasons
    ours.run.close()
