"""Brings the scheduler's metrics from the engine-core process to vLLM's own ``/metrics`` in the API process.

Engine core: `MetricsPublisher` writes a `SchedulerMetrics` once per second as text into a private directory. API
process: `attach()` adds a collector to the registry that ``/metrics`` serves; it reads those files when scraped.

vLLM's own ways do not fit: ``SchedulerStats`` has fixed fields, and a plugin in ``vllm.stat_logger_plugins`` turns
statistics back on for all servers with ``--disable-log-stats``, whether they use our scheduler or not, and is never
loaded by vLLM-Omni. This module imports vLLM only when needed, and unpickles nothing.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, multiprocess
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vllm_omni_sched.engine.metrics.files import EngineDirectory, live_pages
from vllm_omni_sched.engine.metrics.nvml import DeviceSampler, NvmlDevices
from vllm_omni_sched.imports import wrap_once
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.device_metrics import DeviceCollector
from vllm_omni_sched.monitor.exposition import merge, render

logger = get_logger(__name__)


class PagePublisher:
    """Writes a page of metrics periodically, from a daemon thread, for the process that started this one.

    Failures never stop serving: when files cannot be written, `start` and the thread log one warning, and the
    engine goes on without metrics until writing works again.

    Args:
        name: prefix of the directory's name.
        labels: labels that are added to all samples of the page.
        page: returns the page, in the Prometheus text format.
        interval_seconds: pause between two pages.
        wait: waits for that many seconds and returns True to stop; tests step it by hand.
        base: directory instead of the user's own below TMPDIR.
    """

    def __init__(
        self,
        name: str,
        labels: Mapping[str, str],
        page: Callable[[], bytes],
        *,
        interval_seconds: float = 1.0,
        wait: Callable[[float], bool] | None = None,
        base: Path | None = None,
    ) -> None:
        self._name, self._labels, self._page = f"{name}-{os.getpid()}", labels, page
        self._interval_seconds = interval_seconds
        self._stop = threading.Event()
        self._wait = wait or self._stop.wait
        self._base = base
        self._directory: EngineDirectory | None = None
        self._thread: threading.Thread | None = None
        self._failing = False

    def start(self) -> None:
        """Create the directory, publish a first page, and continue in the background. Never raises OSError."""
        try:
            self._directory = EngineDirectory.create(self._name, self._labels, self._base)
        except OSError as error:
            logger.warning(
                "vllm-omni-sched: /metrics will lack the scheduler metrics of this engine, because the directory for "
                "them cannot be created; the engine serves on: %s",
                error,
            )
            return
        self.publish()
        self._thread = threading.Thread(target=self._run, name="omni-sched-metrics", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Write one page now. A failure is logged once until writing works again.

        Making a page may close this publisher: garbage collection runs in any thread and finalizes dropped schedulers.
        """
        directory = self._directory
        if directory is None:
            return
        page = self._page()
        if self._stop.is_set():
            return
        try:
            directory.write(page)
            self._failing = False
        except OSError as error:
            if not self._failing and not self._stop.is_set():
                logger.warning(
                    "vllm-omni-sched: the metrics of this engine cannot be written and /metrics is out of date; "
                    "trying again with every update: %s",
                    error,
                )
            self._failing = True

    def close(self) -> None:
        """Stop the thread and remove the directory."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * self._interval_seconds)
        self._thread = None
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def _run(self) -> None:
        while not self._wait(self._interval_seconds) and not self._stop.is_set():
            self.publish()


class MetricsPublisher(PagePublisher):
    """Publishes one scheduler's metrics.

    Usage, in the scheduler::

        self.metrics = SchedulerMetrics()
        self._publisher = MetricsPublisher(self.metrics, vllm_config)
        self._publisher.start()  # in __init__: creates the directory, publishes once, starts the thread
        self._publisher.close()  # in shutdown(): stops the thread, removes the directory; idempotent

    A scheduler that may be dropped without ``shutdown()`` adds
    ``weakref.finalize(self, self._publisher.close)``; the thread holds the metrics, never the scheduler.

    Args:
        metrics: what to publish; read without a lock.
        vllm_config: names the directory (instance id, data-parallel index) and the labels (`engine_labels`).
        refresh: called before each page; brings `metrics` up to date. It must not hold the scheduler.
    """

    def __init__(
        self,
        metrics: SchedulerMetrics,
        vllm_config: Any,
        *,
        interval_seconds: float = 1.0,
        wait: Callable[[float], bool] | None = None,
        refresh: Callable[[], None] | None = None,
        base: Path | None = None,
    ) -> None:
        def page() -> bytes:
            if refresh is not None:
                refresh()
            return render(metrics)

        labels = engine_labels(vllm_config)
        name = f"{vllm_config.instance_id}-{labels['engine']}"
        super().__init__(name, labels, page, interval_seconds=interval_seconds, wait=wait, base=base)


def engine_labels(vllm_config: Any) -> dict[str, str]:
    """Return the labels of vLLM's own series (``engine``, ``model_name``), and ``stage`` if vLLM-Omni set one."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    labels = {"engine": str(getattr(parallel, "data_parallel_index", 0))}
    if served := getattr(model, "served_model_name", None):
        labels["model_name"] = served if isinstance(served, str) else str(served[0])
    if (stage := getattr(model, "stage_id", None)) is not None:
        labels["stage"] = str(stage)
    return labels


class EngineMetricsCollector(Collector):
    """Collects the metrics pages of this process's engine cores; empty if there are none."""

    def __init__(self, base: Path | None = None) -> None:
        self._base = base

    def describe(self) -> Iterable[Family]:
        """Return nothing: names are known only when scraped, and registering must not look for files."""
        return []

    def collect(self) -> Iterable[Family]:
        """Return the families of all live engine cores of this server; empty, with a warning, if a file is damaged."""
        try:
            return merge(live_pages(self._base))
        except ValueError as error:
            logger.warning(
                "vllm-omni-sched: this scrape of /metrics lacks the scheduler metrics, because the metrics file of an "
                "engine is damaged: %s",
                error,
            )
            return []


_collector = EngineMetricsCollector()
_ATTACHED = "__omni_sched__"

_devices = DeviceCollector(DeviceSampler(NvmlDevices().read).latest)


def attach() -> None:
    """Make ``/metrics`` of this process serve our metrics, too, and those of its devices.

    Idempotent; call it in the API process. Devices are looked for when ``/metrics`` is requested.

    A single API server serves prometheus' global registry. Several API servers (``--api-server-count``; recognised
    by ``PROMETHEUS_MULTIPROC_DIR``) build a new registry for every scrape, around a ``MultiProcessCollector``: that
    class is patched to add our families to its own.
    """
    if not hasattr(REGISTRY, _ATTACHED):
        for collector in (_collector, _devices):
            REGISTRY.register(collector)
        setattr(REGISTRY, _ATTACHED, True)
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        wrap_once(
            multiprocess.MultiProcessCollector,
            "collect",
            lambda stock: lambda self: [*stock(self), *_collector.collect(), *_devices.collect()],
        )
