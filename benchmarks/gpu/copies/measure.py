"""Time the copies, each many times. Imports torch, but no vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.copies import IMAGE_EMBEDS, PIECES
from benchmarks.gpu.lanes.models import HIDDEN
from benchmarks.harness.stats import Summary
from vllm_omni_sched.engine.ahead.host_messages import HostOrders
from vllm_omni_sched.engine.ahead.host_store import HostStore

HEIGHT, WIDTH = 720, 1280
WARM_UP = 2


def host_tier(embeds: Sequence[int], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each size: seconds to keep an encoding in host memory and to restore it, by `HostStore`."""
    rows = []
    for size in embeds:
        encoding = torch.randn(size, HIDDEN, dtype=torch.bfloat16).to(device)
        store, wrong = HostStore(8 * encoding.nbytes), 0
        kept, restored = [], []
        for turn in range(WARM_UP + rounds):
            name, cache = f"{size}-{turn}", {f"{size}-{turn}": encoding}
            back: dict[str, torch.Tensor] = {}
            took = _seconds(device, partial(store.before_frees, HostOrders(keep=((name, 1),)), cache))
            took_back = _seconds(device, partial(store.restore, HostOrders(restore=(name,)), back))
            wrong += not torch.equal(back[name].cpu(), encoding.cpu())
            store.before_frees(HostOrders(drop=(name,)), {})
            if turn >= WARM_UP:
                kept.append(took)
                restored.append(took_back)
        rows.append(
            {
                "task": "host tier",
                "embeds": size,
                "bytes": encoding.nbytes,
                "keep_seconds": Summary.of(kept).as_dict(9),
                "restore_seconds": Summary.of(restored).as_dict(9),
                "wrong": wrong,
            }
        )
    return rows


def stitch(frames: Sequence[int], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each number of frames: seconds to put pieces together on the device, and through host memory."""
    rows = []
    for number in frames:
        each = number // PIECES
        pieces = [torch.full((each, HEIGHT, WIDTH, 3), n, dtype=torch.uint8).to(device) for n in range(PIECES)]
        whole = torch.zeros(number, HEIGHT, WIDTH, 3, dtype=torch.uint8).to(device)
        host = torch.zeros(whole.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")

        row: dict[str, Any] = {"task": "stitch", "frames": number, "bytes": whole.nbytes, "wrong": 0}
        ways = {"device": partial(_on_device, whole, pieces), "host": partial(_through_host, whole, host, pieces)}
        for name, run in ways.items():
            whole.zero_()
            took = [_seconds(device, run) for _ in range(WARM_UP + rounds)][WARM_UP:]
            row[f"{name}_seconds"] = Summary.of(took).as_dict(9)
            found = whole.cpu()
            row["wrong"] += sum(not bool((found[n * each : (n + 1) * each] == n).all()) for n in range(PIECES))
        rows.append(row)
    return rows


def _on_device(whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    for part, piece in zip(whole.chunk(len(pieces)), pieces, strict=True):
        part.copy_(piece)


def _through_host(whole: torch.Tensor, host: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    for part, piece in zip(host.chunk(len(pieces)), pieces, strict=True):
        part.copy_(piece, non_blocking=True)
    whole.copy_(host, non_blocking=True)


def encode(rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return one row: seconds for each embedding of a ViT-L/14 that encodes one image at a time."""
    from benchmarks.gpu.lanes.models import VisionTower

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        tower = VisionTower().eval().to(device)
        images = torch.randn(1, 3, 336, 336).to(device)
    finally:
        torch.set_default_dtype(before)
    with torch.inference_mode():
        took = [_seconds(device, lambda: tower(images, lambda: None)) for _ in range(WARM_UP + rounds)][WARM_UP:]
    return [{"task": "encode", "embeds": IMAGE_EMBEDS, "encode_seconds": Summary.of(took).as_dict(9)}]


def _seconds(device: torch.device, run: Callable[[], Any]) -> float:
    _wait(device)
    began = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
