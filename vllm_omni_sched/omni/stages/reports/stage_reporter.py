"""Report facts of a stage's process to the front end once per second.

These are bytes moved by its connectors, hits of its prefix and encoder caches, and its device memory. The front
end asks for them with an environment variable (`enable_reports`); otherwise nothing here runs. A report is a file of
the stage's process that the front end reads (`PagePublisher`), in a directory of its own, so that ``/metrics`` does
not take it for a page.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, MutableMapping
from pathlib import Path
from typing import Any

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.engine.metrics.bridge import PagePublisher
from vllm_omni_sched.engine.metrics.files import default_base, lineage

VARIABLE = "VLLM_OMNI_SCHED_REPORT_TO"
REMEMBERED = 8192  # requests and items whose first lookup was counted, and messages that could not be received

_MARK = "__omni_sched_report__"


def reports_base() -> Path:
    """Return the directory of reports, which is private to this user."""
    return default_base().with_name(default_base().name + "-stages")


def enable_reports(environ: MutableMapping[str, str]) -> None:
    """Let stages that this process starts from now on report to it."""
    environ[VARIABLE] = str(os.getpid())


def disable_reports(environ: MutableMapping[str, str]) -> None:
    """Let stages that this process starts from now on report nothing."""
    environ.pop(VARIABLE, None)


class StageReporter:
    """Sums up what this process has done since its start; any thread may add to the sums."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._edges: dict[str, list[float]] = {}  # by "from>to side": messages, bytes, seconds, failures
        self._caches: dict[str, list[int]] = {}  # by name: hits, lookups
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def moved(self, side: str, from_stage: Any, to_stage: Any, nbytes: int, seconds: float) -> None:
        """Record that a connector has put (``side`` "put") or received ("get") a message."""
        with self._lock:
            sums = self._sums(side, from_stage, to_stage)
            sums[0] += 1
            sums[1] += nbytes
            sums[2] += seconds

    def failed(self, side: str, from_stage: Any, to_stage: Any, key: Hashable = None) -> None:
        """Record a failed transfer; with a ``key`` once for each, since receivers ask for a message repeatedly."""
        with self._lock:
            if key is None or self._is_new((side, from_stage, to_stage, key)):
                self._sums(side, from_stage, to_stage)[3] += 1

    def looked_up(self, cache: str, who: Hashable, hits: int, lookups: int) -> None:
        """Record the hits of a cache lookup; only the first lookup of each counts, as later ones find its own data."""
        with self._lock:
            if self._is_new((cache, who)):
                sums = self._caches.setdefault(cache, [0, 0])
                sums[0] += hits
                sums[1] += lookups

    def _sums(self, side: str, from_stage: Any, to_stage: Any) -> list[float]:
        return self._edges.setdefault(f"{from_stage}>{to_stage} {side}", [0, 0, 0.0, 0])

    def _is_new(self, who: Hashable) -> bool:
        if who in self._seen:
            return False
        self._seen[who] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return True

    def page(self) -> bytes:
        """Return all sums as JSON; ``processes``: this process and its ancestors."""
        with self._lock:
            edges = {name: list(sums) for name, sums in self._edges.items()}
            caches = {name: list(sums) for name, sums in self._caches.items()}
        body = {"processes": lineage(), "edges": edges, "caches": caches, "device_bytes": device_bytes()}
        return json.dumps(body).encode()


