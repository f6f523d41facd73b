"""Replay a trace against a server: each request is sent at its time, whatever became of the others."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from benchmarks.backtest import EMBEDS
from benchmarks.backtest.traces import Planned, contents
from benchmarks.harness.server import MODEL_NAME
from vllm_omni_sched.engine.calibration.served import HttpClient


def replay(url: str, planned: Sequence[Planned], seed: int) -> list[dict[str, Any]]:
    """Return the times of each request, in seconds since the replay began: ``due``, ``sent`` and ``outputs``.

    Raises:
        RuntimeError: the server has counted other tokens of a request than the trace has.
    """
    return asyncio.run(_replay(url, planned, seed))


async def _replay(url: str, planned: Sequence[Planned], seed: int) -> list[dict[str, Any]]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector) as session:
        client = HttpClient(session, url, time.monotonic, MODEL_NAME)
        sent = [
            (one, client.body(c, one.output_tokens)) for one, c in zip(planned, contents(planned, seed), strict=True)
        ]
        gc.collect()
        gc.freeze()
        began = time.monotonic() + 0.2

        async def one(request: Planned, body: bytes) -> dict[str, Any]:
            await asyncio.sleep(began + request.at - time.monotonic())
            answer = await client.ask(body)
            expected = request.text_tokens + EMBEDS * request.pictures, request.output_tokens
            if (answer.prompt_tokens, answer.output_tokens) != expected:
                raise RuntimeError(
                    f"a request has {answer.prompt_tokens} and {answer.output_tokens} tokens by the server, and "
                    f"{expected[0]} and {expected[1]} by the trace"
                )
            return {
                "due": round(request.at, 6),
                "sent": round(answer.sent - began, 6),
                "outputs": [round(at - began, 6) for at in answer.outputs],
                "tokens": answer.output_tokens,
                "pictures": request.pictures,
            }

        return list(await asyncio.gather(*(one(*both) for both in sent)))
