"""What the tests share."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import ranks

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def worlds() -> Iterator[ranks.Worlds]:
    """worlds[n]: n real torch ranks."""
    all_worlds = ranks.Worlds()
    yield all_worlds
    all_worlds.close()


@pytest.fixture
def ckpt(tmp_path: pathlib.Path) -> str:
    """Where a test's checkpoint goes."""
    return str(tmp_path / "ckpt")
