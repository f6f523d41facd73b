"""Receiver of `benchmarks.compression`, in a process of its own: decodes, and acknowledges with a CRC."""

from __future__ import annotations

import socket
import zlib

import numpy as np
import torch

from benchmarks.compression.link import LENGTH, receive
from benchmarks.harness.child import emit
from vllm_omni_sched.connectors.compression.compressor import Compressor
from vllm_omni_sched.connectors.framing import Arrival


def main() -> None:
    compressor = Compressor()
    with socket.create_server(("127.0.0.1", 0)) as server:
        emit("ready", port=server.getsockname()[1])
        sender, _ = server.accept()
    with sender:
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (data := receive(sender)) is not None:
            arrival = Arrival(data)
            arrival.unpack(compressor.decompress)
            payload = arrival.open()
            sender.sendall(LENGTH.pack(checksum(payload["x"]) if payload["check"] else 0))


def checksum(values: np.ndarray | torch.Tensor) -> int:
    flat = values.view(torch.uint8).numpy() if isinstance(values, torch.Tensor) else values
    return zlib.crc32(np.ascontiguousarray(flat).view(np.uint8).reshape(-1))


if __name__ == "__main__":
    main()
