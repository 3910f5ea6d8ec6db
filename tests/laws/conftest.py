"""What the laws share."""

from __future__ import annotations

import pytest

from laws.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """A pair of processes of one process group, for all tests."""
    pair = Ranks()
    yield pair
    pair.close()
