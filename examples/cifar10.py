"""Train a residual net on CIFAR-10, with egeria or plainly.

    python examples/cifar10.py --data DIR [--model resnet8|resnet20|resnet56] [--samples N]
                               [--epochs E] [--seed S] [--plain | --config FILE]

DIR holds the images as lossless WebP sheets of 100 x 100 tiles, one for each official batch, and
labels.npz. Step schedule: the learning rate falls tenfold at half and at three quarters of the run.
bf16 and channels_last on the CPU; an accelerator is used where torch finds one.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import egeria
from resnet import cifar_resnet

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1) * 255
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1) * 255


class Cifar10(Dataset):
    """Images as bytes [N, 3, 32, 32]; batches come normalised, and cropped and flipped for training."""

    def __init__(self, images: Tensor, labels: Tensor, generator: torch.Generator | None = None) -> None:
        self.images = functional.pad(images, (4, 4, 4, 4)) if generator else images
        self.labels = labels
        self.generator = generator

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        images = self.images[chosen]
        if self.generator is not None:
            images = self._augment(images)
        images = (images.float() - MEAN) / DEVIATION
        return images.to(memory_format=torch.channels_last), self.labels[chosen]

    def _augment(self, images: Tensor) -> Tensor:
        count = len(images)
        shifts = torch.randint(0, 9, (2, count, 1), generator=self.generator) + torch.arange(32)
        flipped = torch.rand(count, 1, generator=self.generator) < 0.5
        columns = torch.where(flipped, shifts[1].flip(1), shifts[1])
        rows = torch.arange(count)[:, None, None]
        return images.permute(0, 2, 3, 1)[rows, shifts[0][:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def load(root: Path, sheets: list[str]) -> tuple[Tensor, Tensor]:
    """Read sheets and their labels."""
    labels = np.load(root / "labels.npz")
    images = []
    for sheet in sheets:
        pixels = np.asarray(Image.open(root / f"{sheet}.webp").convert("RGB"))
        tiles = pixels.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(10000, 3, 32, 32)
        images.append(torch.from_numpy(np.ascontiguousarray(tiles)))
    return torch.cat(images), torch.cat([torch.from_numpy(labels[sheet].astype(np.int64)) for sheet in sheets])


def loaders(options: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Return the training and the test loader; only the sheets that are needed are read."""
    count = -(-options.samples // 10000)
    images, labels = load(options.data, [f"data_batch_{index}" for index in range(1, count + 1)])
    shuffling = torch.Generator().manual_seed(options.seed)
    augmenting = torch.Generator().manual_seed(options.seed + 1)
    train = Cifar10(images[: options.samples], labels[: options.samples], augmenting)
    test = Cifar10(*load(options.data, ["test_batch"]))
    together = {"collate_fn": lambda batch: batch}
    return (
        DataLoader(train, batch_size=128, shuffle=True, drop_last=True, generator=shuffling, **together),
        DataLoader(test, batch_size=500, **together),
    )


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train once; return the test accuracy and the seconds that training took, evaluation on the test set excluded."""
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader, test_loader = loaders(options)
    model = cifar_resnet(int(options.model.removeprefix("resnet"))).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    milestones = [options.epochs // 2, options.epochs * 3 // 4]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16)

    run = None
    if not options.plain:
        steps = len(loader) * options.epochs
        run = egeria.attach(
            model,
            optimizer,
            loader,
            scheduler=scheduler,
            total_steps=steps,
            config=options.config,
            directory=options.directory,
        )
    wall_s = cpu_s = accuracy = 0.0
    with run or nullcontext():
        for epoch in range(options.epochs):
            begin, begin_cpu = time.perf_counter(), time.process_time()
            model.train()
            for images, labels in loader:
                with autocast:
                    loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if run:
                    run.step(loss)
            scheduler.step()
            wall_s += time.perf_counter() - begin
            cpu_s += time.process_time() - begin_cpu
            accuracy = evaluate(model, test_loader, device, autocast)
            if run:
                run.log(accuracy=accuracy)
            frozen = f"  frozen {run.frozen}" if run else ""
            print(f"epoch {epoch + 1:3}  loss {loss.item():.3f}  accuracy {accuracy:.2%}  cpu {cpu_s:.0f} s{frozen}")
    if options.save:
        torch.save(model.state_dict(), options.save)
    return {"accuracy": accuracy, "wall_s": wall_s, "cpu_s": cpu_s}


def evaluate(network: torch.nn.Module, loader: DataLoader, device: torch.device, autocast: torch.autocast) -> float:
    """Return the share of test images classified correctly."""
    network.eval()
    correct = 0
    with torch.no_grad(), autocast:
        for images, labels in loader:
            correct += (network(images.to(device)).argmax(1).cpu() == labels).sum().item()
    return correct / len(loader.dataset)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--model", choices=["resnet8", "resnet20", "resnet56"], default="resnet8")
    parser.add_argument("--samples", type=int, default=50000, help="training images, from the front")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--plain", action="store_true", help="train without egeria")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings of egeria, as TOML")
    parser.add_argument("--save", type=Path, metavar="FILE", help="where the trained weights go")
    parser.add_argument("--directory", type=Path, help="where the journal and the report go")
    options = parser.parse_args(arguments)
    if not (options.data / "labels.npz").exists():
        parser.error(f"--data must hold labels.npz and the WebP sheets; {options.data} has none")
    if not 128 <= options.samples <= 50000:
        parser.error(f"--samples must be between 128 and 50000, found {options.samples}")
    return options


def main() -> None:
    options = parse()
    result = train(options)
    print(f"accuracy {result['accuracy']:.2%}  wall {result['wall_s']:.1f} s  cpu {result['cpu_s']:.1f} s")


if __name__ == "__main__":
    main()
