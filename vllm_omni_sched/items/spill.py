"""Raw data of committed items, kept on disk instead of in memory.

A realtime session never needs the audio of a frame again once its tokens are in
the KV cache, except when it is preempted: then everything is encoded anew. So the
data may leave memory, but not the machine (vllm#50860, vllm#51948).
"""

import pickle
import tempfile
import weakref
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO


class SpillFile:
    """Append-only store of items' data, private to this process.

    The file is created without a name (mode 0600, unlinked at once), so no other
    process can open it, and it is gone when this process is, however it ends. Only
    for that reason is it safe to unpickle from it.

    Args:
        directory: where to put the file; None means the system's temporary folder.
        max_bytes: bound on what the file may hold.
        dumps: pickles a list of items; a faster one for data that the standard one is slow at.
    """

    def __init__(
        self, directory: str | None, max_bytes: int, dumps: Callable[[list[Any]], bytes] = pickle.dumps
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._dumps = dumps
        self._file: BinaryIO | None = None
        self._where: dict[int, tuple[int, int]] = {}  # item id -> (offset of its batch, position in it)
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, item: int) -> bool:
        return item in self._where

    def write(self, data_by_item: Mapping[int, Any]) -> bool:
        """Store one batch; False (and nothing stored) when it does not fit.

        Raises:
            OSError: the file cannot be created or written, for instance a full disk.
        """
        payload = self._dumps(list(data_by_item.values()))
        if self.size_bytes + len(payload) > self._max_bytes:
            return False
        if self._file is None:
            # Open as long as its session lives.
            self._file = tempfile.TemporaryFile(dir=self._directory, prefix="vllm-omni-sched-")  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        offset = self.size_bytes
        self._file.seek(offset)
        self._file.write(payload)
        self._file.flush()
        self.size_bytes += len(payload)
        self._where.update({item: (offset, i) for i, item in enumerate(data_by_item)})
        return True

    def read(self, first: int, last: int) -> dict[int, Any]:
        """Data of the stored items with ``first <= id < last``; each batch is read once."""
        batches: dict[int, list[Any]] = {}
        found: dict[int, Any] = {}
        for item in range(first, last):
            place = self._where.get(item)
            if place is None:
                continue
            offset, i = place
            if offset not in batches:
                assert self._file is not None
                self._file.seek(offset)
                batches[offset] = pickle.load(self._file)  # our own unnamed file, see the class docstring
            found[item] = batches[offset][i]
        return found

    def close(self) -> None:
        """Give the disk space back; harmless when called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._where.clear()
