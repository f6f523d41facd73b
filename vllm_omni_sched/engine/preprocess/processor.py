"""The HF processor of a model in the processes of the pool, and vLLM's processor with its results at hand.

The pool is forked when vLLM has built its renderer, so every process has the model's processor as it is here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import PreprocessError, UnsupportedValueError
from vllm_omni_sched.engine.preprocess.metrics import Fallback
from vllm_omni_sched.engine.preprocess.pictures import UndecodedPicture
from vllm_omni_sched.graph.order import SlaClass
from vllm_omni_sched.preprocess.pool import Job, PreprocessPool
from vllm_omni_sched.preprocess.values import Pixels

Items = dict[str, list[Any]]
_PLANNERS = 2

_PIXEL_MODES = ("L", "RGB", "RGBA")


class AheadJob:
    """The job of one request, and the items and arguments that it was made for."""

    def __init__(self, job: Job, items: Items, kwargs: Mapping[str, object]) -> None:
        self.job, self.items, self.kwargs = job, items, dict(kwargs)


class PooledProcessor:
    """Lets vLLM's processor use the pool.

    1. The items of a request that no cache has are found ahead of its turn, and their job runs while other requests
       take theirs. When it is done, vLLM's own code runs in its turn, and finds the result at hand.
    2. If that code asks for other items, because a cache has gained or lost some meanwhile, they become a job then.
    3. Embeddings, and items of types that are not sent between processes, are left to vLLM.

    Args:
        renderer: vLLM's renderer.
        pool: its processes have the renderer's processor.
        class_of_request: returns the class of the request of this task.
    """

    def __init__(
        self,
        renderer: Any,
        pool: PreprocessPool,
        observe: Callable[[Fallback], None],
        class_of_request: Callable[[], SlaClass],
    ) -> None:
        self._renderer, self._pool, self._observe, self._class = renderer, pool, observe, class_of_request
        self._thread = threading.local()  # `.ahead`: the job of the request whose turn it is on this thread
        self._planners = ThreadPoolExecutor(_PLANNERS, thread_name_prefix="omni-sched-preprocess-ahead")

    def attach(self) -> None:
        """Replace, on this renderer alone, the entrance of requests and the call of the HF processor."""
        for processor in compat.processors_of(self._renderer):
            processor._apply_hf_processor_main = partial(self._apply_hf_processor, processor._apply_hf_processor_main)
        self._renderer._process_multimodal_async = self._process_multimodal

    def close(self) -> None:
        """End the pool."""
        self._planners.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    async def _process_multimodal(self, *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        plan = self._planners.submit(self._plan, self._class(), *args, **kwargs)
        try:
            ahead = await asyncio.wrap_future(plan)
            if ahead is not None:
                await asyncio.wrap_future(ahead.job.future)
            return await loop.run_in_executor(
                self._renderer._mm_executor, partial(self._in_turn, ahead, *args, **kwargs)
            )
        finally:
            plan.add_done_callback(_cancel)  # also of a request that was cancelled before its plan was made

    def _plan(self, sla: SlaClass, *args: Any, **kwargs: Any) -> AheadJob | None:
        """Submit a job for the items of a request that no cache has; None if there is none, or no job is possible."""
        try:
            missing, hf_kwargs = compat.missing_items(self._renderer, *args, **kwargs)
            items = _items(missing)
            if not any(items.values()) or _has_embeddings(missing):
                return None
            job = self._pool.submit(_sent(items, hf_kwargs), sla)
            return None if job is None else AheadJob(job, items, hf_kwargs)
        except Exception:  # noqa: BLE001 - vLLM's own code raises it again in its turn
            return None

    def _in_turn(self, ahead: AheadJob | None, *args: Any, **kwargs: Any) -> Any:
        self._thread.ahead = ahead
        try:
            return self._renderer._process_multimodal(*args, **kwargs)
        finally:
            self._thread.ahead = None

    def _apply_hf_processor(self, original: Callable[..., Any], mm_items: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``_apply_hf_processor_main(mm_items, hf_kwargs)``."""
        (hf_kwargs,) = (*args, *kwargs.values())
        if _has_embeddings(mm_items):
            self._observe(Fallback.EMBEDDINGS)
            return original(mm_items, hf_kwargs)
        items = _items(mm_items)
        if not any(items.values()):
            return original(mm_items, hf_kwargs)
        try:
            return _feature(self._result(items, hf_kwargs))
        except UnsupportedValueError:
            self._observe(Fallback.UNSUPPORTED)
            return original(mm_items, hf_kwargs)

    def _result(self, items: Items, hf_kwargs: Mapping[str, object]) -> Any:
        ahead: AheadJob | None = getattr(self._thread, "ahead", None)
        if ahead is not None and _same(ahead.items, items) and _same(ahead.kwargs, dict(hf_kwargs)):
            self._thread.ahead = None
            return ahead.job.take()
        job = self._pool.submit(_sent(items, hf_kwargs), needed=True)
        assert job is not None  # a needed job is never refused
        return job.take()


def _cancel(plan: Any) -> None:
    """Cancel the job of a plan, unless its result was taken."""
    if not plan.cancelled() and (ahead := plan.result()) is not None:
        ahead.job.cancel()


def _items(mm_items: Any) -> Items:
    return {modality: [found[at] for at in range(len(found))] for modality, found in mm_items.items()}


def _has_embeddings(mm_items: Any) -> bool:
    return any(found.get_passthrough_data() for found in mm_items.values())


def _sent(items: Items, hf_kwargs: Mapping[str, object]) -> tuple[dict[str, list[Any]], dict[str, object]]:
    return {modality: [_sent_item(one) for one in found] for modality, found in items.items()}, dict(hf_kwargs)


def _sent_item(item: Any) -> Any:
    if isinstance(item, UndecodedPicture) and (sent := item.sent) is not None:
        return sent
    if isinstance(item, Image.Image) and item.mode in _PIXEL_MODES:
        return Pixels(item.mode, np.asarray(item))
    return item


def _feature(data: Any) -> Any:
    from transformers.feature_extraction_utils import BatchFeature

    if type(data) is not dict:
        raise PreprocessError("a preprocessing process has returned something else than the HF processor's result")
    return BatchFeature(data)


def _same(one: Any, other: Any) -> bool:
    """Return whether two items are the same: one object, or equal in type and content."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, (str, int, float, bool, bytes)) and one == other
