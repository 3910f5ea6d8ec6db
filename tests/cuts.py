"""What the tests of cuts share: how a model is watched and cut, and checks that hold for every cut of every model."""

import json

import torch
from torch import nn

from egeria.model.cut import Cut, make_modules, read_graph
from egeria.model.group import find_pieces
from egeria.model.watch import Watch


def cut(model, **options):
    """The submodules of each layer module, by its name, without a pass; the cut holds what every cut must."""
    modules = make_modules(model, **options)
    check_partition(model, modules)
    return {module.name: list(module.submodules) for module in modules}


def check_partition(model, modules):
    parameters = [name for module in modules for name in module.parameters]
    assert sorted(parameters) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert len({module.name for module in modules}) == len(modules)
    submodules = [name for module in modules for name in module.submodules]
    inside = [id(part) for name in submodules for part in model.get_submodule(name).modules()]
    assert len(inside) == len(set(inside)), "submodules overlap"
    leaves = {id(m) for m in model.modules() if not any(m.children()) and type(m).forward is not nn.Module.forward}
    assert leaves <= set(inside)
    assert sum(module.num_parameters for module in modules) == sum(p.numel() for p in model.parameters())
    assert abs(sum(module.share for module in modules) - 1) < 1e-6
    for module in modules:
        assert module.tap in module.submodules and module.reason.endswith(".")


def num_hooks(model):
    """How many hooks of ours are on a model; frameworks add some of their own in a pass."""
    tables = [table for part in model.modules() for table in (part._forward_pre_hooks, part._forward_hooks)]
    for parameter in model.parameters():
        tables += [parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}]
    return sum(hasattr(hook, "owner") for table in tables for hook in table.values())


def watched(model, step, passes=1):
    """A watch of some passes; `step(model, i)` returns the loss, or None where it went backward itself."""
    watch = Watch(model, find_pieces(model))
    watch.open()
    torch.manual_seed(1)
    for i in range(passes):
        loss = step(model, i)
        if loss is not None:
            loss.backward()
    watch.close()
    assert num_hooks(model) == 0 and not watch.failure
    return watch


def cut_behind(model, step, passes=1, **options):
    """The cut that training with this step would make before its first update."""
    watch = watched(model, step, passes)
    seen = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    found = read_graph(model, make_modules(model, watch=watch, seen=seen, **options), watch)
    assert Cut.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert (found.deepest == len(found.modules) - 1) == (found.reason == "")
    return found


def text_of(flags):
    return "".join("01"[flag] for flag in flags)


def check_depths(build, step, found):
    """What freezes at the deepest depth, and what a detached boundary changes, by doing it.

    A pass at this depth still has a gradient. A boundary that may be detached changes no gradient of what still
    trains, but those of weights that the front uses too.
    """
    for depth in {min(1, found.deepest), found.deepest} - {0}:
        detached, tied = _gradients(build, step, found, depth, detaches=True)
        assert detached, f"nothing trains at depth {depth}"
        assert not {name for module in found.modules[:depth] for name in module.parameters} & detached.keys()
        plain, _ = _gradients(build, step, found, depth, detaches=False)
        assert detached.keys() - tied == plain.keys() - tied
        assert all(torch.equal(plain[name], detached[name]) for name in plain.keys() - tied)


def _gradients(build, step, found, depth, *, detaches):
    """The gradients with the first layer modules frozen by hand, and what these hold."""
    torch.manual_seed(0)
    model, front = build(), found.modules[:depth]
    for name in (name for module in front for name in module.parameters):
        model.get_parameter(name).requires_grad_(False)

    def cut_off(_module, _args, output):
        if isinstance(output, tuple):
            return tuple(cut_off(None, None, entry) for entry in output)
        is_active = isinstance(output, torch.Tensor) and output.is_floating_point()
        return output.detach() if is_active else output

    if detaches and found.detaches[depth]:
        model.get_submodule(front[-1].tap).register_forward_hook(cut_off)
    torch.manual_seed(1)
    loss = step(model, 0)
    if loss is not None:
        loss.backward()
    held = {p for m in front for name in m.submodules for p in model.get_submodule(name).parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, {name for name, p in model.named_parameters() if p in held}


def numbered(prefix, start, stop):
    return [f"{prefix}.{i}" for i in range(start, stop)]


def on_meta(build, *arguments, **options):
    with torch.device("meta"):
        return build(*arguments, **options)
