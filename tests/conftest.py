"""What every test starts from."""

import os
from pathlib import Path

import pytest
import torch

from ranks import forget_accelerate

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


@pytest.fixture(autouse=True)
def _one_thread():
    """Small models gain nothing from threads, and two test runs at once would fight over them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Runs without a directory make one where the process is; that must not be the checkout."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _own_accelerator():
    """What Accelerate keeps for the process is of one test."""
    yield
    forget_accelerate()


@pytest.fixture
def device() -> torch.device:
    """The device of EGERIA_TEST_DEVICE; the CPU without it."""
    return torch.device(os.environ.get("EGERIA_TEST_DEVICE", "cpu"))


@pytest.fixture
def data() -> Path:
    """Where the data sets lie beside a checkout; tests that need them skip without."""
    if not DATA.is_dir():
        pytest.skip(f"no data sets at {DATA}")
    return DATA
