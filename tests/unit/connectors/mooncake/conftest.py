from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mooncake import Deployment, why_not
from vllm_omni_sched.connectors.mooncake import MooncakeTransport

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here: clients and masters notice each other's deaths after seconds, and look once a second."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.waits)


@pytest.fixture(scope="session")
def mooncake() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def shared(mooncake: None) -> Iterator[Deployment]:
    """Run one deployment for all tests of a module that leave it as it was."""
    with Deployment() as deployment:
        yield deployment


@pytest.fixture(scope="module")
def sender(shared: Deployment) -> MooncakeTransport:
    return shared.path(ttl_seconds=3600)


@pytest.fixture(scope="module")
def receiver(shared: Deployment) -> MooncakeTransport:
    return shared.path()


@pytest.fixture
def inside(shared: Deployment) -> Iterator[None]:
    """Run the test in the namespace of `shared`."""
    with shared.inside():
        yield


@pytest.fixture
def own(mooncake: None) -> Iterator[Deployment]:
    """Run a deployment that the test may break, and the test in its namespace."""
    with Deployment(client_ttl=2) as deployment, deployment.inside():
        yield deployment
