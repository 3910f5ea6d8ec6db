"""The same training under Ray Train, which starts its workers on one host or many, and again where they fail.

    python examples/cluster/ray_train.py --workers 2 --epochs 30
    python examples/cluster/ray_train.py --workers 1-2                as many as there is room for at the time
    ray job submit --working-dir . -- python examples/cluster/ray_train.py --workers 2

All other arguments are those of train.py; give `--directory` a place that all hosts have. A checkpoint is reported
after each epoch; where a worker dies, all begin again from the last one, on as many workers as there are then, with
what was frozen. Needs `pip install 'ray[train]>=2.51'`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import distributed, nn

HERE = Path(__file__).resolve().parent
STATES = "states.pt"


def train_in_worker(settings: dict[str, Any]) -> None:
    """Train in one worker of the job."""
    sys.path.insert(0, settings["folder"])  # the same on each host
    import train  # noqa: PLC0415

    class RayJob(train.Job):  # type: ignore[name-defined, misc]
        """Workers that Ray has joined, and checkpoints that it keeps: the state of the run is one part of them."""

        def prepare(self, model: nn.Module) -> nn.Module:
            wrapped: nn.Module = prepare_model(model)
            return wrapped

        def load(self, parts: dict[str, Any], run: Any) -> int:
            checkpoint = ray.train.get_checkpoint()
            if checkpoint is None:
                return 0
            with checkpoint.as_directory() as folder:
                saved = torch.load(Path(folder) / STATES, map_location="cpu", weights_only=True)
            for name, part in {**parts, "run": run}.items():
                part.load_state_dict(saved[name])
            return int(saved["epoch"])

        def save(self, parts: dict[str, Any], run: Any, epoch: int, metrics: dict[str, float]) -> None:
            metrics = {**metrics, "frozen": run.frozen}
            if distributed.is_initialized() and distributed.get_rank() > 0:
                ray.train.report(metrics)
                return
            with tempfile.TemporaryDirectory() as folder:
                states = {name: part.state_dict() for name, part in {**parts, "run": run}.items()}
                torch.save({**states, "epoch": epoch}, Path(folder) / STATES)
                ray.train.report(metrics, Checkpoint.from_directory(folder))

    train.train(train.parse(settings["arguments"]), RayJob())


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=_range, default=2, metavar="N or LEAST-MOST")
    parser.add_argument("--storage", help="where Ray keeps the run: a folder that all hosts have, or a bucket")
    parser.add_argument("--name", default="egeria-digits", help="of the run; one of a name that is there goes on")
    options, arguments = parser.parse_known_args()
    trainer = TorchTrainer(
        train_in_worker,
        train_loop_config={"folder": str(HERE), "arguments": arguments},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name=options.name, storage_path=options.storage, failure_config=FailureConfig(max_failures=10)
        ),
    )
    print(trainer.fit().metrics)


def _range(text: str) -> int | tuple[int, int]:
    least, _, most = text.partition("-")
    return (int(least), int(most)) if most else int(least)


if __name__ == "__main__":
    main()
