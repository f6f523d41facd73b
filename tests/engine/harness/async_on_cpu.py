"""Async scheduling on the CPU: vLLM's CPU platform turns it off, although the runner can do it.

What the runner asks of CUDA there is a stream to copy sampled tokens on and events to wait for. On the CPU a copy is
done when it returns, so both may do nothing. With that, the engine core's batch queue, `AsyncScheduler`'s placeholders
and the runner's use of the previous step's tokens all run for real; only the overlap in time is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


class _Done:
    """Stands for an event of work that is over, and for a stream without work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass


@contextmanager
def _on_stream(_: Any) -> Iterator[None]:
    yield


@contextmanager
def async_scheduling_on_cpu() -> Iterator[None]:
    """Engines of this process that are configured, built and run inside of this schedule asynchronously."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_but_keep_async(config: Any) -> None:  # also called for the configs of a model's parts
        check(config)
        config.scheduler_config.async_scheduling = True

    with (
        mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(check_but_keep_async)),
        mock.patch.multiple(torch.cuda, Event=_Done, Stream=_Done, current_stream=_Done, stream=_on_stream),
    ):
        yield
