"""Sender or receiver of `benchmarks.gpu.ipc`, in a process of its own."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections import deque
from mmap import MAP_SHARED, mmap
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.ipc import EDGE, EDGE_OF_ORDER
from benchmarks.gpu.ipc.ends import PathEnd, TheirEnd, make
from benchmarks.harness.child import emit

WARM_UP = 4
HELD = 2  # messages that the receiver looks at again when as many have come after them
CYCLES = 200_000_000  # of a kernel before a tensor is written: about a tenth of a second
PATIENCE = 60.0  # seconds for one message

End = PathEnd | TheirEnd


class Device:
    """The GPU, or the host in the tests of the benchmark."""

    def __init__(self, name: str) -> None:
        self.name, self.is_cuda = name, name.startswith("cuda")

    def finish(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def be_busy(self) -> None:
        if self.is_cuda:
            torch.cuda._sleep(CYCLES)

    def is_busy(self) -> bool:
        return self.is_cuda and not torch.cuda.current_stream().query()


def main() -> None:
    role, taken, name, directory, run = sys.argv[1:]
    with Path(taken).open("r+b") as file:
        page = mmap(file.fileno(), 8, MAP_SHARED)
    counter = ctypes.c_int64.from_buffer(page)  # messages that the receiver has got
    device, ends = Device(name), dict[str, End]()
    torch.zeros(1, device=name)  # a receiver says which devices it can open once one is in use
    emit("ready")
    for line in sys.stdin:
        request = json.loads(line)
        variant, task = request.pop("variant"), request.pop("task")
        try:
            if variant not in ends:
                ends[variant] = make(variant, name, directory, run)
            found = TASKS[task, role](ends[variant], device, counter, **request)
        except Exception as error:  # noqa: BLE001 - a variant that cannot run here is told apart from the others
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        emit("done", **found)
    for end in ends.values():
        end.close()


def pattern(nbytes: int, number: int, device: str) -> torch.Tensor:
    """Return the content of message ``number``: (nbytes / 4,) int32, different in every element and message."""
    return torch.arange(nbytes // 4, dtype=torch.int32, device=device) + number * 1_000_003


def is_right(tensor: torch.Tensor, nbytes: int, number: int) -> bool:
    return torch.equal(tensor, pattern(nbytes, number, str(tensor.device)))


def await_count(counter: ctypes.c_int64, count: int) -> None:
    until = time.monotonic() + PATIENCE
    while counter.value < count:
        if time.monotonic() > until:
            raise TimeoutError("the receiver did not get a message in time")


def await_tensor(end: End, edge: tuple[str, str], key: str) -> tuple[torch.Tensor, float]:
    until = time.monotonic() + PATIENCE
    while (asked := time.monotonic()) < until:
        found = end.get(edge, key)
        if found is not None:
            return found, asked
    raise TimeoutError("a message did not come in time")


def send(
    end: End, device: Device, counter: ctypes.c_int64, nbytes: int, messages: int, label: str, start: int
) -> dict[str, Any]:
    begun, ended, before = [], [], on_device(end)
    for i in range(WARM_UP + messages):
        tensor = pattern(nbytes, i, device.name)
        device.finish()
        time.sleep(1e-3)  # the receiver is looking for it already
        begun.append(time.monotonic())
        end.put(EDGE, f"{label}-{i}", tensor)
        ended.append(time.monotonic())
        tensor.fill_(-1)  # it is the sender's again
        await_count(counter, start + i + 1)
    put = [after - begin for begin, after in zip(begun, ended, strict=True)]
    return {"begun": begun[WARM_UP:], "put": put[WARM_UP:], "on_device": on_device(end) - before}


def receive(
    end: End, device: Device, counter: ctypes.c_int64, nbytes: int, messages: int, label: str, start: int
) -> dict[str, Any]:
    got, took, wrong = [], [], 0
    held: deque[tuple[torch.Tensor, int]] = deque()
    for i in range(WARM_UP + messages):
        tensor, asked = await_tensor(end, EDGE, f"{label}-{i}")
        device.finish()
        got.append(time.monotonic())
        took.append(got[-1] - asked)
        wrong += not is_right(tensor, nbytes, i)
        held.append((tensor, i))
        del tensor
        if len(held) > HELD:
            old, number = held.popleft()
            wrong += not is_right(old, nbytes, number)
            del old
        counter.value = start + i + 1
    return {"got": got[WARM_UP:], "get": took[WARM_UP:], "wrong": wrong}


def send_late(
    end: End, device: Device, counter: ctypes.c_int64, nbytes: int, messages: int, label: str, start: int
) -> dict[str, Any]:
    """Call `put` right behind a long kernel and one that writes the tensor; count how often it returned first."""
    early = 0
    for i in range(WARM_UP + messages):
        final = pattern(nbytes, i, device.name)
        tensor = torch.full_like(final, -1)
        device.finish()
        device.be_busy()
        tensor.copy_(final)
        end.put(EDGE_OF_ORDER, f"{label}-{i}", tensor)
        early += device.is_busy() and i >= WARM_UP
        await_count(counter, start + i + 1)
    return {"early": early}


def receive_late(
    end: End, device: Device, counter: ctypes.c_int64, nbytes: int, messages: int, label: str, start: int
) -> dict[str, Any]:
    """Compare what arrives with what the late kernel has written; only the stream waits."""
    wrong = 0
    for i in range(WARM_UP + messages):
        tensor, _ = await_tensor(end, EDGE_OF_ORDER, f"{label}-{i}")
        wrong += not is_right(tensor, nbytes, i)
        del tensor
        counter.value = start + i + 1
    return {"wrong": wrong}


def on_device(end: End) -> int:
    """Tensors that have been sent without leaving the device."""
    return int(end.facts().get("device_tensors", 0))


TASKS = {
    ("time", "sender"): send,
    ("time", "receiver"): receive,
    ("order", "sender"): send_late,
    ("order", "receiver"): receive_late,
}

if __name__ == "__main__":
    main()
