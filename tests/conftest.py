"""Fixtures of the connector tests: connectors that are closed again, and proof that nothing is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from connector_support import Factory, StageProcess, no_leaks, short_directory
from wire_peers import V1Client, V2Client

_SHARED = "shared_"  # fixtures that keep connectors open over several tests start with this
_failed = pytest.StashKey[bool]()
Client = TypeVar("Client", V1Client, V2Client)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note failures: a traceback keeps connectors and buffers alive, which says nothing about leaks."""
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.fixture(scope="module")
def runtime_base() -> Iterator[Path]:
    """The module's own base of runtime directories."""
    with short_directory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MORI_MP_RUNTIME_DIR", str(path))
        yield path


@pytest.fixture(scope="module")
def module_factory(runtime_base: Path) -> Iterator[Factory]:
    """Makes connectors that live as long as the module; its users' names start with `shared_`."""
    with no_leaks(runtime_base):
        factory = Factory()
        try:
            yield factory
        finally:
            factory.close()


@pytest.fixture
def make_connector(runtime_base: Path) -> Iterator[Factory]:
    """Makes connectors that live as long as the test."""
    factory = Factory()
    try:
        yield factory
    finally:
        factory.close()


@pytest.fixture
def make_stage(runtime_base: Path) -> Iterator[type[StageProcess]]:
    """StageProcess, whose instances end with the test."""
    made: list[StageProcess] = []

    class Made(StageProcess):
        def __init__(self, **config: object) -> None:
            super().__init__(runtime_base, **config)
            made.append(self)

    yield Made
    for stage in made:
        stage.close()


@contextmanager
def _client_maker(kind: Callable[[int], Client]) -> Iterator[Callable[[int], Client]]:
    """Yield what makes clients at a port; they are closed in the end."""
    with ExitStack() as made:
        yield lambda port: made.enter_context(closing(kind(port)))


@pytest.fixture
def v1_client() -> Iterator[Callable[[int], V1Client]]:
    """Makes bare v1 receivers at a port."""
    with _client_maker(V1Client) as make:
        yield make


@pytest.fixture
def v2_client() -> Iterator[Callable[[int], V2Client]]:
    """Makes bare v2 receivers at a port."""
    with _client_maker(V2Client) as make:
        yield make


@pytest.fixture(autouse=True)
def leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that opened connectors and left a process, thread, descriptor, mapping or file behind.

    Tests over a module's shared connectors are checked as one, when those have been closed.
    """
    names = set(request.fixturenames)
    if not names & {"make_connector", "make_stage"} or any(name.startswith(_SHARED) for name in names):
        yield
        return
    with no_leaks(Path(os.environ["MORI_MP_RUNTIME_DIR"]), unless=lambda: _failed in request.node.stash):
        yield
