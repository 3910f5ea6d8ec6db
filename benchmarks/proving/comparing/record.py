"""A record: a folder with README.md, pictures, and an archive of the journals they are made from and of the numbers."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.proving.comparing import archive
from benchmarks.proving.comparing.comparison import PolicyComparison, WorkloadComparison
from benchmarks.proving.comparing.description import describe
from benchmarks.proving.comparing.pictures import draw_all
from benchmarks.proving.comparing.results import Outcome
from benchmarks.proving.journal import FILE_NAME
from benchmarks.proving.running import runfile


def write_record(comparisons: Sequence[WorkloadComparison], folder: Path) -> None:
    """Write a record, journals and numbers packed; what an earlier comparison left in the same files is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {(comparison.workload.name, comparison.tier): draw_all(comparison, folder) for comparison in comparisons}
    with archive.unpacked(folder) as journals:
        for comparison in comparisons:
            for policy in comparison.policies:
                for outcome in policy.outcomes:
                    _keep(outcome, journals / outcome.run.place)
        text = json.dumps(_plain([to_dict(found) for found in comparisons]), indent=1, allow_nan=False)
        (journals / "results.json").write_text(text + "\n", encoding="utf-8")
    (folder / "README.md").write_text(describe(comparisons, pictures), encoding="utf-8")


def to_dict(comparison: WorkloadComparison) -> dict[str, Any]:
    """Return a comparison as plain values."""
    return {
        "workload": asdict(comparison.workload),
        "tier": comparison.tier,
        "base": comparison.base,
        "tolerance": comparison.tolerance,
        "recipe": comparison.policies[0].outcomes[0].run.recipe,
        "policies": [_policy_dict(comparison, policy) for policy in comparison.policies],
    }


def _policy_dict(comparison: WorkloadComparison, policy: PolicyComparison) -> dict[str, Any]:
    record = {name: value for name, value in vars(policy).items() if name not in ("outcomes", "unpaired")}
    return {
        **{name: _as_dict(value) for name, value in record.items()},
        "unpaired": list(policy.unpaired),
        "runs": [_run_dict(outcome) for outcome in policy.outcomes],
    }


def _run_dict(outcome: Outcome) -> dict[str, Any]:
    """Return what was computed from a run; what was measured, evaluation by evaluation, its journal holds."""
    return {
        "seed": outcome.run.seed,
        "settings": outcome.run.policy.settings,
        "made_with": outcome.run.made_with,
        "skipped": asdict(outcome.skipped),
        "spans": [asdict(span) for span in outcome.spans],
        "remarks": list(outcome.remarks),
    }


def _keep(outcome: Outcome, place: Path) -> None:
    """Copy a run's journal and what it is."""
    place.mkdir(parents=True, exist_ok=True)
    for name in (runfile.FILE_NAME, FILE_NAME):
        shutil.copyfile(outcome.directory / name, place / name)


def _as_dict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_dict(entry) for key, entry in value.items()}
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def _plain(value: Any) -> Any:
    """Return the value with None for each number that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
