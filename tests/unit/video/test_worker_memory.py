"""A decoder process keeps what it has freed until a video ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, resource
from vllm_omni_sched import heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
BYTES = 8 << 20


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(BYTES)
    ctypes.memset(block, 1, BYTES)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


kept = heap.keep_freed_memory()
first, again = faults(), faults()
heap.return_free_memory()
print(int(kept), first, again, faults())
"""


def test_memory_stays_until_it_is_given_back() -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    kept, first, again, after = map(int, said.stdout.split())
    if not kept:
        pytest.skip("this C library has no such settings")
    assert again < first / 10
    assert after > first / 2
