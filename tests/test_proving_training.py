"""One training run of the bench."""

import dataclasses

import pytest
import torch
from benchmarks.proving.comparing.comparison import compare
from benchmarks.proving.comparing.results import read_outcome
from benchmarks.proving.journal import read_journal
from benchmarks.proving.policies import parse_policy
from benchmarks.proving.running.course import Course
from benchmarks.proving.running.recipe import describe
from benchmarks.proving.running.training import train
from benchmarks.rivals import shorten
from examples.resnet import cifar_resnet
from tests.pieces import CPU, new_training, wanted_run

pytestmark = pytest.mark.bench


@pytest.mark.parametrize("policy", ["none", "static:schedule=0.5:1"])
def test_looking_more_often_changes_nothing_but_what_is_seen(policy, tmp_path):
    seen, weights = {}, {}
    for count in (1, 3):
        training = dataclasses.replace(new_training(), evaluations_per_epoch=count)
        assert train(training, parse_policy(policy), tmp_path / str(count), CPU)
        seen[count] = {
            event["step"]: (event["values"]["epoch"], event["values"]["accuracy"])
            for event in read_journal(tmp_path / str(count)).of("metric")
        }
        weights[count] = training.model.state_dict()
    assert [epoch for epoch, _ in seen[1].values()] == [1, 2, 3, 4, 5]
    assert list(seen[3])[:6] == [10, 21, 32, 42, 53, 64]
    assert [epoch for epoch, _ in seen[3].values()][:6] == [10 / 32, 21 / 32, 1, 1 + 10 / 32, 1 + 21 / 32, 2]
    assert seen[1].items() <= seen[3].items()
    assert all(torch.equal(tensor, weights[3][name]) for name, tensor in weights[1].items())


@pytest.mark.parametrize("policy", ["none", "static:schedule=0.5:1"])
def test_the_judge_is_asked_once_at_the_end_and_decides_on_quality(policy, tmp_path):
    asked = []

    def judge(network):
        asked.append(network.training)
        return {"accuracy": 12.5}

    training = dataclasses.replace(new_training(), judge=judge)
    assert train(training, parse_policy(policy), tmp_path, CPU)
    assert asked == [False]
    logged = [event["values"] for event in read_journal(tmp_path).of("metric")]
    assert [values.get("judge_accuracy") for values in logged] == [None] * 4 + [12.5]
    assert all("accuracy" in values for values in logged)
    run = wanted_run(policy, recipe=describe(training))
    found = read_outcome(tmp_path, run)
    assert found.quality == 12.5 != found.final.value
    (comparison,) = compare([found], policy)
    assert comparison.policies[0].final.mean == 12.5
    without = read_outcome(
        tmp_path, dataclasses.replace(run, workload=dataclasses.replace(run.workload, metric="train_loss"))
    )
    assert without.quality == without.final.value


def changed_modules(training, steps):
    """Which of the four layers of the toy differ from before."""
    before = [[parameter.clone() for parameter in layer.parameters()] for layer in training.model]
    steps()
    return [
        any(not torch.equal(*pair) for pair in zip(layer.parameters(), values, strict=True))
        for layer, values in zip(training.model, before, strict=True)
    ]


def test_head_only_trains_nothing_but_the_last_module(tmp_path):
    training = new_training()
    policy = parse_policy("head-only")
    assert changed_modules(training, lambda: train(training, policy, tmp_path, CPU)) == [False] * 3 + [True]
    assert all(parameter.requires_grad for parameter in training.model.parameters())
    found = read_outcome(tmp_path, wanted_run("head-only", recipe=describe(training)))
    assert len(found.evaluations) == 5
    assert found.skipped.total == pytest.approx(2 / 3 * 6 / 7) and not found.skipped.forward  # widths 32, 32, 32, 16


def test_head_only_may_train_the_classifier_alone(tmp_path):
    training = dataclasses.replace(new_training(), model=cifar_resnet(20))
    course = Course(training, parse_policy("head-only:part=classifier"), tmp_path)
    course.begin_epoch(1)
    trained = [name for name, entry in training.model.named_parameters() if entry.requires_grad]
    course.close()
    assert len(trained) == 2 and trained == [name for name, _ in training.model.named_parameters()][-2:]
    assert all(parameter.requires_grad for parameter in training.model.parameters())


def test_half_fine_tuning_trains_another_half_in_each_epoch(tmp_path):
    resting, changed = [], []
    training = new_training()
    course = Course(training, parse_policy("hft"), tmp_path)

    def one_step():
        batch = next(iter(training.loader))
        training.loss(training.model.train(), batch).backward()
        resting.append([layer[0].weight.grad is None for layer in training.model[:3]])
        training.optimizer.step()
        training.optimizer.zero_grad()

    for epoch in range(1, 9):
        course.begin_epoch(epoch)
        changed.append(changed_modules(training, one_step))
    course.close()
    assert all(sum(rests) == 1 for rests in resting)  # of three modules, beside the last one
    assert len(set(map(tuple, resting))) > 1
    assert [[not rests for rests in found] + [True] for found in resting] == changed
    assert all(parameter.requires_grad for parameter in training.model.parameters())


def course_of_rates(training):
    """The learning rate of each step of an epoch-wise loop, and the batches of the first epoch."""
    rates, batches = [], []
    for epoch in range(training.num_epochs):
        for batch in training.loader:
            rates.append(training.optimizer.param_groups[0]["lr"])
            training.optimizer.step()
            training.scheduler.step()
            if epoch == 0:
                batches.append(batch[1].tolist())
    return rates, batches


def shortened(text):
    """Return the toy with the steps that a policy makes."""
    policy = parse_policy(text)
    return shorten(new_training(), policy.name, policy.settings)


@pytest.mark.parametrize("share", [0.75, 0.4, 0.01])
def test_a_shorter_training_goes_through_the_whole_schedule_in_a_share_of_the_steps(share):
    (plain, batches), (short, fewer) = (course_of_rates(shortened(text)) for text in ("none", f"short:share={share}"))
    kept = max(1, round(share * 32))
    assert len(plain) == 5 * 32 and len(short) == 5 * kept
    assert fewer == batches[:kept]
    assert short == [plain[step * 32 // kept] for step in range(5 * kept)]
    assert set(short) == set(plain)  # it falls at the end of the fourth of five epochs
