"""What the laws share."""

from __future__ import annotations

import pytest

from laws.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """A pair of processes of one process group, for all tests."""
    pair = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pair
    pair.close()
