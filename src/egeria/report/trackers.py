"""Experiment trackers: what they are sent, and how each of them takes it. None of
them is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egeria.errors import ConfigError
from egeria.report.summary import Summary

FOLDER = "egeria"
"""Where a tracker keeps the report."""


def scalars(summary: Summary) -> dict[str, float]:
    """Return the values that trackers are sent; what is not known yet is left out.

    Returns:
        `egeria/frozen`: front layer modules that are frozen; `egeria/params_frozen`: share of the
        trainable parameters that is frozen; `egeria/compute_skipped`: share of the compute so far;
        `egeria/time_saved_s`: seconds of wall clock, less the overhead; `egeria/plasticity`: the
        newest reading; `egeria/overhead`: share of the training time.
    """
    known = {
        "egeria/frozen": float(summary.frozen),
        "egeria/params_frozen": summary.parameter_share,
        "egeria/compute_skipped": summary.skipped_share,
        "egeria/time_saved_s": summary.time_saved_s,
        "egeria/plasticity": summary.plasticity,
        "egeria/overhead": summary.overhead_share,
    }
    return {name: float(value) for name, value in known.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracker:
    """One place where a run is logged to."""

    name: str
    log: Callable[[Mapping[str, float], int], object]
    """Takes values by name, and the optimizer step."""
    keep: Callable[[Path], object] | None = None
    """Takes a folder of files as one artifact; None where the tracker takes no files."""


def find_trackers(log_to: Any) -> list[Tracker]:
    """Return what logs to each of the given objects, recognised by its methods.

    Args:
        log_to: TensorBoard's `SummaryWriter`, a W&B or Trackio run, the `mlflow` module, an
            `MlflowClient`, a callable `(values, step)`, a `Tracker`, or a list of these; None for
            nothing.

    Raises:
        ConfigError: one of them is none of these.
    """
    given = [] if log_to is None else log_to if isinstance(log_to, list) else [log_to]
    return [_find(entry) for entry in given]


def _find(entry: Any) -> Tracker:
    if isinstance(entry, Tracker):
        return entry
    for methods, make in _KINDS:
        if not isinstance(entry, type) and all(
            callable(getattr(entry, name, None)) for name in methods
        ):
            return make(entry)
    found = f"the class {entry.__name__}" if isinstance(entry, type) else type(entry).__name__
    raise ConfigError(
        "log_to is TensorBoard's SummaryWriter, a W&B or Trackio run, the mlflow module, an "
        "MlflowClient, a callable "
        f"(values, step), or a list of these; found {found}. Give the object that you log with "
        "yourself, or a "
        f"function that takes a dict of numbers and the step."
    )


def _tensorboard(writer: Any) -> Tracker:
    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(name="TensorBoard", log=log)


def _wandb(run: Any) -> Tracker:
    has_metric: list[bool] = []

    def log(values: Mapping[str, float], step: int) -> None:
        # With `step=` W&B would drop what the user logs at a lower one; an axis of our own is what
        # it advises.
        if not has_metric:
            run.define_metric("egeria/*", step_metric="egeria/step")
            has_metric.append(True)
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
        raise ConfigError(
            "log_to takes an MlflowClient while a run of MLflow is active, found none. Call "
            "mlflow.start_run() before "
            "attach, or give a function that calls client.log_metric with the id of your run."
        )
    run_id = active.info.run_id

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            client.log_metric(run_id, name, value, step=step)

    def keep(folder: Path) -> None:
        client.log_artifacts(run_id, str(folder), artifact_path=FOLDER)

    return Tracker(name="MLflow", log=log, keep=keep)


def _trackio(run: Any) -> Tracker:
    def log(values: Mapping[str, float], step: int) -> None:
        run.log(dict(values), step=step)

    return Tracker(name="Trackio", log=log)


def _function(function: Any) -> Tracker:
    def log(values: Mapping[str, float], step: int) -> None:
        function(dict(values), step)

    return Tracker(name=getattr(function, "__qualname__", type(function).__name__), log=log)


_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], Tracker]], ...] = (
    (("add_scalar",), _tensorboard),
    (("log_metrics", "log_artifacts", "active_run"), _mlflow),
    (("log_metric", "log_artifacts", "set_terminated"), _mlflow_client),
    (("log", "define_metric", "log_artifact"), _wandb),
    (("log", "finish"), _trackio),
    (("__call__",), _function),
)
"""Methods that tell what an object is; the first that fits."""
