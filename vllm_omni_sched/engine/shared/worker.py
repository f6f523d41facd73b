"""Workers' half of shared encodings: reads encodings from the store, and puts those that were made here into it."""

import queue
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from safetensors.torch import load, save

from vllm_omni_sched.config.errors import EncodingLostError
from vllm_omni_sched.connectors.encodings import EncodingStore, PutOutcome
from vllm_omni_sched.engine.ahead.host_store import to_host
from vllm_omni_sched.engine.shared.layouts import TENSOR_NAME
from vllm_omni_sched.engine.shared.messages import SharedOrders, SharedReport
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

_MOST_WAITING = 64  # encodings that wait to be written


class SharedWorker:
    """Reads and writes encodings for one worker; of several workers that hold the same, only one writes.

    1. An encoding is copied to the host on the stream of the step, and written on a thread of its own.
    2. If the thread is more than 64 encodings behind, the next one is not written, and its claim ends. So does that of
       an encoding which cannot be copied from its device.
    3. What became of each encoding is in the next report.
    4. Orders of a new epoch mean that the weights may have changed: the store of those that the model has now is
       entered, and reported. What is still to be written goes into the former store, which has the former weights.

    Args:
        open_store: enters the store of a space.
        space: the first one.
        space_of: returns the space of weights with this digest.
        writes: whether this worker is the one that writes.

    ``digest``: returns the digest of the weights that the model has now, on all workers the same; set once the model is
    loaded.
    """

    digest: Callable[[], str]

    def __init__(
        self,
        open_store: Callable[[str], EncodingStore],
        space: str,
        space_of: Callable[[str], str],
        *,
        writes: bool,
    ) -> None:
        self._open, self._space_of, self._store = open_store, space_of, open_store(space)
        self._step = self._epoch = 0
        self._entered = ""  # space that was not reported yet
        self._offer: Mapping[str, str] = {}
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
        if orders.epoch != self._epoch:
            self._change_store(orders.epoch)
        self._offer = orders.offer
        for mm_hash, key in orders.load.items():
            if mm_hash in encoder_cache:
                continue
            try:
                data = self._store.read(key, orders.member)
            except (KeyError, OSError) as error:
                raise EncodingLostError(
                    f"encoding {key} cannot be read from {self._store.directory}, though the scheduler has pinned "
                    f"it: was the directory emptied by hand? ({error!r})"
                ) from error
            encoder_cache[mm_hash] = load(data)[TENSOR_NAME].to(device)
        self._step = orders.step

    def _change_store(self, epoch: int) -> None:
        """Enter the store of the weights that the model has now, by rule 4."""
        former, self._entered = self._store, self._space_of(self.digest())
        self._store = self._open(self._entered)
        if self._thread is None:
            former.close()
        else:
            self._jobs.put(former.close)
        with self._lock:
            self._epoch, self._offered = epoch, []
        logger.info(
            "the weights may have changed: encodings are shared with engines that have the same, in %s",
            self._store.directory,
        )

    def offer(self, mm_hash: str, encoding: torch.Tensor) -> None:
        """Put an encoding that was made here into the store, if that is ordered; nothing is waited for."""
        key, store, epoch = self._offer.get(mm_hash), self._store, self._epoch
        if self._thread is None or key is None:
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
                outcome = store.put(key, save({TENSOR_NAME: host.contiguous()}))
            except (RuntimeError, MemoryError) as error:
                logger.warning("encoding %s is not shared with other engines: %s", mm_hash, error)
                store.end_claim(key)
                outcome = PutOutcome.FAILED
            self._note(key, outcome, epoch)

        try:
            self._jobs.put_nowait(write)
        except queue.Full:
            store.end_claim(key)
            self._note(key, PutOutcome.NO_ROOM, epoch)

    def report(self) -> SharedReport | None:
        """Return what was done since the last report; None if that is nothing."""
        with self._lock:
            offered, self._offered = self._offered, []
        step, self._step = self._step, 0
        entered, self._entered = self._entered, ""
        return SharedReport(step, offered, self._epoch, entered) if step or offered or entered else None

    def close(self) -> None:
        """Write what waits, and leave the store."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()
        self._store.close()

    def _note(self, key: str, outcome: PutOutcome, epoch: int) -> None:
        with self._lock:
            if epoch == self._epoch:
                self._offered.append((key, outcome.value))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds the encoding in host memory
