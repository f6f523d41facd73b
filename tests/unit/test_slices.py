"""Time slices of threads."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from typing import Any

import pytest

from vllm_omni_sched.slices import prefer_short_slices, slice_seconds

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64") or os.uname().sysname != "Linux", reason="needs Linux"
)


def in_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_gets_short_slices_and_keeps_its_niceness() -> None:
    def ask() -> tuple[bool, float, int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3)
        agreed = prefer_short_slices(0.0002)
        return agreed, slice_seconds(), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)

    before = slice_seconds()
    agreed, after, nice, policy = in_a_thread(ask)
    assert agreed
    assert after in (0.0002, before)  # kernels before 6.12 keep their own
    assert (nice, policy) == (3, os.SCHED_OTHER)
    assert slice_seconds() == before


def test_the_operators_policy_is_kept() -> None:
    def ask() -> tuple[bool, int]:
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))
        return prefer_short_slices(0.0002), os.sched_getscheduler(threading.get_native_id())

    assert in_a_thread(ask) == (False, os.SCHED_BATCH)
