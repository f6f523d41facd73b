"""Admission in an engine that lends KV blocks: vLLM has no room for requests that `KvLending` does not admit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.request import Request, RequestStatus

from vllm_omni_sched.core.engine.lending import KvLending
from vllm_omni_sched.engine.scheduler_view import RequestPrompt, blocks_left


@contextmanager
def admission_by(lending: KvLending, manager: Any, block_tokens: int) -> Iterator[None]:
    """Ask ``lending`` about each waiting request for which vLLM asks for KV blocks, for the duration of the block.

    vLLM treats a request that is refused like one for which the free blocks do not suffice. Running requests are not
    asked about.
    """
    before = vars(manager).get("allocate_slots")
    allocate = manager.allocate_slots

    def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.status is RequestStatus.RUNNING:
            return allocate(request, *args, **kwargs)
        prompt, blocks = RequestPrompt(request), blocks_left(request, block_tokens)
        if not lending.may_admit(prompt, blocks):
            return None
        slots = allocate(request, *args, **kwargs)
        if slots is not None:
            lending.admitted(prompt, blocks)
        return slots

    manager.allocate_slots = allocate_slots
    try:
        yield
    finally:
        if before is None:
            del manager.allocate_slots
        else:
            manager.allocate_slots = before
