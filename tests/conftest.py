from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.core import validated
from vllm_omni_sched.logs import LOGGER


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Our records too: the logger `vllm`, under which ours are, passes none on to where pytest listens."""
    ours = logging.getLogger(LOGGER)
    propagated, level = ours.propagate, ours.level
    ours.addHandler(caplog.handler)
    ours.propagate = False  # else they come twice where vLLM has not set up its logger
    ours.setLevel(logging.INFO)  # vLLM's logger may have been made quieter by an import of its command line
    yield caplog
    ours.propagate = propagated
    ours.setLevel(level)
    ours.removeHandler(caplog.handler)


@pytest.fixture(scope="module")
def validated_core() -> Iterator[None]:
    """Check the laws of conservation of the pipeline core after every event."""
    with validated():
        yield
