"""Fixtures and hooks for all tests."""

from __future__ import annotations

import pathlib
import signal
import uuid
import warnings
from collections.abc import Iterator
from typing import Any

import hosts
import pytest
import ranks
from object_server import BUCKET, Server

KILLS = "kills"  # a property of a test: a line for the summary
TABLES = "tables"  # likewise, several
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def pytest_configure() -> None:
    # If the tests run in the background of a shell, SIGINT is ignored, also in the ranks.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=4, help="torch ranks to kill")
    parser.addoption("--run-kills", type=int, default=20, help="training programs to kill")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:  # at once, because a run that CI stops has no summary
        print(f"\n{report.nodeid} failed:\n{report.longreprtext}", flush=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name in (KILLS, TABLES):
                terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def worlds() -> Iterator[ranks.Worlds]:
    """worlds[n] is a world of n real torch ranks."""
    all_worlds = ranks.Worlds()
    yield all_worlds
    all_worlds.close()


@pytest.fixture(autouse=True)
def _few_groups(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "worlds" in request.fixturenames:
        request.getfixturevalue("worlds").renew()


@pytest.fixture
def ckpt(tmp_path: pathlib.Path) -> str:
    """The path for a test's checkpoint."""
    return str(tmp_path / "ckpt")


@pytest.fixture(scope="session", name="object_server")
def server_of_objects() -> Iterator[Server]:
    """A server with a bucket."""
    with Server() as server:
        yield server


@pytest.fixture
def bucket(object_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place in the server's bucket for one test: "s3://...". The environment says where it is."""
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def short_leases() -> Iterator[None]:
    """A claim of a process that has died lapses within a second, or three by the server's clock."""
    from tilestone import _core

    set_period = _core._set_lease_period  # type: ignore[attr-defined]
    set_period(0.2)
    yield
    set_period(10)


@pytest.fixture
def two_hosts() -> Iterator[hosts.Hosts]:
    """Two hosts with a fast link."""
    made = hosts.Hosts()
    try:
        made.make()
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="session")
def stock() -> Any:
    """The modules of the installed Megatron-Core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import (  # noqa: F401
            dict_utils,
            mapping,
            optimizer,
            state_dict_utils,
            utils,
            validation,
        )
    return dist_checkpointing
