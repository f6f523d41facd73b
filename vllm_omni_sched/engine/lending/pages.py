"""Worker half of lending: gives the memory pages of lent KV blocks back to the operating system."""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from vllm_omni_sched.config.errors import ConfigError

_DONT_NEED = 4  # MADV_DONTNEED of Linux


class Layer(NamedTuple):
    """Memory of one layer's KV cache: address of block 0, bytes from one block to the next, number of blocks."""

    address: int
    block_bytes: int
    blocks: int


class KvPages:
    """Returns whole memory pages of KV blocks to the operating system.

    The blocks keep their addresses. Whoever writes to such a page again gets a new one, filled with zeros, so that
    nothing has to be done when a block goes back to the pool. Pages that a block shares with a block that is not lent
    are kept. Contents of the given blocks are lost.

    Args:
        layers: memory of all layers. It must be private to this process.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._advise = ctypes.CDLL(None, use_errno=True).madvise
        self._advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def ranges(self, block_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yield address and length of the whole pages within these blocks."""
        runs = list(_runs(sorted(block_ids)))
        page = mmap.PAGESIZE
        for layer in self._layers:
            for first, end in runs:
                if not 0 <= first < end <= layer.blocks:
                    raise ValueError(f"KV blocks {first} to {end - 1} were lent, and the cache has {layer.blocks}")
                start = -(-(layer.address + first * layer.block_bytes) // page) * page
                stop = (layer.address + end * layer.block_bytes) // page * page
                if stop > start:
                    yield start, stop - start

    def give_back(self, block_ids: Iterable[int]) -> int:
        """Give back the pages of these blocks, and return their bytes.

        Raises:
            OSError: the operating system keeps them, such as pages that are locked in memory.
        """
        given = 0
        for address, length in self.ranges(block_ids):
            if self._advise(address, length, _DONT_NEED):
                code = ctypes.get_errno()
                raise OSError(code or errno.EINVAL, os.strerror(code or errno.EINVAL))
            given += length
        return given


def _runs(block_ids: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first id, and the one behind the last, of each run of adjacent ids in rising order."""
    for at, one in enumerate(block_ids):
        if not at or one != block_ids[at - 1] + 1:
            first = one
        if at + 1 == len(block_ids) or block_ids[at + 1] != one + 1:
            yield first, one + 1


def sure_bytes(layer_bytes: int) -> int:
    """Return the bytes of a block's part in one layer that can be given back wherever it begins."""
    page = mmap.PAGESIZE
    return max(0, (layer_bytes - page + 1) // page * page)


def kv_pages_of(runner: Any) -> KvPages:
    """Return the pages of a model runner's KV cache.

    Raises:
        ConfigError: the memory of a block is not in one piece in each layer.
    """
    blocks, layers = runner.kv_cache_config.num_blocks, []
    for tensor in runner.kv_caches:
        parts = tensor.shape[0] // blocks if tensor.dim() else 0  # blocks of the kernel in each of the manager's
        if not parts or tensor.shape[0] % blocks or not tensor[0].is_contiguous():
            raise ConfigError(
                f"option 'kv_lending' cannot be on here, because a layer of the KV cache has the shape "
                f"{tuple(tensor.shape)}, in which a block is not in one piece of memory: set it to 0"
            )
        layers.append(Layer(tensor.data_ptr(), parts * tensor.stride(0) * tensor.element_size(), blocks))
    return KvPages(layers)
