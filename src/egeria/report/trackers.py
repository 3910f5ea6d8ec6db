"""Experiment trackers: what each is sent, and how it takes it. None of them is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egeria.errors import ConfigError
from egeria.events import PlasticityRead
from egeria.report.summary import Summary

FOLDER = "egeria"
"""Where a tracker keeps the report."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracker:
    """One place where a run is logged to."""

    name: str
    log: Callable[[Mapping[str, float], int], object]  # takes values, and the optimizer step
    keep: Callable[[Path], object] | None = None  # takes a folder, where the tracker takes files


def find_trackers(log_to: Any) -> list[Tracker]:
    """Return what logs to each of the objects given to `attach`, recognised by its methods."""
    given = [] if log_to is None else log_to if isinstance(log_to, list) else [log_to]
    return [entry if isinstance(entry, Tracker) else _find(entry) for entry in given]


def _find(entry: Any) -> Tracker:
    is_class = isinstance(entry, type)
    for methods, make in _KINDS:
        if not is_class and all(callable(getattr(entry, name, None)) for name in methods):
            return make(entry)
    found = f"the class {entry.__name__}" if is_class else type(entry).__name__
    raise ConfigError(
        "log_to is TensorBoard's SummaryWriter, a W&B or Trackio run, the mlflow module, an "
        f"MlflowClient, a callable (values, step), or a list of these; found {found}. Give the "
        "object that you log with yourself."
    )


def _wandb(run: Any) -> Tracker:
    def log(values: Mapping[str, float], step: int) -> None:
        # With `step=` W&B would drop what the user logs at a lower one.
        run.define_metric("egeria/*", step_metric="egeria/step")
        run.log({**values, "egeria/step": step})

    def keep(folder: Path) -> None:
        run.log_artifact(str(folder), name="egeria-report", type="report")

    return Tracker(name="Weights & Biases", log=log, keep=keep)


def _mlflow(module: Any) -> Tracker:
    runs: dict[str, str] = {}

    def log(values: Mapping[str, float], step: int) -> None:
        module.log_metrics(dict(values), step=step, **runs)
        if not runs:  # it stays in this run, also when another is active later, or none
            runs["run_id"] = module.active_run().info.run_id

    def keep(folder: Path) -> None:
        module.log_artifacts(str(folder), artifact_path=FOLDER, **runs)

    return Tracker(name="MLflow", log=log, keep=keep)


def _mlflow_client(client: Any) -> Tracker:
    module = sys.modules.get("mlflow")
    active = module.active_run() if module is not None else None
    if active is None:
        what = "log_to takes an MlflowClient while a run of MLflow is active"
        raise ConfigError(f"{what}, found none. Call mlflow.start_run() before attach.")
    run_id = active.info.run_id

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            client.log_metric(run_id, name, value, step=step)

    def keep(folder: Path) -> None:
        client.log_artifacts(run_id, str(folder), artifact_path=FOLDER)

    return Tracker(name="MLflow", log=log, keep=keep)


def _function(function: Any) -> Tracker:
    name = getattr(function, "__qualname__", type(function).__name__)
    return Tracker(name=name, log=lambda values, step: function(dict(values), step))


def _tensorboard(writer: Any) -> Tracker:
    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(name="TensorBoard", log=log)


def _trackio(run: Any) -> Tracker:
    return Tracker(name="Trackio", log=lambda values, step: run.log(dict(values), step=step))


_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], Tracker]], ...] = (
    (("add_scalar",), _tensorboard),
    (("log_metrics", "log_artifacts", "active_run"), _mlflow),
    (("log_metric", "log_artifacts", "set_terminated"), _mlflow_client),
    (("log", "define_metric", "log_artifact"), _wandb),
    (("log", "finish"), _trackio),
    (("__call__",), _function),
)
"""What makes a tracker of an object that has these methods; the first match counts."""
