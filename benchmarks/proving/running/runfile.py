"""`run.json`: what a run is, how far it came, and what it was made with. Lies beside its journal."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.proving.policies import Policy

FILE_NAME = "run.json"
WAITING, RUNNING, PAUSED, FINISHED, FAILED = "waiting", "running", "paused", "finished", "failed"


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """What a comparison needs to know of a workload, so that it needs nothing but kept runs."""

    name: str
    metric: str
    higher_is_better: bool
    is_relative: bool
    paper: str
    is_held_out: bool = False


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """One run. `status` goes waiting, running, then finished or failed, or paused where its time was over."""

    status: str
    workload: WorkloadFacts
    module: str
    """Where the workload is from."""
    tier: str
    seed: int
    policy: Policy
    device: str
    error: str = ""
    pid: int = 0
    epoch: int = 0
    """Epochs in its checkpoint, where it has one; what is finished has none."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """What is trained and how, by `recipe.describe`."""
    made_with: dict[str, Any] = field(default_factory=dict)
    """Commit, versions and machine."""

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.workload.name} ({self.tier}), {self.policy.text}, seed {self.seed}"

    @property
    def place(self) -> Path:
        """Its directory, inside that of all results."""
        return Path(self.workload.name, self.tier, self.policy.folder, f"seed{self.seed}")

    def save(self, directory: Path) -> None:
        """Write the file in one piece: a reader never finds half of it."""
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = directory / f"{FILE_NAME}.new"
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(directory / FILE_NAME)


def load(directory: Path) -> RunFile | None:
    """Read the file of a directory; None where there is none, or where it cannot be read."""
    try:
        record = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
        workload, policy = WorkloadFacts(**record.pop("workload")), Policy(**record.pop("policy"))
        known = {entry.name for entry in fields(RunFile)}  # files of studies that are closed have more
        return RunFile(workload=workload, policy=policy, **{name: record[name] for name in known & record.keys()})
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None
