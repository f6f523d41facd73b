"""Record what vLLM's renderer makes of pictures and sounds, by itself and with the preprocessing pool: a program.

`python -m tests.engine.harness.preprocessing MODEL` prints JSON: the digests of every request by both, what went
wrong and how, and what the metrics of the pool say.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.support.stopping import stop
from vllm_omni_sched.engine import unsent

PLACEHOLDERS = {
    "llava": "<image>",
    "qwen2-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2-audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}


def encoded(number: int, kind: str, size: tuple[int, int] = (90, 70)) -> bytes:
    """Return a picture of this kind as a file."""
    pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 4), dtype=np.uint8)
    image, out = Image.fromarray(pixels, "RGBA"), io.BytesIO()
    if kind == "alpha":
        image.save(out, "PNG")
    elif kind == "palette":
        image.convert("RGB").quantize(16).save(out, "PNG", transparency=0)
    elif kind == "keyed":
        image.convert("RGB").save(out, "PNG", transparency=(1, 2, 3))
    elif kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        image.convert("RGB").save(out, "JPEG", exif=exif)
    elif kind == "gray":
        image.convert("L").save(out, "JPEG")
    else:
        image.convert("RGB").save(out, kind)
    return out.getvalue()


KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "alpha", "palette", "keyed", "turned", "gray")


def pictures(load: Callable[[bytes], Any]) -> list[list[Any]]:
    """Return the items of requests: one picture of each kind, then several at once, of which some came before."""
    single = [[load(encoded(at, kind))] for at, kind in enumerate(KINDS)]
    several = [[load(encoded(100 + 3 * at + one, "JPEG")) for one in range(3)] for at in range(4)]
    again = [[load(encoded(0, "JPEG")), load(encoded(200, "PNG")), load(encoded(200, "PNG"))]]
    return [*single, *several, *again, [Image.new("RGB", (40, 30), (1, 2, 3))]]


def sounds() -> list[list[Any]]:
    rng = np.random.default_rng(0)
    return [[(rng.normal(size=4000 * (1 + at)).astype(np.float32), 16_000)] for at in range(3)]


def digest(value: Any) -> Any:
    """Return what a result consists of, with a hash in place of a tensor's content."""
    if isinstance(value, torch.Tensor):
        flat = value.contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return [str(value.dtype), list(value.shape), hashlib.sha256(content).hexdigest()]
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, Mapping):
        return {str(key): digest(one) for key, one in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [digest(one) for one in value]
    if hasattr(value, "data") and hasattr(value, "field"):  # an element of vLLM's arguments of a model
        return digest(value.data)
    return value if isinstance(value, (int, float, str, type(None))) else str(value)


def main(model: str) -> None:
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.renderers import renderer_from_config

    kind = Path(model).name
    kind = next(name for name in PLACEHOLDERS if kind.startswith(name))
    modality = "audio" if kind == "qwen2-audio" else "image"

    def requests() -> list[list[Any]]:
        return sounds() if modality == "audio" else pictures(ImageMediaIO().load_bytes)

    def made(renderer: Any, items: list[Any]) -> Any:
        ids = renderer.get_tokenizer().encode(PLACEHOLDERS[kind] * len(items) + "what?", add_special_tokens=False)
        return renderer._process_multimodal_async(ids, {modality: items}, None, None)

    async def one_by_one(renderer: Any) -> list[Any]:
        found = []
        for items in requests():
            found.append(await made(renderer, items))
            hashes, data = found[-1]["mm_hashes"][modality], found[-1]["mm_kwargs"][modality]
            unsent.mark_sent(mm_hash for mm_hash, item in zip(hashes, data, strict=True) if item is not None)
        return [digest(one) for one in found]

    async def together(renderer: Any) -> list[Any]:
        several = requests()[10:14] if modality == "image" else requests()
        return [digest(found) for found in await asyncio.gather(*(made(renderer, items) for items in several))]

    async def broken(renderer: Any) -> list[str]:
        found = []
        for data in (encoded(0, "JPEG")[:1500], b"no picture"):
            try:
                await made(renderer, [ImageMediaIO().load_bytes(data)])
            except ValueError as error:
                found.append(re.sub("0x[0-9a-f]+", "0x", str(error)))
        return found

    sides = {}
    results: dict[str, Any] = {"fallbacks": {}, "outcomes": {}}
    for side in ("stock", "ours"):
        renderer = renderer_from_config(config(model, side == "ours"))
        sides[side] = renderer
        if side == "ours":
            results["kills"] = asyncio.run(killed(renderer, made, together))
            renderer.clear_mm_cache()
        results[side] = {"one by one": asyncio.run(one_by_one(renderer))}
        renderer.clear_mm_cache()
        results[side]["together"] = asyncio.run(together(renderer))
        results[side]["broken"] = asyncio.run(broken(renderer)) if modality == "image" else []
        results[side]["switch seconds"] = sys.getswitchinterval()
    results["cancelled"] = asyncio.run(cancelled(sides["ours"], made, requests()[0]))
    for renderer in sides.values():
        renderer.shutdown()
    results |= counted()
    print(json.dumps(results))


def config(model: str, ours: bool) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    more: dict[str, Any] = {}
    if ours:
        more["scheduler_cls"] = "vllm_omni_sched.OmniScheduler"
        more["additional_config"] = {"omni_sched": {"preprocess": {"processes": 2}}}
    return EngineArgs(
        model=model, dtype="float32", enforce_eager=True, load_format="dummy", **more
    ).create_engine_config()


def pool_of(renderer: Any) -> Any:
    return renderer._process_multimodal_async.__self__._pool


async def killed(renderer: Any, made: Any, together: Any) -> Any:
    """Return what comes of requests whose processes are stopped, so that they are at work, and then killed."""
    pool = pool_of(renderer)
    for pid in pool.pids:
        stop(pid)
    task = asyncio.create_task(together(renderer))
    while pool._running < 2:
        await asyncio.sleep(0.01)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    return await task


async def cancelled(renderer: Any, made: Any, items: list[Any]) -> dict[str, Any]:
    """Return what is left of a request that is cancelled while its process works."""
    pool = pool_of(renderer)
    renderer.clear_mm_cache()
    for pid in pool.pids:
        stop(pid)
    task = asyncio.create_task(made(renderer, items))
    while pool._running < 1:
        await asyncio.sleep(0.01)
    task.cancel()
    (error,) = await asyncio.gather(task, return_exceptions=True)
    while pool._running:
        await asyncio.sleep(0.01)
    for pid in pool.pids:
        os.kill(pid, signal.SIGCONT)
    again = digest(await made(renderer, items))
    return {"error": type(error).__name__, "held_bytes": pool.held_bytes, "again": again}


def counted() -> dict[str, Any]:
    from prometheus_client import REGISTRY

    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return {
        key: {
            next(iter(sample.labels.values())): int(sample.value)
            for sample in samples
            if sample.name == f"vllm:omni_sched_preprocess_{key}_total" and sample.value
        }
        for key in ("jobs", "fallbacks")
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
