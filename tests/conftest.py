from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from vllm_omni_sched.logs import LOGGER


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Our records too: the logger `vllm`, under which ours are, passes none on to where pytest listens."""
    ours = logging.getLogger(LOGGER)
    propagated = ours.propagate
    ours.addHandler(caplog.handler)
    ours.propagate = False  # else they come twice where vLLM has not set up its logger
    yield caplog
    ours.propagate = propagated
    ours.removeHandler(caplog.handler)
