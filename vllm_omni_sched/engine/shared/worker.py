"""Workers' half of shared encodings: reads encodings from the store, and puts those that were made here into it."""

import queue
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from safetensors.torch import load, save

from vllm_omni_sched.config.errors import EncodingLostError
from vllm_omni_sched.connectors.encodings import EncodingStore, PutOutcome
from vllm_omni_sched.engine.ahead.host_store import to_host
from vllm_omni_sched.engine.shared.messages import SharedOrders, SharedReport
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

_MOST_WAITING = 64  # encodings that wait to be written
_TENSOR = "encoding"  # name of the only tensor in a file


class SharedWorker:
    """Reads and writes encodings for one worker; of several workers that hold the same, only one writes.

    1. An encoding is copied to the host on the stream of the step, and written on a thread of its own.
    2. If the thread is more than 64 encodings behind, the next one is not written, and its claim ends. So does that of
       an encoding which cannot be copied from its device.
    3. What became of each encoding is in the next report.

    Args:
        store: the store of this host.
        writes: whether this worker is the one that writes.
    """

    def __init__(self, store: EncodingStore, *, writes: bool) -> None:
        self._store = store
        self._step = 0
        self._offered: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        if writes:
            self._thread = threading.Thread(target=self._run, name="omni-sched-encodings", daemon=True)
            self._thread.start()

    def carry_out(self, orders: SharedOrders, encoder_cache: MutableMapping[str, torch.Tensor], device: Any) -> None:
        """Put the encodings that were ordered into ``encoder_cache``: mm_hash -> (num_encoder_embeds, hidden_size).

        Raises:
            EncodingLostError: one cannot be read. The scheduler has pinned it, and tokens would be computed without
                it, so the engine must not go on.
        """
        for mm_hash in orders.load:
            if mm_hash in encoder_cache:
                continue
            try:
                data = self._store.read(mm_hash, orders.member)
            except (KeyError, OSError) as error:
                raise EncodingLostError(
                    f"encoding {mm_hash} cannot be read from {self._store.directory}, though the scheduler has pinned "
                    f"it: was the directory emptied by hand? ({error!r})"
                ) from error
            encoder_cache[mm_hash] = load(data)[_TENSOR].to(device)
        self._step = orders.step

    def offer(self, mm_hash: str, encoding: torch.Tensor) -> None:
        """Put an encoding that was made here into the store, on the thread; nothing is waited for."""
        if self._thread is None:
            return
        host = to_host(encoding.detach())
        event = None
        if encoding.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()

        def write() -> None:
            try:
                if event is not None:
                    event.synchronize()
                outcome = self._store.put(mm_hash, save({_TENSOR: host.contiguous()}))
            except (RuntimeError, MemoryError) as error:
                logger.warning("encoding %s is not shared with other engines: %s", mm_hash, error)
                self._store.end_claim(mm_hash)
                outcome = PutOutcome.FAILED
            self._note(mm_hash, outcome)

        try:
            self._jobs.put_nowait(write)
        except queue.Full:
            self._store.end_claim(mm_hash)
            self._note(mm_hash, PutOutcome.NO_ROOM)

    def report(self) -> SharedReport | None:
        """Return what was done since the last report; None if that is nothing."""
        with self._lock:
            offered, self._offered = self._offered, []
        step, self._step = self._step, 0
        return SharedReport(step, offered) if step or offered else None

    def close(self) -> None:
        """Write what waits, and leave the store."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()
        self._store.close()

    def _note(self, mm_hash: str, outcome: PutOutcome) -> None:
        with self._lock:
            self._offered.append((mm_hash, outcome.value))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds the encoding in host memory
