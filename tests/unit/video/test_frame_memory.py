"""Buffers for frames: allocated, kept by whoever looks at them, returned to the system."""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np
import pytest

from vllm_omni_sched.config.errors import VideoDeadlineError
from vllm_omni_sched.video.frame_memory import FrameBuffer, FrameMemory

MIB = 1 << 20


class Returned:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def returned() -> Returned:
    return Returned()


def now() -> float:
    return 0.0


def resident(memory: FrameMemory) -> int:
    return os.fstat(memory.fd).st_blocks * 512


def filled(room: FrameBuffer, value: int) -> np.ndarray:  # type: ignore[type-arg]
    array = room.array()
    array[:] = value
    return array


def test_room_stays_as_long_as_any_look_at_it(returned: Returned) -> None:
    memory = FrameMemory(64 * MIB, 0, returned)
    array = filled(memory.allocate(6 * MIB, now), 7)
    frames = array.reshape(3, 1024, 2048)[1:]
    one = frames[1, :, ::2]
    del array, frames
    memory.reclaim()
    assert (returned.count, memory.used_bytes) == (0, 6 * MIB)
    assert (one == 7).all()
    del one
    assert returned.count == 1
    memory.reclaim()
    assert memory.used_bytes == resident(memory) == 0
    memory.close()


def test_decoders_see_what_arrays_see(returned: Returned) -> None:
    memory = FrameMemory(8 * MIB, 0, returned)
    memory.allocate(1, now)
    room = memory.allocate(100, now)
    with mmap.mmap(memory.fd, 0) as decoders:
        decoders[room.start : room.start + 100] = b"x" * 100
    assert bytes(room.array()) == b"x" * 100
    memory.close()


def test_what_is_kept_is_used_again(returned: Returned) -> None:
    memory = FrameMemory(64 * MIB, 8 * MIB, returned)
    rooms = [filled(memory.allocate(4 * MIB, now), 1) for _ in range(5)]
    assert resident(memory) == 20 * MIB
    rooms.clear()
    memory.reclaim()
    assert resident(memory) == 8 * MIB
    again = filled(memory.allocate(6 * MIB, now), 1)
    assert resident(memory) == 8 * MIB
    more = filled(memory.allocate(6 * MIB, now), 1)
    assert resident(memory) == 12 * MIB
    del again, more
    memory.reclaim()
    assert resident(memory) == 8 * MIB
    memory.close()


def test_who_finds_no_room_waits(returned: Returned) -> None:
    memory = FrameMemory(4 * MIB, 0, returned)
    held = [memory.allocate(3 * MIB, now)]
    with pytest.raises(VideoDeadlineError, match="max_output_bytes"):
        memory.allocate(3 * MIB, now)
    got: list[FrameBuffer] = []
    thread = threading.Thread(target=lambda: got.append(memory.allocate(3 * MIB, lambda: 60.0)))
    thread.start()
    held.clear()
    while thread.is_alive():
        memory.reclaim()
        thread.join(0.01)
    assert len(got) == 1
    memory.close()


def test_nobody_can_cut_it_off(returned: Returned) -> None:
    memory = FrameMemory(8 * MIB, 0, returned)
    for nbytes in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, nbytes)
    memory.close()


def test_nobody_passes_the_first_who_waits(returned: Returned) -> None:
    """Otherwise a large video would wait as long as small ones arrive."""
    memory = FrameMemory(8 * MIB, 0, returned)
    held = [memory.allocate(6 * MIB, now)]
    got: list[int] = []
    asked = {8 * MIB: (0.0,), 2 * MIB: (1.0,)}  # the small one would fit now
    waits = {nbytes: threading.Event() for nbytes in asked}

    def take(nbytes: int) -> None:
        def wait() -> float:
            waits[nbytes].set()
            return 60.0

        room = memory.allocate(nbytes, wait, asked[nbytes])
        got.append(room.nbytes)

    threads = [threading.Thread(target=take, args=(nbytes,)) for nbytes in asked]
    for thread, event in zip(threads, waits.values(), strict=True):
        thread.start()
        assert event.wait(30.0)
    assert got == []
    held.clear()
    while any(thread.is_alive() for thread in threads):
        memory.reclaim()
        threads[0].join(0.01)
    assert got == [8 * MIB, 2 * MIB]
    memory.close()
