"""Two ranks that train through `attach`: wherever the wrapper comes from, and whatever goes wrong on one of them."""

import contextlib
import copy
import functools
import tempfile
import warnings

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import egeria
from egeria.distributed import ranks
from egeria.policy import Depth, Wants
from ranks import run_ranks
from test_distributed import encoder, shard

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
PLAN = "0:2 0.3:0 0.5:3 0.8:1"
STEPS = 20
WHERE = ["given", "before", "after", "container", "container before"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.adapter = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x, has_adapter=True):
        x = torch.tanh(x + self.norm(self.linear(x)))
        return torch.tanh(x + self.adapter(x)) if has_adapter else x


class Net(nn.Module):
    """Four blocks and a head; some batches leave out the adapters."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 3)

    def forward(self, x, has_adapter=True):
        for block in self.blocks:
            x = block(x, has_adapter)
        return self.head(x)


class Container(nn.Module):
    """Holds the model as a framework does, with a part of its own in front of it."""

    def __init__(self, model):
        super().__init__()
        torch.manual_seed(5)
        self.stem, self.inner = nn.Linear(16, 16), model

    def forward(self, x):
        return self.inner(self.stem(x))


def count_bytes(sizes, bucket):
    sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
    return default_hooks.allreduce_hook(None, bucket)


def is_equal(first, second):
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


class Training:
    """A loop that calls what a framework calls, with the model attached or frozen by hand."""

    def __init__(self, where, model=None, *, attached=True, saved=None, wrap=DistributedDataParallel, **options):
        torch.manual_seed(0)
        self.model, self.sizes, self.wrap_model = model or Net(), [], wrap
        self.accumulates, self.more = False, lambda step: ()
        self.inner = Container(self.model) if "container" in where else self.model
        if saved is not None:
            self.inner.load_state_dict(saved["model"])
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.05, momentum=0.9)
        self.called = self.inner if where in ("after", "container", "bare") else self.wrap()
        self.run, self.told = None, []
        if attached:
            options = {"plan": PLAN, "total_steps": STEPS, "directory": tempfile.mkdtemp(), **options}
            given = self.called if where == "given" else self.model
            self.logged, self.seen = [], []
            tracker = (lambda values, step: self.logged.append(step)) if _rank() == 0 else object()  # not looked at
            self.run = self.quietly(egeria.attach, given, self.optimizer, log_to=tracker, **options)
            self.run.on_event(self.seen.append)
        if saved is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.run.load_state_dict(saved["run"])
        if where in ("after", "container"):
            self.called = self.wrap()

    def quietly(self, function, *args, **kwargs):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = function(*args, **kwargs)
        self.told += [str(entry.message) for entry in told if issubclass(entry.category, egeria.EgeriaWarning)]
        return found

    def wrap(self):
        wrapper = self.wrap_model(self.inner)
        if isinstance(wrapper, DistributedDataParallel):
            wrapper.register_comm_hook(self.sizes, count_bytes)
        return wrapper

    def freeze_to(self, modules, depth):
        """Freeze the first layer modules by hand, and no others, and wrap the model again."""
        self.model.requires_grad_(True)
        self.eval = [self.model.get_submodule(name) for module in modules[:depth] for name in module]
        for part in self.eval:
            part.requires_grad_(False).zero_grad()
        norms = [part for part in self.model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        self.eval += norms if depth == len(modules) - 1 else []
        self.called = self.wrap()

    def train(self, first, last, depths=None, modules=()):
        """Return how many layer modules are frozen after each step, and whether only what trains was reduced."""
        found, reduces_what_trains = [], True
        self.eval = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(2 * step + _rank())
            self.called.train()
            for part in self.eval:
                part.eval()
            self.sizes.clear()
            for is_last in (False, True) if self.accumulates else (True,):
                given = (torch.randn(6, 16, generator=generator), *self.more(step))
                with contextlib.nullcontext() if is_last else self.called.no_sync():
                    loss = self.called(*given).square().mean()
                    loss.backward()
            trained = sum(4 * p.numel() for p in self.inner.parameters() if p.requires_grad)
            reduces_what_trains &= sum(self.sizes) == trained
            if depths and step == 0:
                self.freeze_to(modules, depths[0])
            self.quietly(self.optimizer.step)
            self.optimizer.zero_grad()
            if self.run is not None:
                self.quietly(self.run.step, loss)
                found.append(self.run.frozen)
            elif depths and step and depths[step] != depths[step - 1]:
                self.freeze_to(modules, depths[step])
        return found, reduces_what_trains

    def state(self):
        parts = {"model": self.inner, "optimizer": self.optimizer, "run": self.run}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def answer(self, depths):
        weights = {name: tensor.clone() for name, tensor in self.inner.state_dict().items()}
        self.run.close()
        left = [name for name, entry in self.inner.named_parameters() if not entry.requires_grad]
        hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in self.inner.modules())
        return depths, weights, " | ".join(self.told), left, hooks


class Varied(Training):
    """The same with other options of the wrapper."""

    options: dict
    is_counted = True

    def __init__(self, where, kind, **options):
        self.options, self.is_counted = WRAPS[kind], kind != "fp16 hook"
        super().__init__(where, **options)
        self.accumulates = kind == "micro-batches"
        self.more = (lambda step: ((step + _rank()) % 3 > 0 or not step,)) if "unused" in kind else self.more

    def wrap(self):
        wrapper = DistributedDataParallel(self.inner, **self.options)
        wrapper.register_comm_hook(
            *((self.sizes, count_bytes) if self.is_counted else (None, default_hooks.fp16_compress_hook))
        )
        return wrapper


WRAPS = {
    "unused parameters": {"find_unused_parameters": True},
    "bucket views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    "micro-batches": {"gradient_as_bucket_view": True},
    "fp16 hook": {},
    "own buffers": {"broadcast_buffers": False},
}


def _rank():
    return distributed.get_rank() if distributed.is_initialized() else 0


def as_by_hand(where, kind=None):
    warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is deprecated, and used
    make = functools.partial(Varied, kind=kind) if kind else Training
    attached = make(where)
    depths, reduces_what_trains = attached.train(0, STEPS)
    modules = [module.submodules for module in attached.run.modules]
    depths, weights, told, left, hooks = attached.answer(depths)
    by_hand = make("given" if where in ("before", "after") else where, attached=False)
    if "container" in where:
        by_hand.called = by_hand.wrap()
    by_hand.train(0, STEPS, depths, modules)
    equal = is_equal(weights, by_hand.inner.state_dict())
    moves = [event.step for event in attached.seen if event.kind in ("frozen", "thawed")]
    assert bool(attached.logged) == (_rank() == 0) and attached.run.summary().frozen == depths[-1]
    assert set(moves) == {0, 6, 10, 16}
    return depths, equal, reduces_what_trains, told, left, hooks


@pytest.mark.parametrize(("where", "kind"), [*((where, None) for where in WHERE), *(("given", kind) for kind in WRAPS)])
def test_a_wrapper_is_followed_wherever_it_comes_from_and_however_it_is_made(where, kind):
    for depths, equal, reduces_what_trains, told, left, hooks in run_ranks(as_by_hand, where, kind):
        assert [depths[0], depths[8], depths[12], depths[-1]] == [2, 0, 3, 1]
        assert equal and (reduces_what_trains or kind == "fp16 hook")
        assert (told, left, hooks) == ("", [], 0)


def resumed(where, step):
    whole = Training(where)
    whole.train(0, step)
    saved = whole.state()
    whole.train(step, STEPS)
    again = Training(where, saved=saved)
    at_once = again.run.frozen
    _, reduces_what_trains = again.train(step, STEPS)
    _, weights, told, *_ = again.answer([])
    equal = is_equal(weights, whole.inner.state_dict())
    whole.run.close()
    return at_once == {3: 2, 8: 0, 12: 3}[step], equal, reduces_what_trains, told


@pytest.mark.parametrize(
    ("where", "step"), [("given", 3), ("before", 12), ("after", 3), ("after", 8), ("container", 3)]
)
def test_a_run_goes_on_under_a_wrapper_that_it_has_yet_to_see(where, step):
    for right_depth, equal, reduces_what_trains, told in run_ranks(resumed, where, step):
        assert right_depth and equal and told == ""
        assert reduces_what_trains or where != "after"  # the others are wrapped while all of it trains


def test_a_wrapper_around_a_process_that_is_alone_is_followed():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        training = Training("after")
        depths, reduces_what_trains = training.train(0, STEPS)
        assert max(depths) == 3 and reduces_what_trains
        _, _, told, left, hooks = training.answer(depths)
        assert (told, left, hooks) == ("", [], 0)
    finally:
        distributed.destroy_process_group()


# --- what goes wrong on one rank, or on all -------------------------------------------------------


class Failing:
    """Freezes two layer modules, and fails on one rank in the middle of the training."""

    wants = Wants(interval_steps=2)

    def __init__(self, fails, **_):
        self.fails = fails

    def observe(self, interval):
        if interval.step < 10:
            return Depth(2, "early")
        if _rank() == 1:
            return self.fails()
        return None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def raises():
    raise OSError("the disk is full")


FAULTS = {"raises": raises, "wrong type": lambda: "two", "decides alone": lambda: Depth(1, "alone")}


def fail(how):
    training = Training("given", policy=lambda **asked: Failing(FAULTS[how], **asked), plan=None)
    depths, _ = training.train(0, STEPS)
    return training.answer(depths)


@pytest.mark.parametrize("how", FAULTS)
def test_a_rank_that_cannot_go_on_leaves_no_other_waiting(how):
    (depths, weights, told, *_), (others_depths, others, *_) = run_ranks(fail, how)
    assert depths == others_depths and depths[8] == 2
    assert all(torch.equal(weights[name], tensor) for name, tensor in others.items() if "running" not in name)
    if how == "decides alone":  # the first rank's policy decides
        assert depths[-1] == 2
    else:
        reason = "OSError: the disk is full" if how == "raises" else "AttributeError"
        assert depths[-1] == 0 and f"rank 1: {reason}" in told


def attach_differently():
    try:
        Training("given", plan="0:1" if _rank() else PLAN)
    except egeria.ConfigError as error:
        return str(error)
    return "accepted"


def test_ranks_with_other_settings_are_refused():
    for said in run_ranks(attach_differently):
        assert "rank 1 has others than rank 0" in said


def declined(how):
    wraps = {"static_graph": lambda model: DistributedDataParallel(model, static_graph=True)}
    where = "bare" if how == "bare" else "after"
    training = Training(where, wrap=wraps.get(how, DistributedDataParallel))
    if how == "join":
        depths = []
        for part in range(2):
            with training.called.join():
                depths += training.train(10 * part, 10 * part + 6 + _rank())[0]
        depths = depths[:12]
    else:
        depths, _ = training.train(0, STEPS)
    return training.answer(depths)


DECLINED = {"bare": "called without DistributedDataParallel", "static_graph": "static_graph=True", "join": "`join()`"}


@pytest.mark.parametrize("how", DECLINED)
def test_what_cannot_be_followed_trains_on_unfrozen(how):
    first, second = run_ranks(declined, how)
    for depths, _, _, left, hooks in (first, second):
        assert set(depths) == {0}
        assert (left, hooks) == ([], 0)
    assert DECLINED[how] in first[2] and second[2] == "", "the first rank tells"


def joined_later(num_before):
    training = Training("after")
    depths, _ = training.train(0, num_before)
    with training.called.join():
        depths += training.train(num_before, STEPS - _rank())[0]
    return training.answer(depths)


@pytest.mark.parametrize(("num_before", "depth"), [(4, 2), (8, 0)])
def test_nothing_freezes_or_thaws_from_where_ranks_cannot_meet_any_more(num_before, depth):
    first, second = run_ranks(joined_later, num_before)
    for depths, _, _, left, hooks in (first, second):
        assert set(depths[:num_before]) == {2, depth} and set(depths[num_before:]) == {depth}
        assert (left, hooks) == ([], 0)
    assert "freezing and thawing any further" in first[2] and "`join()`" in first[2]


def called_alone(call, place):
    """Make a call on one rank alone, then go on as if nothing were; return what was said, and how the model is."""
    ranks.TIMEOUT_S, told = 3, ""
    training = Training("before", attached=call != "attach")
    options = {"plan": PLAN, "total_steps": STEPS, "directory": tempfile.mkdtemp()}
    calls = {
        "attach": lambda: egeria.attach(training.model, training.optimizer, **options),
        "load_state_dict": lambda: training.run.load_state_dict(training.run.state_dict()),
        "close": lambda: training.quietly(training.run.close),
        "step": lambda: None,
    }
    depths, _ = training.train(0, 5)
    if _rank() == place:
        try:
            calls[call]()
        except egeria.EgeriaError as error:
            told = str(error)
    if call == "step" and _rank() != place:
        training.run, run = None, training.run  # calls of run.step that are missing
        training.train(5, STEPS)
        training.run = run
    else:
        depths += training.train(5, STEPS)[0]
    ranks.TIMEOUT_S = 600
    weights = {name: entry.clone() for name, entry in training.model.state_dict().items() if "running" not in name}
    return told, " ".join(training.told), weights, depths, training.run and training.run.frozen


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("call", ["attach", "load_state_dict", "close", "step"])
def test_what_is_called_on_one_rank_alone_names_the_others_and_leaves_replicas_alike(call, place):
    found = run_ranks(called_alone, call, place)
    raised, said, weights, *_ = found[place]
    assert f"rank {1 - place} did not come to {'attach' if call == 'attach' else f'run.{call}'}" in raised + said
    assert is_equal(weights, found[1 - place][2])
    assert found[0][4] == found[1][4], "what is frozen on one rank is frozen on the other"


# --- fully_shard ----------------------------------------------------------------------------------


def train_encoder(is_sharded, policy, depths=None):
    """Train on the batches of both ranks, attached in parts or by hand as a whole, with an evaluation in between."""
    model = shard(encoder()) if is_sharded else encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"plan": PLAN} if policy == "plan" else {"policy": policy}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if is_sharded:
            run = egeria.attach(model, optimizer, total_steps=STEPS, directory=tempfile.mkdtemp(), **options)
        found = []
        for step in range(STEPS):
            if step in (5, 11):
                with torch.no_grad():
                    model(torch.zeros(2, 8))  # leaves the parameters of the root whole
            batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + r)) for r in range(2)]
            loss = model(batches[_rank()] if is_sharded else torch.cat(batches)).square().mean()
            loss.backward()
            if depths and step == 0:
                freeze_parts(model, depths[0])
            optimizer.step()
            optimizer.zero_grad()
            if is_sharded:
                run.step(loss)
                found.append(run.frozen)
            elif depths:
                freeze_parts(model, depths[step])
        if is_sharded:
            run.close()
    weights = [p.full_tensor() if is_sharded else p.detach() for p in model.parameters()]
    said = " | ".join(str(entry.message) for entry in told if issubclass(entry.category, egeria.EgeriaWarning))
    return found, weights, said


def freeze_parts(model, depth):
    for index, part in enumerate(model):
        part.requires_grad_(index >= depth)
        if index < depth:
            part.zero_grad()


def sharded(policy):
    depths, parts, told = train_encoder(True, policy)
    _, whole, _ = train_encoder(False, policy, depths)
    return depths, all(torch.allclose(*both, rtol=1e-4, atol=1e-5) for both in zip(parts, whole, strict=True)), told


@pytest.mark.parametrize("policy", ["plan", "egeria"])
def test_a_sharded_model_follows_a_plan_and_nothing_that_needs_plasticity(policy):
    found = run_ranks(sharded, policy)
    for depths, equal, _ in found:
        assert equal
        assert [depths[0], depths[8], depths[12], depths[-1]] == [2, 0, 3, 1] or policy != "plan"
        assert set(depths) == {0} or policy == "plan"
    told = found[0][2]
    assert told == "" if policy == "plan" else ("sharded by fully_shard" in told and "failed" not in told)
