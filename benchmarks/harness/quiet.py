"""A worker extension: the worker sleeps between messages, instead of polling for a second after each."""

from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition


class QuietWorker:
    """An extension without methods: importing this module has the effect."""


_init = SpinCondition.__init__


def _without_polling(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self.busy_loop_s = 0


SpinCondition.__init__ = _without_polling
