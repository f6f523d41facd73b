"""Keep vLLM-Omni's thread that sends chunks away from the requests that its scheduler has parked.

While a request waits for a chunk, the scheduler keeps it in a deque of the transfer adapter. The thread that sends a
request's last chunk takes that request out of these deques, too, one element after the other and without a lock. Under
bursts the scheduler then reads a deque that changes: the engine ends with "deque mutated during iteration", or a
request that was just between two ends of the deque is lost (vLLM-Omni 0.30). The scheduler takes out its finished
requests itself, so the other thread need not.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import MutableMapping
from typing import Any

VARIABLE = "VLLM_OMNI_SCHED_PARKED"
ADAPTER = "vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter"
"""Module of the adapter, which is imported where a stage exchanges chunks."""

_MARK = "__omni_sched_parked__"


def in_stages(environ: MutableMapping[str, str], on: bool) -> None:
    """Set whether the stages that this process starts from now on are to be guarded."""
    if on:
        environ[VARIABLE] = "1"
    else:
        environ.pop(VARIABLE, None)


def hook() -> None:
    """Guard the adapter in its imported module, in stages that were asked to; may be called twice."""
    if VARIABLE not in os.environ:
        return
    from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter

    save_loop, discard = OmniChunkTransferAdapter.save_loop, OmniChunkTransferAdapter._discard_from_chunk_deque
    if hasattr(discard, _MARK):
        return
    this_thread = threading.local()

    @functools.wraps(save_loop)
    def sending(self: Any) -> None:
        this_thread.sends = True
        save_loop(self)

    @functools.wraps(discard)
    def discard_in_scheduler(parked: Any, request_id: str) -> None:
        if not getattr(this_thread, "sends", False):
            discard(parked, request_id)

    setattr(discard_in_scheduler, _MARK, True)
    OmniChunkTransferAdapter.save_loop = sending
    OmniChunkTransferAdapter._discard_from_chunk_deque = staticmethod(discard_in_scheduler)
