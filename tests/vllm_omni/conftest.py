"""Fixtures of the tests over the real vLLM-Omni; without it all of them skip."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from connector_support import short_directory
from omni_support import IMPORT_SECONDS, REQUIRE, STRIDE, Cast, Host, host_missing

from mori_mp.pipeline.free_ports import PortBlock


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first waits for the host's import."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "host" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(IMPORT_SECONDS + 60))


@pytest.fixture(scope="session")
def host() -> Host:
    """The server process that has imported vLLM-Omni."""
    problem = host_missing()
    if not problem:
        host = Host()
        problem = host.problem
        if not problem:
            return host
    if os.environ.get(REQUIRE):
        pytest.fail(problem)
    pytest.skip(problem)


@pytest.fixture
def cast(host: Host) -> Iterator[Cast]:
    """Stages that end with the test; two replicas of each have ports for themselves."""
    with short_directory() as runtime, PortBlock(reach=2 * STRIDE) as ports:
        cast = Cast(host, runtime, ports)
        try:
            yield cast
        finally:
            cast.close()
