"""Raw data of committed items, kept on disk instead of in memory.

A realtime session never needs the audio of a frame again once its tokens are in the KV cache, except after a
preemption, when everything is encoded again. So the data may leave memory, but not the machine (vllm#50860,
vllm#51948).
"""

import pickle
import tempfile
import weakref
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO


class SpillFile:
    """Stores items' data in an append-only file, private to this process.

    The file is created without a name (mode 0600, unlinked at once), so that no other process can open it, and it
    disappears with this process, however it ends. Only for that reason is it safe to unpickle from it.

    Args:
        directory: where to put the file; None means the system's temporary folder.
        max_bytes: bound on the size of the file, in bytes.
        dumps: pickles a list of items; replace it by a faster one for data that the standard one pickles slowly.
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
        """Store one batch of data by item id; return False, and store nothing, if it does not fit.

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
        """Return the data of the stored items with ``first <= id < last``; each batch is read once."""
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
        """Free the disk space; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._where.clear()
