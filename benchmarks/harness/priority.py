"""Keeps what an encoder does to the process's scheduling from staying."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_priority() -> Iterator[None]:
    """Give this thread its scheduling class back in the end.

    SVT-AV1 puts the thread that opens it into the real-time class with priority 99 where it may, as root, and leaves
    it there (`svt_av1_enc_init_handle`). What that thread starts then inherits it, and nobody else gets a processor.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)
