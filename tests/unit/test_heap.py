"""Where the memory of a process comes from that was forked from a thread."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_omni_sched import heap

PROGRAM = """
import os, resource, threading
from vllm_omni_sched import heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def buffers():
    for _ in range(12):
        kept = [bytearray(12 << 20) for _ in range(12)]
        del kept

def measured():
    buffers()
    before = faults()
    buffers()
    print(heap._on_main_heap(), faults() - before, flush=True)

def fork():
    [bytearray(1000) for _ in range(1000)]
    child = os.fork()
    if not child:
        heap.keep_freed_memory()
        HOW
        os._exit(0)
    os.waitpid(child, 0)

thread = threading.Thread(target=fork)
thread.start()
thread.join()
"""


def run(how: str) -> tuple[bool, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("HOW", how)], capture_output=True, text=True, check=True
    )
    main, faults = done.stdout.split()
    return main == "True", int(faults)


@pytest.mark.skipif(not heap.keep_freed_memory(), reason="this C library has no mallopt")
def test_a_fork_of_a_thread_gets_the_main_heap_and_keeps_its_memory() -> None:
    main, faults = run("heap.run_on_main_heap(measured)")
    elsewhere, more = run("measured()")
    assert main
    assert not elsewhere
    assert faults * 20 < more


def test_what_it_runs_ends_before_it_returns() -> None:
    ran: list[int] = []
    heap.run_on_main_heap(lambda: ran.append(1))
    assert ran == [1]