def device_bytes() -> int | None:
    """Return the bytes that torch's allocator holds on all devices of this process; None if it uses none."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "accelerator") or not torch.accelerator.is_available():
        return None
    device = torch.get_device_module()
    if not getattr(device, "is_initialized", lambda: False)() or not hasattr(device, "memory_reserved"):
        return None
    return sum(int(device.memory_reserved(one)) for one in range(device.device_count()))


@functools.cache
def start_reporting() -> StageReporter | None:
    """Report from this process if the process that started it asks for it; may be called twice."""
    if os.environ.get(VARIABLE) in (None, str(os.getpid())):
        return None
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

    report = StageReporter()
    _wrap(OmniConnectorFactory, "create_connector", functools.partial(_wrap_create_connector, report))
    _wrap(KVCacheManager, "get_computed_blocks", functools.partial(_wrap_get_computed_blocks, report))
    _wrap(EncoderCacheManager, "check_and_update_cache", functools.partial(_wrap_check_and_update_cache, report))
    publisher = PagePublisher("report", {}, report.page, base=reports_base())
    publisher.start()
    atexit.register(publisher.close)
    return report


def _wrap(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = owner.__dict__.get(name)
    method = getattr(original, "__func__", original)  # of a class method
    if method is None or hasattr(method, _MARK):
        return  # a method that this vLLM lacks is not reported
    ours = functools.wraps(method)(wrap(method))
    setattr(ours, _MARK, True)
    setattr(owner, name, classmethod(ours) if isinstance(original, classmethod) else ours)


def _wrap_create_connector(report: StageReporter, original: Callable[..., Any]) -> Callable[..., Any]:
    def create_connector(cls: Any, spec: Any) -> Any:
        connector = original(cls, spec)
        kind: Any = type(connector)
        # the factory's constructors are functions, so the class of what they return is known only afterwards
        connector.__class__ = counting(kind, report)
        return connector

    return create_connector


@functools.cache
def counting(kind: type, report: StageReporter) -> type:
    """Return a subclass of a connector class that counts messages, their bytes and failures.

    A `put` that raises or returns False fails, and so does a `get` that raises or reaches its deadline. A
    `get` without a deadline only polls for the message: not finding it is no failure.
    """

    class Counting(kind):
        def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
            started = monotonic_seconds()
            try:
                sent = super().put(from_stage, to_stage, put_key, data)
            except Exception:
                report.failed("put", from_stage, to_stage)
                raise
            if sent[0]:
                report.moved("put", from_stage, to_stage, int(sent[1]), monotonic_seconds() - started)
            else:
                report.failed("put", from_stage, to_stage)
            return sent

        def get(self, from_stage: str, to_stage: str, get_key: str, *arguments: Any, **more: Any) -> Any:
            started = monotonic_seconds()
            # A stage asks for each of its messages up to a thousand times per second, and `super()` looks up the method
            # every time.
            try:
                got = kind.get(self, from_stage, to_stage, get_key, *arguments, **more)
            except Exception:
                report.failed("get", from_stage, to_stage, get_key)
                raise
            if got is not None:
                report.moved("get", from_stage, to_stage, int(got[1]), monotonic_seconds() - started)
            return got

        def get_with_deadline(
            self, from_stage: str, to_stage: str, get_key: str, *arguments: Any, deadline: float, **more: Any
        ) -> Any:
            got = super().get_with_deadline(from_stage, to_stage, get_key, *arguments, deadline=deadline, **more)
            if got is None and monotonic_seconds() >= deadline:  # `get` counts messages received in time
                report.failed("get", from_stage, to_stage, get_key)
            return got

    Counting.__name__, Counting.__qualname__, Counting.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Counting


def _wrap_get_computed_blocks(report: StageReporter, original: Callable[..., Any]) -> Callable[..., Any]:
    def get_computed_blocks(self: Any, request: Any) -> Any:
        found = original(self, request)
        if getattr(self, "prefix_cache_lookup_enabled", lambda _: True)(request):
            report.looked_up("prefix", request.request_id, int(found[1]), int(request.num_tokens))
        return found

    return get_computed_blocks


def _wrap_check_and_update_cache(report: StageReporter, original: Callable[..., Any]) -> Callable[..., Any]:
    def check_and_update_cache(self: Any, request: Any, input_id: int) -> bool:
        hit: bool = original(self, request, input_id)
        report.looked_up("encoder", (request.request_id, input_id), int(hit), 1)
        return hit

    return check_and_update_cache
