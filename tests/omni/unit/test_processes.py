"""The processes of replicas: which they are, what they hold, and how they end."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni_sched.omni.stages import processes

pytestmark = pytest.mark.omni


def test_processes_are_measured_and_ended() -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        (found,) = processes.with_children([sleeping.pid, 2**22 + 12345])  # beyond what Linux gives
        assert found == psutil.Process(sleeping.pid)
        assert processes.host_bytes([found]) > 0
        processes.kill([psutil.Process(), found])  # never itself
        assert sleeping.wait(10) == -9
    assert processes.cpu_seconds([found]) is None
    assert processes.host_bytes([found]) == 0


def test_a_diffusion_client_has_one_process() -> None:
    client = SimpleNamespace(_proc_manager=SimpleNamespace(proc=SimpleNamespace(pid=7)))
    assert processes.pids_of(client) == [7]
    assert processes.pids_of(SimpleNamespace()) == []
