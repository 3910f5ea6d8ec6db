"""Finding workloads: the registry's, and those of modules that the command line names."""

import importlib
from collections.abc import Sequence

from benchmarks.proving import RefusedError
from benchmarks.workloads.workload import Workload

REGISTRY = "benchmarks.workloads.registry"


def list_workloads(modules: Sequence[str]) -> list[tuple[str, Workload]]:
    """Return each workload behind the name of its module.

    Args:
        modules: dotted names; each has `WORKLOADS`.

    Raises:
        RefusedError: a module has none, or a name is given twice.
    """
    found: dict[str, tuple[str, Workload]] = {}
    for module in modules:
        for workload in _workloads(module):
            if workload.name in found:
                raise RefusedError(
                    f"A workload's name must be its own; {workload.name!r} is both in {found[workload.name][0]} and "
                    f"in {module}. Rename one."
                )
            found[workload.name] = (module, workload)
    return list(found.values())


def find_workloads(names: Sequence[str], modules: Sequence[str]) -> list[tuple[str, Workload]]:
    """Return the workloads of these names, in their order, each behind the name of its module.

    The modules are looked through before the registry, which is imported only for what is not in them.

    Raises:
        RefusedError: nobody has such a workload.
    """
    known = {workload.name: (module, workload) for module, workload in list_workloads(modules)}
    if any(name not in known for name in names):
        known = {workload.name: (module, workload) for module, workload in list_workloads((*modules, REGISTRY))}
    for name in names:
        if name not in known:
            raise RefusedError(f"There is no workload {name!r}. Choose from: {', '.join(sorted(known))}.")
    return [known[name] for name in names]


def _workloads(module: str) -> tuple[Workload, ...]:
    try:
        workloads: tuple[Workload, ...] = importlib.import_module(module).WORKLOADS
    except (ImportError, AttributeError) as error:
        raise RefusedError(
            f"{module} must be a module with WORKLOADS; it is not: {error}. Install what it needs, or correct the name."
        ) from error
    return workloads
