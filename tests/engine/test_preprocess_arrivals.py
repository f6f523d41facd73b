"""Requests with media that arrive together begin one after the other, behind all other middleware of vLLM's server."""

from __future__ import annotations

import asyncio
import itertools
from argparse import Namespace
from importlib import import_module
from typing import Any

import pytest

from vllm_omni_sched import compat
from vllm_omni_sched.engine.preprocess.arrivals import OneByOne, with_one_by_one

pytestmark = pytest.mark.engine

JSON = {"type": "http", "headers": [(b"content-type", b"application/json")]}


class Application:
    """Notes which requests have begun, and when by the clock of the middleware."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.began_at: list[float] = []
        self.now = 0.0
        self.middleware = OneByOne(self, clock=lambda: self.now)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.begun.append(body.decode() or message["type"])
        self.began_at.append(self.now)
        await send(await receive())

    async def ask(self, *parts: str, scope: Any = JSON) -> Any:
        """Send a request in parts, and return what the application has got after its body."""
        messages = [{"type": "http.request", "body": part.encode(), "more_body": True} for part in parts]
        messages[-1]["more_body"] = False
        got: list[Any] = []

        async def receive() -> Any:
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            got.append(message)

        await self.middleware(scope, receive, send)
        return got


async def all_asked(application: Application, *asked: Any, step: float = 0.001) -> None:
    """Let requests arrive together, and the clock advance by a step with each look at it, until all have begun."""
    tasks = [asyncio.create_task(one) for one in asked]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.001)
        application.now += step
    await asyncio.gather(*tasks)


def test_requests_with_media_begin_one_after_the_other_and_others_at_once() -> None:
    application = Application()
    asked = [f'"image_url" {at}' for at in range(4)] + ["text 0", "a text on an image"]
    asyncio.run(all_asked(application, *map(application.ask, asked)))
    assert application.begun == [asked[0], *asked[4:], *asked[1:4]]
    pictures = [at for name, at in zip(application.begun, application.began_at, strict=True) if "image_url" in name]
    assert all(later - at >= 0.005 - 1e-9 for at, later in itertools.pairwise(pictures))


def test_none_waits_long_however_late_the_loop_is() -> None:
    application = Application()
    asyncio.run(all_asked(application, *(application.ask(f'"video" {at}') for at in range(4)), step=0.05))
    assert application.begun == [f'"video" {at}' for at in range(4)]
    assert application.began_at[1] >= 0.2


def test_it_is_behind_the_middleware_of_vllm() -> None:
    fastapi = pytest.importorskip("fastapi")
    module = import_module(compat.SERVER_APP)
    app = fastapi.FastAPI()

    def init(args: Namespace, app: Any, supported_tasks: Any) -> None:
        app.add_middleware(Theirs)

    with_one_by_one(init)(Namespace(), app, ("generate",))
    assert [one.cls for one in app.user_middleware] == [Theirs, OneByOne]
    assert callable(module.init_entrypoints_middleware)


class Theirs:
    """A middleware."""
