"""Classify images with a small residual network, in a loop of Hugging Face Accelerate.

    python examples/accelerate_images.py [--data DIR] [--steps N]
    accelerate launch examples/accelerate_images.py --mixed_precision bf16

DIR holds CIFAR-10, as examples/cifar10.py takes it; without it the digits of scikit-learn are trained on. The three
lines that end with "# egeria" are all that egeria needs; without them the loop trains plainly.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader

from egeria.integrations.accelerate import attach  # egeria
from resnet import cifar_resnet
from small_images import load_images


def train(options: argparse.Namespace) -> float:
    """Train, and return the share of test images that are classified correctly."""
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        cpu=not torch.cuda.is_available(),
        log_with="tensorboard" if options.tensorboard else None,
        project_dir=options.tensorboard,
    )
    if options.tensorboard:
        accelerator.init_trackers("images")
    torch.manual_seed(options.seed)
    images, held_out, channels = load_images(options.data)
    model = cifar_resnet(20, in_channels=channels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    # The scheduler is stepped once for each process, so that its length is that of one process.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps * accelerator.num_processes)
    loader = DataLoader(images, batch_size=64, shuffle=True, drop_last=True)
    test_loader = DataLoader(held_out, batch_size=256)
    model, optimizer, loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, loader, test_loader, schedule
    )
    run = attach(accelerator, model, optimizer, loader, schedule, total_steps=options.steps)  # egeria
    step = 0
    while step < options.steps:
        model.train()
        for inputs, labels in loader:
            loss = functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.step(loss)  # egeria
            step += 1
            if step == options.steps:
                break
        accuracy = evaluate(accelerator, model, test_loader)
        accelerator.log({"accuracy": accuracy}, step=step)
        accelerator.print(f"step {step:5}  loss {loss.item():.3f}  accuracy {accuracy:.2%}")
    accelerator.end_training()
    accelerator.print(f"accuracy {accuracy:.2%}")
    return accuracy


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the share of images classified correctly, over all processes."""
    model.eval()
    right = count = 0
    for inputs, labels in loader:
        with torch.no_grad():
            guesses = model(inputs).argmax(1)
        guesses, truths = accelerator.gather_for_metrics((guesses, labels))
        right += (guesses == truths).sum().item()
        count += len(truths)
    return right / count


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, default=630, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"], default="no")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="where TensorBoard's files go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
