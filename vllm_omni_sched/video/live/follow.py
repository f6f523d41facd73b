"""Decoding of a file that still grows, as a stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_omni_sched.clock import Clock, monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import VideoInputError
from vllm_omni_sched.video.live.stream import LiveFrame, LiveVideo

_CHUNK = 1 << 18
_CHECK_SECONDS = 0.02  # between checks of a file that does not grow


def follow(
    path: str | os.PathLike[str],
    live: LiveVideo,
    *,
    idle_seconds: float = 10.0,
    is_complete: Callable[[], bool] = lambda: False,
    clock: Clock = monotonic_seconds,
    sleep: Callable[[float], None] = sleep_seconds,
) -> Iterator[LiveFrame]:
    """Feed a file to a stream as it grows, and yield the stream's frames; then end the stream and yield the rest.

    Args:
        path: path of a file that is only appended to.
        idle_seconds: the file has ended if it has not grown for so long; less than the stream's ``silence_seconds``.
        is_complete: returns whether nothing more will be appended.

    Raises:
        VideoInputError: the file cannot be read. Also all errors of `LiveVideo`.
    """
    try:
        file = Path(path).open("rb", buffering=0)  # noqa: SIM115 - only errors of opening are caught here
    except OSError as error:
        raise VideoInputError(f"live video: {error}") from error
    with file:
        grown = clock()
        while True:
            complete = is_complete()  # asked before reading, so that everything appended before is read
            chunk = file.read(_CHUNK)
            while chunk:
                chunk = chunk[live.feed(chunk, wait_seconds=_CHECK_SECONDS) :]
                grown = clock()
                yield from live.ready()
            yield from live.ready()
            if file.tell() < os.fstat(file.fileno()).st_size:
                continue
            if complete or clock() - grown >= idle_seconds:
                break
            sleep(_CHECK_SECONDS)
    live.end()
    yield from live
