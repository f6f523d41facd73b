"""Starts processes that end with this one, whichever thread asks for them.

The kernel ends such a process with the *thread* that started it. Therefore a thread of our own, which ends with this
process, starts them, and not the thread of a request.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future

_Start = Callable[[], "subprocess.Popen[bytes]"]

_lock = threading.Lock()
_orders: queue.SimpleQueue[tuple[_Start, Future[subprocess.Popen[bytes]]]] | None = None


def start_for_life(start: _Start) -> subprocess.Popen[bytes]:
    """Start a process, on the thread that stays.

    Raises:
        OSError: it cannot be started.
    """
    global _orders
    with _lock:
        if _orders is None:
            orders: queue.SimpleQueue[tuple[_Start, Future[subprocess.Popen[bytes]]]] = queue.SimpleQueue()
            try:
                threading.Thread(target=_run, args=(orders,), name="omni-sched-live", daemon=True).start()
            except RuntimeError as error:
                raise OSError(str(error)) from None
            _orders = orders
        orders = _orders
    started: Future[subprocess.Popen[bytes]] = Future()
    orders.put((start, started))
    return started.result()


def _run(orders: queue.SimpleQueue[tuple[_Start, Future[subprocess.Popen[bytes]]]]) -> None:
    while True:
        _answer(*orders.get())


def _answer(start: _Start, started: Future[subprocess.Popen[bytes]]) -> None:
    try:
        started.set_result(start())
    except BaseException as error:  # noqa: BLE001 - the error is raised in the caller
        started.set_exception(error)


def _forget() -> None:
    """Reset the state in a forked child: the thread belongs to the parent."""
    global _orders, _lock
    _orders, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
