"""Experiment trackers: what each is sent, and how it takes it. None of them is imported."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from egeria.errors import ConfigError
from egeria.events import PlasticityRead
from egeria.report.summary import Summary

Log: TypeAlias = Callable[[Mapping[str, float], int], object]


class Tracker(NamedTuple):
    """One place where a run is logged to."""

    name: str
    log: Log  # takes values, and the optimizer step


def scalars(summary: Summary) -> dict[str, float]:
    """Return the values that trackers are sent; what is not known yet is left out."""
    reading = summary.last(PlasticityRead)
    known = {
        "egeria/frozen": summary.frozen,
        "egeria/params_frozen": summary.parameter_share,
        "egeria/compute_skipped": summary.skipped_share,
        "egeria/time_saved_s": summary.time_saved_s,
        "egeria/plasticity": reading.value if reading else None,
        "egeria/overhead": summary.wall.overhead_share,
    }
    return {name: float(value) for name, value in known.items() if value is not None}


def find_trackers(log_to: Any) -> list[Tracker]:
    """Return what logs to each of the objects given to `attach`, recognised by its methods."""
    given = [] if log_to is None else log_to if isinstance(log_to, list) else [log_to]
    return [entry if isinstance(entry, Tracker) else _find(entry) for entry in given]


def _find(entry: Any) -> Tracker:
    is_class = isinstance(entry, type)
    for name, methods, log in _KINDS:
        if not is_class and all(callable(getattr(entry, method, None)) for method in methods):
            own_name = getattr(entry, "__qualname__", type(entry).__name__)
            return Tracker(name=name or own_name, log=partial(log, entry, {}))
    found = f"the class {entry.__name__}" if is_class else type(entry).__name__
    raise ConfigError(
        "log_to is TensorBoard's SummaryWriter, a W&B or Trackio run, mlflow, a callable "
        f"(values, step), or a list of these; found {found}. Give what you log with yourself."
    )


def _tensorboard(writer: Any, _: Any, values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)


def _mlflow(module: Any, kept: dict[str, str], values: Mapping[str, float], step: int) -> None:
    module.log_metrics(values, step=step, **kept)
    if not kept:  # it stays in this run, also when another is active later, or none
        kept["run_id"] = module.active_run().info.run_id


def _wandb(run: Any, _: Any, values: Mapping[str, float], step: int) -> None:
    # With `step=` W&B would drop what the user logs at a lower one.
    run.define_metric("egeria/*", step_metric="egeria/step")
    run.log({**values, "egeria/step": step})


# Name of an object that has these methods, and what logs to it; the first match counts. It takes
# the object, a dictionary for what it must remember, values and step.
_KINDS: tuple[tuple[str, tuple[str, ...], Callable[..., object]], ...] = (
    ("TensorBoard", ("add_scalar",), _tensorboard),
    ("MLflow", ("log_metrics", "active_run"), _mlflow),
    ("Weights & Biases", ("log", "define_metric"), _wandb),
    ("Trackio", ("log", "finish"), lambda run, _, values, step: run.log(values, step=step)),
    ("", ("__call__",), lambda function, _, values, step: function(values, step)),
)
