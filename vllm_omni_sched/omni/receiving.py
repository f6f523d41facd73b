"""Let the receiving thread of vLLM-Omni's transfer adapter sleep until a message is there, instead of polling."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_omni_sched.connectors.receive_queue import ReceiveCondition, ReceiveQueue
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

ADAPTER = "vllm_omni.distributed.omni_connectors.transfer_adapter.base"
"""Module of the adapter, which is imported where a stage has one."""

_MARK = "__omni_sched__"


def hook() -> None:
    """Wrap the loop of the receiving thread, in its imported module; may be called twice."""
    from vllm_omni.distributed.omni_connectors.transfer_adapter.base import OmniTransferAdapterBase

    original = OmniTransferAdapterBase.recv_loop
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def recv_loop(self: Any) -> None:
        prepare(self)
        original(self)

    setattr(recv_loop, _MARK, True)
    OmniTransferAdapterBase.recv_loop = recv_loop


def prepare(adapter: Any) -> None:
    """Replace the queue and the condition of an adapter's loop if its connector tells what it has missed.

    An adapter with another kind of queue or condition is left as it is: its loop is not the one that this is for.
    """
    missed: Callable[[], Any] | None = getattr(adapter.connector, "missed", None)
    queue, condition = getattr(adapter, "_pending_load_reqs", None), getattr(adapter, "_recv_cond", None)
    lock = getattr(adapter, "_receiver_state_lock", None)  # held while an entry is added
    if missed is None:
        return
    if type(queue) is not deque or type(condition) is not threading.Condition or lock is None:
        logger.warning("this vLLM-Omni receives in another way than expected; its stages poll for messages in turn")
        return
    with lock:
        adapter._pending_load_reqs = ours = ReceiveQueue(queue, missed)
    adapter._recv_cond = ReceiveCondition(condition, ours)
