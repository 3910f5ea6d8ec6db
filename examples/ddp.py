"""Train on handwritten digits in one process or in many: the same script, however it is started.

    python examples/ddp.py                                    one process
    torchrun --nproc-per-node 2 examples/ddp.py               one host
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/ddp.py
                                                              two hosts, the same line on both

`examples/launch` starts it under Slurm, Kubernetes and Ray; docs/launch.md says more. With --checkpoint it goes on from
the last epoch that ended, on the same number of processes or another. Needs scikit-learn, which has the digits.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from sklearn import datasets
from torch import distributed
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import egeria
from resnet import cifar_resnet

BATCH = 64


def join_job() -> tuple[int, int]:
    """Join the other processes, if there are any; return the rank of this one and their number.

    torchrun sets RANK and the rest; a launcher that has set up the process group already, as Ray has, is fine too.
    """
    if "RANK" in os.environ and not distributed.is_initialized():
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,348 digits of 8 x 8 pixels to train on and 449 to test with, enlarged to 16 x 16."""
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = functional.interpolate(images, scale_factor=2, mode="bilinear")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor(bunch.target)
    test, train = order[:449], order[449:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(options: argparse.Namespace) -> float:
    """Train, and return the share of test digits that are classified correctly."""
    rank, num_ranks = join_job()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.manual_seed(options.seed)
    digits, held_out = load_digits()
    sampler: DistributedSampler[Any] = DistributedSampler(digits, num_ranks, rank, seed=options.seed, drop_last=True)
    loader = DataLoader(digits, batch_size=BATCH // num_ranks, sampler=sampler, drop_last=True)
    model = cifar_resnet(20, in_channels=1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [options.epochs // 2])
    run = egeria.attach(
        model,
        optimizer,
        loader,
        scheduler=scheduler,
        total_steps=len(loader) * options.epochs,
        config={"controller": {"budget_share": 0.1}},  # a run of a minute is too short for the default of 0.75 %
        directory=options.directory,
    )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "run": run}
    first = load_checkpoint(options.checkpoint, parts, device)
    accuracy = 0.0
    with run:
        for epoch in range(first, options.epochs):
            sampler.set_epoch(epoch)
            run.model.train()  # wraps the model in DistributedDataParallel where there are several processes
            for images, labels in loader:
                loss = functional.cross_entropy(run.model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
            scheduler.step()
            accuracy = evaluate(model, held_out, device)
            run.log(accuracy=accuracy)
            if rank == 0:
                save_checkpoint(options.checkpoint, parts, epoch + 1)
                line = f"epoch {epoch + 1:3}  loss {loss.item():.3f}  accuracy {accuracy:.2%}  frozen {run.frozen}"
                print(line, flush=True)
    return accuracy


def evaluate(model: torch.nn.Module, held_out: TensorDataset, device: torch.device) -> float:
    """Return the share of digits classified correctly; each process does that for itself."""
    images, labels = held_out.tensors
    model.eval()
    with torch.no_grad():
        return (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()


def load_checkpoint(path: Path | None, parts: dict[str, Any], device: torch.device) -> int:
    """Bring all parts to where the last epoch ended, in every process; return how many epochs are done."""
    if path is None or not path.exists():
        return 0
    saved = torch.load(path, map_location=device, weights_only=False)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return int(saved["epoch"])


def save_checkpoint(path: Path | None, parts: dict[str, Any], epoch: int) -> None:
    """Write all parts; the file is replaced in one piece."""
    if path is not None:
        unfinished = path.with_suffix(".part")
        torch.save({**{name: part.state_dict() for name, part in parts.items()}, "epoch": epoch}, unfinished)
        unfinished.replace(path)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="written after each epoch, and gone on from")
    parser.add_argument("--directory", type=Path, help="where the journal and the report go")
    return parser.parse_args(arguments)


def main() -> None:
    """Train as the command line says."""
    accuracy = train(parse())
    if not distributed.is_initialized():
        print(f"accuracy {accuracy:.2%}")
        return
    if distributed.get_rank() == 0:
        print(f"accuracy {accuracy:.2%}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
