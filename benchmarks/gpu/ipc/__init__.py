"""A tensor from one process's GPU memory to another's: by CUDA IPC, or down to the host and up again?"""

from __future__ import annotations

THEIRS = "SharedMemoryConnector"
VARIANTS = ("cuda_ipc", "cuda_ipc, views", "arena", THEIRS)
"""Ours with a copy on the receiver's side and without; ours through host memory; vLLM-Omni's own."""

SIZES = {"64 KB": 64 << 10, "1 MB": 1 << 20, "4 MB": 4 << 20, "16 MB": 16 << 20, "256 MB": 256 << 20, "1 GB": 1 << 30}
MESSAGES = {"64 KB": 200, "1 MB": 200, "4 MB": 100, "16 MB": 100, "256 MB": 20, "1 GB": 8}
FEWER = 4  # theirs takes seconds for a large one: so many times fewer
EDGE = ("0", "1")
EDGE_OF_ORDER = ("1", "2")
