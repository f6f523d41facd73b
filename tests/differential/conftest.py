from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _quiet_vllm() -> Iterator[None]:
    """Hundreds of schedulers are built here, and vLLM has something to say about each."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
