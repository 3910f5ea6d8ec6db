"""What the tests of cuts share: one check that holds for every cut of every model."""

import json

import torch
from torch import nn

from egeria.layers.modules import LayerModule, parse_modules
from egeria.layers.order import OrderRecorder


def cut(model, **options):
    """The submodules of each layer module, by its name; the cut holds what every cut must."""
    modules = parse_modules(model, **options)
    check_partition(model, modules)
    return {module.name: list(module.submodules) for module in modules}


def check_partition(model, modules):
    names = [name for name, _ in model.named_parameters()]
    assert sorted(name for module in modules for name in module.parameters) == sorted(names)
    assert len({module.name for module in modules}) == len(modules)
    submodules = [name for module in modules for name in module.submodules]
    inside = [id(m) for name in submodules for m in model.get_submodule(name).modules()]
    assert len(inside) == len(set(inside)), "submodules overlap"
    leaves = {id(m) for m in model.modules() if not any(m.children()) and type(m).forward is not nn.Module.forward}
    assert leaves <= set(inside)
    for module in modules:
        assert module.tap in module.submodules
        assert module.num_parameters == sum(model.get_parameter(name).numel() for name in module.parameters)
        assert set(module.shared_parameters) <= set(module.parameters)
        assert module.reason.endswith(".")
        assert LayerModule.from_dict(json.loads(json.dumps(module.to_dict()))) == module


def run_order(model, forward):
    """What a session sees of the user's own first forward."""
    names = [name for module in parse_modules(model) for name in module.submodules]
    with torch.no_grad(), OrderRecorder(model, names) as recorder:
        forward()
    return recorder.order


def numbered(prefix, start, stop):
    return [f"{prefix}.{i}" for i in range(start, stop)]


def on_meta(build, *arguments, **options):
    with torch.device("meta"):
        return build(*arguments, **options)
