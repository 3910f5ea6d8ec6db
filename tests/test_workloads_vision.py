"""The vision workloads: what is read, how it is cropped, what is judged, and that a setting fixes a run."""

import io
from dataclasses import replace
from zipfile import ZipFile

import pytest
import torch
from benchmarks.models.convnets import mobilenet_v2, resnet50
from benchmarks.models.segmentation import deeplabv3
from benchmarks.workloads.vision.metrics import accuracy, confusion, mean_iou
from benchmarks.workloads.vision.pictures import VOID, Pictures, Source
from benchmarks.workloads.vision.recipe import Recipe, step_schedule
from benchmarks.workloads.vision.task import Task, build
from benchmarks.workloads.vision.tinyimagenet20 import read_tinyimagenet20
from benchmarks.workloads.workload import Setting
from examples.resnet import cifar_resnet
from PIL import Image
from torch import nn

pytestmark = pytest.mark.bench

TINY = Recipe(
    num_train=24,
    num_held_out=8,
    size=(6, 8),
    crop=(5, 6),
    padding=1,
    num_epochs=2,
    batch_size=4,
    lr=0.1,
    weight_decay=0.0,
)


def setting(data, seed=0, tier="smoke"):
    return Setting(data=data, tier=tier, seed=seed, device=torch.device("cpu"))


def noise(count, height=6, width=8):
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, height, width, 3), generator=generator, dtype=torch.uint8)
    return Pictures(images, torch.arange(count).to(torch.uint8) % 3)


class Linear(nn.Module):
    """Scores three classes from the mean colour."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x.mean(dim=(2, 3)))


TASK = Task(
    name="tiny",
    measures=("accuracy",),
    paper="",
    read=lambda data, recipe: Source(noise(24), noise(8), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
    num_classes=3,
    network=lambda recipe: Linear(),
    recipes={"smoke": TINY},
)


def losses(training, count):
    """Train for some steps."""
    found = []
    training.model.train()
    for _, batch in zip(range(count), training.loader, strict=False):
        loss = training.loss(training.model, batch)
        loss.backward()
        training.optimizer.step()
        training.scheduler.step()
        training.optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_mean_iou_by_hand():
    truth = torch.tensor([0, 0, 0, 1, 1, 2, VOID, VOID])
    said = torch.tensor([0, 0, 1, 1, 2, 2, 0, 3])
    counts = confusion(said, truth, 4)
    assert counts.tolist() == [[2, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    # Intersection over union: 2/3, 1/3, 1/2; class 3 is neither there nor said outside the void.
    assert mean_iou(counts) == pytest.approx(50.0)
    assert accuracy(counts) == pytest.approx(100 * 4 / 6)
    # A class that is said but not there counts as zero.
    assert mean_iou(confusion(torch.tensor([0, 1]), torch.tensor([0, 0]), 3)) == pytest.approx(25.0)


def test_a_setting_fixes_the_run_and_the_seed_changes_it():
    first = losses(build(TASK, step_schedule, setting(None)), 6)
    assert losses(build(TASK, step_schedule, setting(None)), 6) == first
    assert losses(build(TASK, step_schedule, setting(None, seed=1)), 6) != first


def test_evaluation_judges_all_held_out_pictures():
    training = build(TASK, step_schedule, setting(None))
    with torch.no_grad():
        training.model.linear.weight.zero_()
        training.model.linear.bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
        # Eight pictures of classes 0, 1, 2, 0, 1, 2, 0, 1, all said to be of class 1.
        assert training.evaluate(training.model) == {"accuracy": pytest.approx(100 * 3 / 8)}


def test_pixels_that_are_void_give_no_loss():
    task = replace(TASK, network=lambda recipe: nn.Conv2d(3, 3, 1), measures=("miou", "accuracy"))
    images = noise(24).images
    targets = torch.zeros(24, 6, 8, dtype=torch.uint8)
    targets[:, :, 4:] = VOID
    source = Source(Pictures(images, targets), Pictures(images, targets), (0.5,) * 3, (0.25,) * 3)
    training = build(replace(task, read=lambda data, recipe: source), step_schedule, setting(None))
    inputs, labels = next(iter(training.loader))
    elsewhere = inputs.where(labels[:, None] == 0, 9.0)
    losses_of_both = [training.loss(training.model, (images, labels)).item() for images in (inputs, elsewhere)]
    assert not torch.equal(inputs, elsewhere) and losses_of_both[0] == losses_of_both[1] > 0
    with torch.no_grad():
        training.model.bias.copy_(torch.tensor([100.0, 0.0, 0.0]))
        assert training.evaluate(training.model) == {"miou": 100.0, "accuracy": 100.0}


def picture(value, mode="RGB", form="PNG", size=(8, 8)):
    stream = io.BytesIO()
    Image.new(mode, size, value).save(stream, form)
    return stream.getvalue()


def test_held_out_pictures_are_not_trained_on_and_classes_are_balanced(tmp_path):
    folder = tmp_path / "tinyimagenet20"
    folder.mkdir()
    ids = [f"n{label:02}" for label in range(20)]
    (folder / "classes.tsv").write_text("".join(f"{label}\t{ids[label]}\twords\n" for label in range(20)))
    # Red tells the class, green which picture of the class, blue the validation pictures.
    with ZipFile(folder / "train.zip", "w") as archive:
        for label in range(20):
            for number in range(5):
                archive.writestr(f"{ids[label]}/{ids[label]}_{number}.JPEG", picture((label, number, 0)))
    with ZipFile(folder / "val.zip", "w") as archive:
        for label in range(20):
            archive.writestr(f"{ids[label]}/val_{label}.JPEG", picture((label, 9, 255)))
    source = read_tinyimagenet20(tmp_path, replace(TINY, num_train=60, num_held_out=40, size=(4, 4)))
    trained = source.train.images[:, 0, 0].tolist()
    judged = source.held_out.images[:, 0, 0].tolist()
    assert sorted(trained) == [[label, number, 0] for label in range(20) for number in range(3)]
    assert sum(blue == 255 for *_, blue in judged) == 20
    assert all(number >= 3 for _, number, _ in judged)
    assert source.train.targets.tolist() == [red for red, *_ in trained]
    assert source.held_out.targets.tolist() == [red for red, *_ in judged]
    assert source.held_out.targets.bincount().tolist() == [2] * 20
    assert source.judged is None
    with_judge = read_tinyimagenet20(tmp_path, replace(TINY, num_train=60, num_held_out=20, num_judged=40, size=(4, 4)))
    assert torch.equal(with_judge.judged.images, source.held_out.images)
    assert len(with_judge.held_out.images) == 20
    assert all(image in judged for image in with_judge.held_out.images[:, 0, 0].tolist())


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_cifar_resnets_have_the_sizes_of_the_paper():
    for depth, expected in [(8, 75_290), (20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)]:
        with torch.device("meta"):
            assert count(cifar_resnet(depth)) == expected


def test_large_networks_have_the_sizes_of_the_literature():
    with torch.device("meta"):
        assert count(resnet50()) == 25_557_032
        assert count(mobilenet_v2()) == 3_504_872
        assert count(deeplabv3(num_classes=21)) == 39_638_869
