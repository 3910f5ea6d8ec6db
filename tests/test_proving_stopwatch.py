"""What counts as training time."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest
import torch
from benchmarks.proving.running.stopwatch import Stopwatch

pytestmark = pytest.mark.bench

CPU = torch.device("cpu")


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def wait_for_cpu(child: psutil.Process, seconds: float) -> None:
    while child.cpu_times().user < seconds:
        time.sleep(0.01)


def test_work_in_a_halt_is_not_counted():
    watch = Stopwatch(CPU)
    watch.go()
    spin(0.1)
    watch.halt()
    spin(0.5)
    watch.go()
    spin(0.1)
    watch.halt()
    assert 0.2 <= watch.cpu_s < 0.45
    assert watch.wall_s >= 0.2


def test_a_child_from_before_counts_also_in_a_halt_and_one_of_the_halt_does_not():
    spinning = [sys.executable, "-S", "-c", "while True: pass"]
    watch = Stopwatch(CPU)
    watch.go()
    with subprocess.Popen(spinning) as controller:
        try:
            wait_for_cpu(psutil.Process(controller.pid), 0.1)
            watch.halt()
            before_s = watch.cpu_s
            assert before_s >= 0.1
            with subprocess.Popen(spinning) as loader:  # the evaluation's own
                wait_for_cpu(psutil.Process(loader.pid), 0.5)
                wait_for_cpu(psutil.Process(controller.pid), 0.3)
                loader.kill()
            controller_s = psutil.Process(controller.pid).cpu_times().user
            watch.go()
            watch.halt()
        finally:
            controller.kill()
    assert watch.cpu_s - before_s >= 0.1
    assert watch.cpu_s < controller_s + 0.35
