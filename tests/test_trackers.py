"""What experiment trackers receive of a run: the real ones, read back, and anything that is called like them."""

import importlib

import pytest
import torch

import egeria
from egeria import ConfigError
from egeria.events import IntervalMeasured, ModuleFrozen, PlasticityRead
from menagerie import SPECIMENS
from scripted import frozen_loop, scripted_loop

PARTS = SPECIMENS["PartsByName"]
KEYS = {f"egeria/{name}" for name in ("frozen", "params_frozen", "time_saved_s", "plasticity", "overhead")}
ALL_KEYS = KEYS | {"egeria/compute_skipped"}


def trained(tmp_path, log_to, num_steps=20):
    """Train until something is frozen; return the closed run, and the journal's steps that trackers are to have."""
    run = frozen_loop(tmp_path / "run", num_steps, log_to=log_to).run
    run.close()
    return run


def steps_to_log(directory, num_steps):
    journal = egeria.read_journal(directory)
    steps = {event.step for event in journal if isinstance(event, (IntervalMeasured, PlasticityRead, ModuleFrozen))}
    return sorted(steps | {num_steps})


class Calls:
    def __init__(self):
        self.calls = []

    def __call__(self, values, step):
        self.calls.append((step, values))


def test_a_function_gets_the_numbers_once_for_each_step_that_brought_news(tmp_path):
    calls = Calls()
    run = trained(tmp_path, calls, num_steps=21)
    steps = [step for step, _ in calls.calls]
    assert steps == steps_to_log(run.directory, 21) and len(set(steps)) == len(steps) > 5
    assert calls.calls[-1][1].keys() == ALL_KEYS
    last, found = calls.calls[-1][1], egeria.report(run.directory).summary
    assert last["egeria/frozen"] == found.frozen > 0
    assert last["egeria/params_frozen"] == found.parameter_share
    assert last["egeria/compute_skipped"] == pytest.approx(found.skipped_share)
    assert last["egeria/time_saved_s"] == pytest.approx(found.wall.saved_s)
    assert last["egeria/overhead"] == pytest.approx(found.wall.overhead_share)


def test_what_is_no_tracker_is_refused(tmp_path):
    for given in ["tensorboard", 3, object(), [print, None], dict, torch.nn.Linear]:
        model = PARTS.build()
        with pytest.raises(ConfigError, match=r"log_to is TensorBoard's SummaryWriter.*found"):
            egeria.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), directory=tmp_path, log_to=given)
        assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_raises_is_dropped_with_one_warning_and_the_others_go_on(tmp_path):
    calls, broken = Calls(), []

    def breaks(values, step):
        broken.append(step)
        raise OSError("no space left")

    loop = scripted_loop(tmp_path, log_to=[breaks, calls])
    loop.step(12)
    loop.run.close()
    told = [message for message in loop.warned if "logged" in message]
    assert len(told) == 1 and "breaks could not be logged to (OSError: no space left)" in told[0]
    assert len(broken) == 1 and len(calls.calls) > 3


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_tensorboard_has_the_scalars(tmp_path):
    name = "tensorboard.backend.event_processing.event_accumulator"
    reader = pytest.importorskip(name, reason="the extra `nightly` is not installed")
    tensorboard = importlib.import_module("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path / "board") as writer:
        run = trained(tmp_path, writer, num_steps=21)
    board = reader.EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0}).Reload()
    assert set(board.Tags()["scalars"]) == ALL_KEYS
    frozen = board.Scalars("egeria/frozen")
    assert [point.step for point in frozen] == steps_to_log(run.directory, 21)
    assert frozen[0].value == 0 and frozen[-1].value == run.summary().frozen > 0
    assert board.Scalars("egeria/time_saved_s")[-1].value == pytest.approx(run.summary().time_saved_s, rel=1e-5)


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow with a store in one file, and no run active."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow", reason="the extra `nightly` is not installed")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.create_experiment("trackers", artifact_location=str(tmp_path / "artifacts"))
    mlflow.set_experiment("trackers")
    yield mlflow
    mlflow.end_run()
    mlflow.set_tracking_uri(before)


def check_mlflow(mlflow, run_id, run):
    client = mlflow.MlflowClient()
    assert set(client.get_run(run_id).data.metrics) == ALL_KEYS
    points = client.get_metric_history(run_id, "egeria/frozen")
    assert sorted(point.step for point in points) == steps_to_log(run.directory, 21)
    assert max(points, key=lambda point: point.step).value == run.summary().frozen > 0
    assert len(client.search_runs([client.get_run(run_id).info.experiment_id])) == 1


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # MLflow's own, of the libraries under it
def test_mlflow_has_the_scalars_in_the_run_that_was_active(mlflow, tmp_path):
    loop = scripted_loop(tmp_path / "run", log_to=mlflow)
    with mlflow.start_run() as active:
        loop.step(21)
    loop.run.close()  # after the run of MLflow has ended: what comes now must not open another
    check_mlflow(mlflow, active.info.run_id, loop.run)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # W&B's own
def test_wandb_has_the_scalars_offline(tmp_path, monkeypatch):
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(tmp_path),
        "WANDB__SERVICE_WAIT": "200",
    }.items():
        monkeypatch.setenv(name, value)
    wandb = pytest.importorskip("wandb", reason="the extra `nightly` is not installed")
    with wandb.init(project="trackers", dir=str(tmp_path)) as tracked:  # a second run of a process reads no WANDB_DIR
        tracked.log({"mine": 1.0})
        run = trained(tmp_path, tracked, num_steps=21)
        tracked.log({"mine": 2.0})
        logged = dict(tracked.summary)
    assert (logged["mine"], logged["egeria/step"], logged["egeria/frozen"]) == (2.0, 21, run.summary().frozen)
    assert logged.keys() >= ALL_KEYS
