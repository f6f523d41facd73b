"""How much memory of the host is in use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_omni_sched.omni.stages.reports.memory import HostMemory


def test_it_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [SimpleNamespace(available=1, total=4), SimpleNamespace(available=3, total=4)]
    monkeypatch.setattr("psutil.virtual_memory", lambda: looks.pop(0))
    memory = HostMemory()
    assert [memory.used(now) for now in (0.0, 0.5, 1.0)] == [0.75, 0.75, 0.25]
