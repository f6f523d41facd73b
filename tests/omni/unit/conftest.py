"""Keep the memory of the machine that runs the tests out of them, and validate the pipeline core after every event."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.core import validated
from vllm_omni_sched.omni.stages.reports.memory import HostMemory


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "used", lambda self, now: 0.0)


@pytest.fixture(autouse=True, scope="module")
def validated_core() -> Iterator[None]:
    with validated():
        yield
