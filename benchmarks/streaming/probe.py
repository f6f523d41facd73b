"""Middleware of `vllm serve` that records when the API server sends each event of a stream.

It is named in ``--middleware``. Every process appends to a file of its own in the folder that the environment names.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FOLDER = "OMNI_SCHED_SENT"
REQUEST_ID = "x-request-id"


class Sent:
    """Writes the times of a response with its request's id, when it has ended."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request_id = dict(scope.get("headers", ())).get(REQUEST_ID.encode())
        if request_id is None:
            await self._app(scope, receive, send)
            return
        times: list[float] = []

        async def timed(message: Any) -> None:
            if message.get("body"):
                times.append(time.monotonic())
            await send(message)

        await self._app(scope, receive, timed)
        with (Path(os.environ[FOLDER]) / str(os.getpid())).open("a") as file:
            file.write(json.dumps([request_id.decode(), times]) + "\n")


def sent(folder: Path) -> dict[str, list[float]]:
    """Return when each event of each request was sent, on the monotonic clock, and forget it."""
    found: dict[str, list[float]] = {}
    for file in folder.iterdir():
        found |= dict(json.loads(line) for line in file.read_text().splitlines())
        file.write_text("")
    return found
