"""Ends of every kind of path, for the suites over all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.transport_kinds import TRANSPORTS, Kind, Open
from vllm_omni_sched.connectors.transport import Transport


@pytest.fixture(params=TRANSPORTS, ids=lambda kind: kind.__name__)
def open_end(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens as many ends of one path as a test wants."""
    kind: Kind = request.param
    with kind() as open_end:
        yield open_end


@pytest.fixture
def sender(open_end: Open) -> Transport:
    return open_end()


@pytest.fixture
def receiver(open_end: Open) -> Transport:
    return open_end()
