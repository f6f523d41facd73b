"""Middleware of vLLM's server: requests with media that arrive together begin one after the other, see `MediaTurns`.

vLLM begins all of them in the same turn of its event loop. Each takes the loop for some milliseconds, and meanwhile no
token is sent and no other request is read.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.preprocess.arrivals import MediaTurns

_PACE_SECONDS, _LATE_SECONDS, _MAX_WAIT_SECONDS = 0.005, 0.002, 0.2
_LOOK_SECONDS = 0.001  # between two looks at how late the loop is
_MEDIA = (b"image", b"audio", b"video")
_MEDIA_NAME = re.compile(rb'"(?:[a-z]+_)*(?:image|audio|video)s?(?:_[a-z]+)*"')
"""A whole string of JSON, such as "image_url" or "input_audio": a text may speak of images."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class OneByOne:
    """ASGI middleware. A request whose JSON body names media waits in it for its turn; all others pass.

    Args:
        app: the application behind it.
    """

    def __init__(self, app: Any, clock: Clock = monotonic_seconds) -> None:
        self._app, self._clock = app, clock
        self._turns = MediaTurns(_PACE_SECONDS, _LATE_SECONDS, _MAX_WAIT_SECONDS)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._looks = False  # whether `_look` will be called

    async def __call__(self, scope: Message, receive: Receive, send: Any) -> None:
        if scope["type"] == "http" and _is_json(scope):
            messages = await _body(receive)
            receive = _replayed(messages, receive)
            if any(_names_media(message.get("body", b"")) for message in messages):
                await self._wait()
        await self._app(scope, receive, send)

    async def _wait(self) -> None:
        number, begins = next(self._numbers), asyncio.get_running_loop().create_future()
        self._turns.add(number, self._clock())
        self._waiting[number] = begins
        if not self._looks:
            self._begin(0.0)
        try:
            await begins
        finally:  # also of a request that is cancelled
            del self._waiting[number]
            self._turns.remove(number)

    def _begin(self, late_seconds: float) -> None:
        """Let the next request begin, if it may, and come back while any waits."""
        now = self._clock()
        number = self._turns.begin(now, late_seconds)
        if number is not None and not self._waiting[number].done():
            self._waiting[number].set_result(None)
        self._looks = bool(self._turns)
        if self._looks:
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look, now + _LOOK_SECONDS)

    def _look(self, due: float) -> None:
        self._begin(self._clock() - due)


def _is_json(scope: Message) -> bool:
    return any(name == b"content-type" and b"json" in value for name, value in scope["headers"])


def _names_media(body: bytes) -> bool:
    # the names are looked for only where a cheap search finds one of the words: bodies have megabytes
    return any(kind in body for kind in _MEDIA) and _MEDIA_NAME.search(body) is not None


async def _body(receive: Receive) -> deque[Message]:
    """Return the messages of a request, up to the end of its body or its connection."""
    messages = deque([await receive()])
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _replayed(messages: deque[Message], receive: Receive) -> Receive:
    async def replay() -> Message:
        return messages.popleft() if messages else await receive()

    return replay


def with_one_by_one(init_middleware: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's function that adds the middleware of its server, with ours behind all other."""

    def wrapper(args: Any, app: Any, *rest: Any, **kwargs: Any) -> Any:
        from starlette.middleware import Middleware

        found = init_middleware(args, app, *rest, **kwargs)
        app.user_middleware.append(Middleware(OneByOne))
        return found

    return wrapper
