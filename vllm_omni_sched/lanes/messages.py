"""Messages between a process lane and its owner: a small header, and a body in anonymous shared memory.

The body (tensors) is written once into a memory file that is sent as a descriptor and has no name: after SIGKILL of
either side the kernel frees it.
"""

import errno
import io
import os
import pickle
import socket
from array import array
from collections.abc import Sequence
from typing import Any

import torch

_HEADER_BYTES = 1 << 16


def channel() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a channel that preserves message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class _Pickler(pickle.Pickler):
    """Pickles tensors out of band; torch itself would write each into an archive of its own."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type == "cpu" and obj.layout is torch.strided:
            data = obj.detach().contiguous().reshape(-1)
            if data.numel() == 0:
                return _make_empty, (obj.dtype, tuple(obj.shape))
            return _make_tensor, (pickle.PickleBuffer(data.view(torch.uint8).numpy()), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _make_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


def _make_empty(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def send(end: socket.socket, head: Any, body: Any = None, *, wait: bool = False) -> None:
    """Send ``(head, body)`` to the other side.

    Raises:
        BlockingIOError: the other side does not read; nothing was sent.
        ConnectionError: the other side has closed the channel.
        OSError: no descriptor or no memory is left for the message.
    """
    buffers: list[pickle.PickleBuffer] = []
    data = io.BytesIO()
    _Pickler(data, protocol=5, buffer_callback=buffers.append).dump(body)
    views = [data.getbuffer(), *(buffer.raw() for buffer in buffers)]
    memory = os.memfd_create("omni-sched-lane")
    try:
        _write(memory, views)
        header = pickle.dumps((head, [view.nbytes for view in views]))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [memory]))
        # socket.send_fds ignores its flags up to Python 3.11, and so does recv_fds
        end.sendmsg([header], [rights], socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT))
    finally:
        os.close(memory)


def receive(end: socket.socket, *, wait: bool = False) -> tuple[Any, Any] | None:
    """Return the next message, whose tensors use the memory that was sent; None if there is none yet.

    Raises:
        EOFError: the other side has closed the channel.
        OSError: the message cannot be received, because this process has no descriptor or no memory left for it.
    """
    try:
        header, rights, _, _ = end.recvmsg(_HEADER_BYTES, socket.CMSG_LEN(4), 0 if wait else socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        # Raised once if the other side closed with unread messages; the messages it sent before still arrive.
        return receive(end, wait=wait)
    if not header:
        raise EOFError
    descriptors = array("i", b"".join(data for _, _, data in rights))
    if not descriptors:  # the kernel drops it without an error
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    try:
        head, sizes = pickle.loads(header)
        memory = memoryview(map_memory(descriptors[0], sum(sizes)).numpy())
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    views, offset = [], 0
    for size in sizes:
        views.append(memory[offset : offset + size])
        offset += size
    return head, pickle.loads(views[0], buffers=views[1:])


def map_memory(descriptor: int, size: int) -> torch.Tensor:
    """Map a memory file without keeping a descriptor: Python's ``mmap`` keeps one, and results may live long.

    Raises:
        OSError: this process has no memory left for it.
    """
    try:
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {error}") from None


def _write(memory: int, views: Sequence[memoryview]) -> None:
    for view in views:
        written = 0
        while written < view.nbytes:
            written += os.write(memory, view[written:])
