"""A worker extension: the worker sleeps half a millisecond at a time between messages, instead of polling for a second.

vLLM's own way to wait without polling cannot be used for that: its notification may be lost, and the worker then sleeps
for five seconds.
"""

import math
import time
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast

SLEEP_SECONDS = 0.0005


class QuietWorker:
    """An extension without methods: importing this module has the effect."""


_init = shm_broadcast.SpinCondition.__init__


def _always_in_its_loop(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    if self.is_reader:
        self.busy_loop_s = math.inf


shm_broadcast.SpinCondition.__init__ = _always_in_its_loop
shm_broadcast.sched_yield = lambda: time.sleep(SLEEP_SECONDS)
