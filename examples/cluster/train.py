"""Train on handwritten digits, alone or in a job of many: the same script and arguments, whoever starts it.

    python examples/cluster/train.py                              one process
    torchrun --nproc-per-node 2 examples/cluster/train.py         one host
    python examples/cluster/ray_train.py --workers 2              Ray, which starts failed workers again
    sbatch examples/cluster/slurm.sbatch                          Slurm
    kubectl apply -f examples/cluster/kubeflow.yaml               Kubernetes, with Kubeflow Trainer 2
    sky launch examples/cluster/sky.yaml                          SkyPilot, on any of them or in a cloud

docs/processes.md says more. A batch is made of two shards, and a process that has both takes one after the other: so
one process and two freeze at the same steps and come to the same losses, to the bit, and a job goes on in two
processes where it was begun in one. With --checkpoint it goes on from the last epoch that ended. Needs scikit-learn,
which has the digits.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

import egeria

SHARDS, SHARD_SIZE = 2, 32


class Transformer(nn.Module):
    """A small vision transformer; its norms know no batch, so that it does not matter how a batch is divided."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(torch.randn(16, width) / 50)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 1, 8, 8] to scores [B, 10]."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            tokens = block(tokens)
        scores: Tensor = self.head(self.norm(tokens.mean(1)))
        return scores


class Shards(Sampler[list[int]]):
    """Batches in a new order each epoch, the same in all processes, of which each takes its shards."""

    def __init__(self, num_samples: int, seed: int, rank: int, num_ranks: int) -> None:
        if SHARDS % num_ranks:
            raise SystemExit(f"A batch has {SHARDS} shards, which {num_ranks} processes cannot share. Start 1 or 2.")
        self.num_samples, self.seed, self.epoch = num_samples, seed, 0
        size = SHARDS // num_ranks * SHARD_SIZE
        self.own = slice(rank * size, (rank + 1) * size)

    def __iter__(self) -> Iterator[list[int]]:
        draw = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(self.num_samples, generator=draw)
        for batch in order[: len(self) * SHARDS * SHARD_SIZE].split(SHARDS * SHARD_SIZE):
            yield batch[self.own].tolist()

    def __len__(self) -> int:
        return self.num_samples // (SHARDS * SHARD_SIZE)


class Job:
    """The processes of a job, and a file with where it is; what another engine does in its own way is a method."""

    def __init__(self, checkpoint: Path | None = None) -> None:
        self.checkpoint = checkpoint

    def join(self) -> tuple[int, int]:
        """Join the other processes, if there are any; return the rank of this one and their number."""
        if "RANK" in os.environ and not distributed.is_initialized():  # torchrun sets it, and Kubeflow through torchrun
            distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return what the loop calls: the model, wrapped where there are other processes."""
        return DistributedDataParallel(model) if distributed.is_initialized() else model

    def load(self, parts: dict[str, Any], run: Any) -> int:
        """Bring all parts to where the last epoch ended, in every process; return how many epochs are done."""
        is_there = self.checkpoint is not None and self.checkpoint.exists()
        found = [is_there]
        if distributed.is_initialized():
            found *= distributed.get_world_size()
            distributed.all_gather_object(found, is_there)
        if any(found) and not all(found):
            raise SystemExit(f"Not all hosts have {self.checkpoint}. Put it on storage that all of them mount.")
        if self.checkpoint is None or not is_there:
            return 0
        saved = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        for name, part in {**parts, "run": run}.items():
            part.load_state_dict(saved[name])
        return int(saved["epoch"])

    def save(self, parts: dict[str, Any], run: Any, epoch: int, metrics: dict[str, float]) -> None:
        """Write all parts, on the first process; the file is replaced in one piece."""
        run.log(**metrics)
        if self.checkpoint is None or (distributed.is_initialized() and distributed.get_rank() > 0):
            return
        unfinished = self.checkpoint.with_suffix(".part")
        states = {name: part.state_dict() for name, part in {**parts, "run": run}.items()}
        torch.save({**states, "epoch": epoch}, unfinished)
        unfinished.replace(self.checkpoint)


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,348 digits of 8 x 8 pixels to train on and 449 to test with."""
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor(bunch.target)
    test, train = order[:449], order[449:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(options: argparse.Namespace, job: Job) -> float:
    """Train, and return the share of test digits that are classified correctly."""
    rank, num_ranks = job.join()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # the digits are small, and a sum that is divided among threads is another one
    torch.manual_seed(options.seed)
    digits, held_out = load_digits()
    sampler = Shards(len(digits), options.seed, rank, num_ranks)
    loader = DataLoader(digits, batch_sampler=sampler)
    model = Transformer().to(device)
    network = job.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    total_steps = len(loader) * options.epochs
    shape = partial(warmup_and_decay, num_warm=len(loader), num_steps=total_steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    run = egeria.attach(
        network,
        optimizer,
        loader,
        scheduler=scheduler,
        total_steps=total_steps,
        plan=options.freeze,
        directory=options.directory,
    )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    accuracy = 0.0
    with run:
        for epoch in range(job.load(parts, run), options.epochs):
            sampler.epoch = epoch
            losses = train_epoch(network, run, loader, optimizer, scheduler)
            accuracy = evaluate(model, held_out, device)
            metrics = {"loss": losses, "accuracy": accuracy, "epoch": epoch + 1, "processes": num_ranks}
            job.save(parts, run, epoch + 1, metrics)
            if rank == 0:
                line = f"epoch {epoch + 1:3}  loss {losses!r}  accuracy {accuracy:.2%}  frozen {run.frozen}"
                print(line, flush=True)
    return accuracy


def warmup_and_decay(step: int, num_warm: int, num_steps: int) -> float:
    """Return the learning rate at a step as a share of its largest."""
    return min((step + 1) / num_warm, max(0.0, 1 - step / num_steps))


def train_epoch(network: nn.Module, run: Any, loader: Any, optimizer: Any, scheduler: Any) -> float:
    """Train an epoch; return the mean loss over all processes, added up in the order of the shards."""
    rank, num_ranks = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    device = next(network.parameters()).device
    sums = torch.zeros(SHARDS, dtype=torch.float64, device=device)
    own = SHARDS // num_ranks
    network.train()
    for images, labels in loader:
        losses: list[Tensor] = []
        shards = zip(images.to(device).chunk(own), labels.to(device).chunk(own), strict=True)
        for shard in shards:
            loss = functional.cross_entropy(network(shard[0]), shard[1])
            (loss / own).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.step(torch.stack(losses).mean())
        sums[rank * own : (rank + 1) * own] += torch.stack(losses).double()
    if distributed.is_initialized():
        distributed.all_reduce(sums)
    return float(sum(sums.tolist()) / SHARDS / len(loader))


def evaluate(model: nn.Module, held_out: TensorDataset, device: torch.device) -> float:
    """Return the share of digits classified correctly; each process does that for itself."""
    images, labels = held_out.tensors
    model.eval()
    with torch.no_grad():
        return (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="written after each epoch, and gone on from")
    parser.add_argument("--directory", help="where the journal and the report go")
    plan = "share of the training done : front layer modules frozen from then on (default: '0.5:2 0.75:4')"
    parser.add_argument("--freeze", metavar="PLAN", default="0.5:2 0.75:4", help=plan)
    return parser.parse_args(arguments)


def main() -> None:
    """Train as the command line says."""
    options = parse()
    accuracy = train(options, Job(options.checkpoint))
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        print(f"accuracy {accuracy:.2%}")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
