"""Two processes under Ray Train.

    python examples/launch/ray_train.py

Ray starts the processes, on one host or many, and sets up their process group; the training is `examples/ddp.py` as
it is. Needs `pip install 'ray[train]'`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

EXAMPLES = Path(__file__).resolve().parent.parent


def train_in_worker(settings: dict[str, int]) -> None:
    """Run the script's own training in one process of the job."""
    sys.path.insert(0, str(EXAMPLES))
    import ddp  # noqa: PLC0415 (found on each host by the line above)

    ddp.train(ddp.parse(["--epochs", str(settings["epochs"])]))


def main() -> None:
    """Train in two processes, with a GPU each where there are any."""
    trainer = TorchTrainer(
        train_in_worker,
        train_loop_config={"epochs": 30},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name="egeria-ddp"),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
