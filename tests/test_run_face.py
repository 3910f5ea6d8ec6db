"""What a run shows of itself while it goes on, and the notices that it gives once."""

import logging
import subprocess
import sys
import warnings

import pytest
import torch

import egeria
from egeria import ConfigError, EgeriaWarning, read_journal
from egeria.events import Event, ModuleFrozen, PlasticityRead
from loops import FAST, Loop, outside
from menagerie import SPECIMENS
from scripted import frozen_loop, scripted_loop

PARTS = SPECIMENS["PartsByName"]


def tell(action):
    """Return what egeria warned of while something was done."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in found if each.category is EgeriaWarning]


def test_a_callback_sees_every_event_of_the_journal_from_then_on(tmp_path):
    loop, seen, found = scripted_loop(tmp_path), [], []
    loop.step(4)
    before = len(read_journal(tmp_path))
    loop.run.on_event(seen.append)
    loop.run.on_event(lambda event: found.append(read_journal(tmp_path).events[-1] == event))
    loop.run.on_event(lambda event: found.append(loop.run.summary().step == event.step))
    loop.step(16)
    loop.run.log(accuracy=0.5)
    loop.run.close()
    assert seen == list(read_journal(tmp_path).events[before:])
    assert all(found) and len(found) == 2 * len(seen)
    assert all(isinstance(event, Event) for event in seen) and any(isinstance(event, ModuleFrozen) for event in seen)


def test_a_callback_that_raises_is_dropped_with_one_warning_and_the_training_goes_on(tmp_path):
    loop, calls, others = scripted_loop(tmp_path), [], []

    def breaks(event):
        calls.append(event)
        raise ZeroDivisionError("of mine")

    loop.run.on_event(breaks)
    loop.run.on_event(others.append)
    told = tell(lambda: [loop.run.log(value=number) for number in range(3)])
    assert len(told) == 1 and "breaks, raised ZeroDivisionError: of mine" in told[0]
    assert len(calls) == 1 and len(others) == 3
    loop.step(20)
    assert loop.run.frozen > 0


def test_a_freeze_and_a_thaw_are_one_line_each(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="egeria")
    loop = scripted_loop(tmp_path)
    loop.step(30)
    for group in loop.optimizer.param_groups:
        group["lr"] /= 100
    loop.step(4)
    journal = read_journal(tmp_path)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]
    froze = [line for line in lines if " froze " in line]
    event = journal.first(ModuleFrozen)
    num_modules = len(loop.run.modules)
    share = f"{100 * event.parameter_share:.0f} % of the trainable parameters"
    assert froze[0] == f"step {event.step}: froze {event.name} (1 of {num_modules} layer modules, {share})"
    assert len(froze) == len(journal.of(ModuleFrozen))
    assert len([line for line in lines if "thawed all frozen layers" in line]) == 1
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_a_run_too_short_for_its_controller_process_says_so(tmp_path):
    loop = Loop(PARTS, {"config": FAST, "directory": tmp_path, "controller": "process"})
    loop.step(12)
    loop.run.close()
    assert "before the controller process came to it" in str(egeria.report(tmp_path))
    assert read_journal(tmp_path).of(PlasticityRead) == []


def assert_as_reported(run, directory):
    summary, found = run.summary(), egeria.report(directory).summary
    assert summary.time_saved_s is not None
    for name in ("step", "total_steps", "modules", "closed", "stage", "depths", "wall", "cpu", "skipped_share"):
        assert getattr(summary, name) == getattr(found, name), name
    return summary


def test_the_summary_is_what_the_report_says_of_the_journal_so_far(tmp_path):
    loop = frozen_loop(tmp_path, 20, total_steps=50)
    summary = assert_as_reported(loop.run, tmp_path)
    assert (summary.step, summary.total_steps, summary.closed) == (20, 50, False)
    assert summary.frozen == loop.run.frozen and len(summary.modules) == len(loop.run.modules)
    loop.run.close()
    assert assert_as_reported(loop.run, tmp_path).closed


def test_an_open_run_tells_all_that_egeria_took_so_far(tmp_path):
    logged = {}
    loop = scripted_loop(tmp_path, log_to=lambda values, step: logged.update({step: values.get("egeria/overhead")}))
    loop.step(20)
    during = loop.run.summary()
    reported = egeria.report(tmp_path).summary
    loop.run.close()
    after = loop.run.summary()
    evaluations = sum(event.wall_s for event in read_journal(tmp_path).of(PlasticityRead))
    assert evaluations < 0.8 * after.wall.overhead_s, "the test is empty if evaluations are all of it"
    assert 0.5 * after.wall.overhead_s < during.wall.overhead_s <= after.wall.overhead_s
    assert reported.wall.overhead_s == during.wall.overhead_s
    assert logged[20] > 0.5 * after.wall.overhead_share


def test_the_summary_counts_what_came_before_a_resume(tmp_path):
    loop = frozen_loop(tmp_path, 20)
    checkpoint = loop.save()
    loop.step(3)
    loop.run.close()
    resumed = scripted_loop(tmp_path)
    resumed.load(checkpoint)
    resumed.step(10)
    summary = assert_as_reported(resumed.run, tmp_path)
    assert summary.step == 30 and summary.frozen > 0
    resumed.run.close()
    assert_as_reported(resumed.run, tmp_path)


def test_the_repr_has_stage_depth_and_time_saved_and_the_end(tmp_path):
    loop = scripted_loop(tmp_path, total_steps=40)
    assert repr(loop.run) == "<egeria.Run: step 0 of 40, no layer modules yet, time saved not known>"
    loop.step(20)
    text, frozen = repr(loop.run), loop.run.frozen
    assert "step 20 of 40" in text and f"{frozen} of {len(loop.run.modules)} layer modules" in text
    assert text.endswith(" saved>") and "not known" not in text
    loop.run.close()
    assert "closed at step 20 of 40" in repr(loop.run) and f"{frozen} of" in repr(loop.run)


def test_a_second_attach_to_a_watched_model_is_refused_and_the_first_goes_on(tmp_path):
    loop = frozen_loop(tmp_path / "first", 20)
    before = outside(loop.model)
    with pytest.raises(
        ConfigError, match=r"no open run watches, in whole or in part, found one that <egeria.Run: step 20.*run\.close"
    ):
        egeria.attach(loop.model, loop.optimizer, config=FAST, directory=tmp_path / "second")
    assert outside(loop.model) == before and not (tmp_path / "second").exists()
    loop.step(4)
    assert loop.run.summary().step == 24


def test_a_run_that_an_interrupted_cell_of_a_notebook_left_is_gone_at_the_second_try(tmp_path):
    model = PARTS.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def cell(number):
        run = egeria.attach(model, optimizer, config=FAST, directory=tmp_path / str(number))
        raise KeyboardInterrupt(run.directory.name)

    kept = []  # stands for `sys.last_value`, which keeps the frames of the newest error
    for number, kind in enumerate((KeyboardInterrupt, ConfigError, KeyboardInterrupt)):
        with pytest.raises(kind) as error:
            cell(number)
        kept[:] = [error.value]
        del error


LATER = {"IPython", "jinja2", "matplotlib", "multiprocessing.pool", "psutil", "rich", "sklearn", "transformers"}
LATER |= {"accelerate", "datasets", "lightning", "mlflow", "peft", "tensorboard", "wandb"}
LATER |= {"torch._dynamo", "torch.ao.quantization", "torch.distributed.fsdp", "torch.onnx"}
"""What only parts of the library need, and what is loaded when they are used."""


def test_what_is_heavy_is_loaded_when_it_is_used():
    code = "import sys, torch; before = set(sys.modules); import egeria; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    found = set(done.stdout.split())
    assert {"egeria", "egeria.session.attach"} <= found
    assert found & LATER == set()
