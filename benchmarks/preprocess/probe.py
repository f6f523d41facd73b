"""Middleware of `vllm serve` that measures how late its event loop is.

It is named in ``--middleware``. Every process writes a file of its own into the folder that the environment names.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from pathlib import Path
from typing import Any

FOLDER = "OMNI_SCHED_LAG"
PERIOD_SECONDS = 0.002
SAMPLE = struct.Struct("dd")  # when it should have run, and how much later it did, in seconds


class Lag:
    """Starts to measure with the first request."""

    def __init__(self, app: Any) -> None:
        self._app, self._task = app, None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._task is None:
            self._task = asyncio.create_task(_measure())
        await self._app(scope, receive, send)


async def _measure() -> None:
    with (Path(os.environ[FOLDER]) / str(os.getpid())).open("ab") as file:
        flushed = time.monotonic()
        while True:
            due = time.monotonic() + PERIOD_SECONDS
            await asyncio.sleep(PERIOD_SECONDS)
            now = time.monotonic()
            file.write(SAMPLE.pack(due, now - due))
            if now - flushed > 0.2:
                file.flush()
                flushed = now


def lags(folder: Path, began: float, ended: float) -> list[float]:
    """Return how late an event that came at any moment of this time would have been noticed, in seconds.

    A stall is counted once for each period that it lasted, not once, as events come whether or not the loop stalls.
    """
    found = []
    for file in folder.iterdir():
        data = file.read_bytes()
        for due, lag in SAMPLE.iter_unpack(data[: len(data) - len(data) % SAMPLE.size]):
            if began <= due <= ended:
                while lag > 0:
                    found.append(lag)
                    lag -= PERIOD_SECONDS
    return found
