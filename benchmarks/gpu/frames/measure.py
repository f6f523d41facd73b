"""Time both ways from a file to frames on the device, in turns. Imports torch, but no vLLM."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.nvdec import WANTED
from benchmarks.harness.stats import Summary
from vllm_omni_sched.video.facts import VideoIndex
from vllm_omni_sched.video.frame_order import shown_frames
from vllm_omni_sched.video.service import FlashCodec

WARM_UP = 1  # starts the decoders

Choose = Callable[[VideoIndex], Sequence[int]]


def some_frames(index: VideoIndex) -> list[int]:
    total = shown_frames(index)
    return [int(number) for number in np.linspace(0, total - 1, min(WANTED, total), dtype=int)]


def all_frames(index: VideoIndex) -> list[int]:
    return list(range(shown_frames(index)))


def compared(
    name: str, data: bytes, stay: FlashCodec, through_host: FlashCodec, rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """Return a row for some frames of a video and one for all: seconds from the file until they are on the device.

    Args:
        stay: decodes, and leaves frames on the device.
        through_host: decodes to host memory, from where frames are copied to the device.
    """
    return [_one_task(name, data, choose, stay, through_host, rounds, device) for choose in (some_frames, all_frames)]


def _one_task(
    name: str,
    data: bytes,
    choose: Choose,
    stay: FlashCodec,
    through_host: FlashCodec,
    rounds: int,
    device: torch.device,
) -> dict[str, Any]:
    stayed: list[float] = []
    copied: list[float] = []
    wrong = 0
    for turn in range(WARM_UP + rounds):
        took, found, fallbacks = _timed(stay, data, choose, device)
        row = {"clip": name, "frames": len(found), "bytes": found.nbytes}
        if fallbacks:
            return {**row, "refused": ", ".join(fallbacks)}
        took_copied, host, fallbacks = _timed(through_host, data, choose, device)
        if fallbacks:
            return {**row, "refused": ", ".join(fallbacks)}
        wrong += int((found != host).flatten(1).any(1).sum()) if turn == 0 else 0
        del found, host  # further videos wait for this memory
        if turn >= WARM_UP:
            stayed.append(took)
            copied.append(took_copied)
    return {
        **row,
        "stay_seconds": Summary.of(stayed).as_dict(9),
        "host_seconds": Summary.of(copied).as_dict(9),
        "host_of_stay": statistics.median(b / a for a, b in zip(stayed, copied, strict=True)),
        "wrong": wrong,
    }


def _timed(
    codec: FlashCodec, data: bytes, choose: Choose, device: torch.device
) -> tuple[float, torch.Tensor, tuple[str, ...]]:
    """Return the seconds until the frames are on the device, the frames, and why they came another way."""
    began = time.perf_counter()
    decoded = codec.load(data, choose)
    frames = torch.as_tensor(decoded.frames).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, frames, decoded.report.fallbacks
