"""Read the checkpoints of stages into the page cache while their processes start and import vLLM."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.stage_options import PreloadOptions
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.resource.pipeline.preload import CheckpointFile, Piece, Preload, PreloadPlan, PreloadReason

logger = get_logger(__name__)

READ_BYTES = 4 << 20  # of one call
PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Files of weights; those of the first pattern that a checkpoint has are the ones that vLLM loads."""
INDEX = "model.safetensors.index.json"
NO_WEIGHTS = ("dummy", "sharded_state")
"""Load formats that read no checkpoint, or not all of it."""

_begun: WeakSet[Any] = WeakSet()


class Preloader:
    """Reads checkpoint files ahead, as `Preload` plans.

    A few daemon threads read, in the order in which stages load their files. A file that cannot be read is left to its
    stage, with a warning. Nothing waits for the threads, and nothing raises.

    Args:
        options: of reading ahead.
        available_bytes: returns the memory of the host that is available.
        read: reads a piece into a buffer, for tests.
        clock: monotonic.
    """

    def __init__(
        self,
        options: PreloadOptions,
        available_bytes: Callable[[], int] | None = None,
        read: Callable[[Piece, bytearray], None] | None = None,
        clock: Clock = monotonic_seconds,
    ) -> None:
        self._options, self._clock = options, clock
        self._available_bytes = available_bytes or _available_bytes
        self._read = read or read_piece
        self._policy = Preload(options.memory_fraction)

    def begin(self, replicas: Sequence[Any]) -> threading.Thread:
        """Begin to read what these replicas will load, in vLLM-Omni's plans of them; return the thread that does it."""
        thread = threading.Thread(target=self.run, args=(replicas,), name="omni-sched-preload", daemon=True)
        thread.start()
        return thread

    def run(self, replicas: Sequence[Any]) -> PreloadPlan:
        """Read what these replicas will load; return what was planned."""
        began = self._clock()
        plan = self._policy.plan(checkpoint_files(replicas), self._available_bytes())
        pieces, lock, unreadable = iter(plan.pieces), threading.Lock(), dict[str, OSError]()

        def work() -> None:
            buffer = bytearray(READ_BYTES)
            while True:
                with lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                if piece.path in unreadable:
                    continue
                try:
                    self._read(piece, buffer)
                except OSError as error:
                    unreadable[piece.path] = error

        count = min(self._options.threads, len(plan.pieces))
        threads = [threading.Thread(target=work, name=f"omni-sched-preload-{i}", daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._tell(plan, unreadable, self._clock() - began)
        return plan

    def _tell(self, plan: PreloadPlan, unreadable: dict[str, OSError], seconds: float) -> None:
        for path, error in unreadable.items():
            logger.warning("preload: %s cannot be read ahead (%s); its stage reads it", path, error.strerror or error)
        left = plan.count(PreloadReason.NO_MEMORY)
        if plan.pieces:
            logger.info(
                "preload: read %d checkpoint files, %.2f GB, ahead in %.1f s%s",
                plan.count(PreloadReason.READ) - len(unreadable),
                plan.nbytes / 1e9,
                seconds,
                f"; {left} files do not fit into the memory that is available" if left else "",
            )
        elif left:
            logger.warning("preload: no checkpoint file fits into the memory that is available; stages read them")


def preload_first(runtime: Any, options: PreloadOptions, stage_plans: Sequence[Any]) -> None:
    """Begin to read the checkpoints of all stages, once for a runtime: before it starts its stages.

    Args:
        runtime: vLLM-Omni's `StageRuntime`, which plans its stages again at each restart of a replica.
        stage_plans: vLLM-Omni's plans of stages, each with those of its replicas.
    """
    if options.enabled and runtime not in _begun:
        _begun.add(runtime)
        Preloader(options).begin([replica for stage in stage_plans for replica in stage.replicas])


def checkpoint_files(replicas: Iterable[Any]) -> Iterator[CheckpointFile]:
    """Yield the files of weights that replicas will load, in the order of the replicas."""
    for replica in replicas:
        folder = _folder_of(replica) if replica.launch_mode != "remote" else None
        for path in [] if folder is None else weight_files(folder):
            try:
                found = path.stat()
            except OSError:
                continue
            yield CheckpointFile(str(path), found.st_size, (found.st_dev, found.st_ino))


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights in a checkpoint's folder: those that its index names, or all of one format.

    In the folder of a diffusion pipeline, the parts of the model have folders of their own.
    """
    try:
        names = json.loads((folder / INDEX).read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        pass
    is_pipeline = (folder / "model_index.json").exists()
    for pattern in PATTERNS:
        found = sorted(folder.rglob(pattern) if is_pipeline else folder.glob(pattern))
        whole = [path for path in found if not path.name.startswith("consolidated")]
        if found:
            return whole or found
    return []


def _folder_of(replica: Any) -> Path | None:
    """Return the folder of a replica's checkpoint on this host; None if it has none, or has to be downloaded."""
    config = replica.stage_vllm_config
    model, revision, cache = (replica.engine_args_dict or {}).get("model"), None, None
    if config is not None:
        if config.load_config.load_format in NO_WEIGHTS:
            return None
        model, revision = config.model_config.model, config.model_config.revision
        cache = config.load_config.download_dir
    if not model:
        return None
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (OSError, ValueError):
        return None


def read_piece(piece: Piece, buffer: bytearray) -> None:
    """Read a piece of a file, so that it is in the page cache.

    Raises:
        OSError: it cannot be read.
    """
    file = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset, end = piece.offset, piece.offset + piece.nbytes
        while offset < end:
            count = os.preadv(file, [memoryview(buffer)[: end - offset]], offset)
            if not count:
                return  # the file was cut
            offset += count
    finally:
        os.close(file)


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
