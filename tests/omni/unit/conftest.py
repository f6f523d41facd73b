"""What the machine that runs the tests is short of is not theirs."""

from __future__ import annotations

import pytest

from vllm_omni_sched.omni.stages.memory import HostMemory


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "used", lambda self, now: 0.0)
