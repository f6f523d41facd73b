"""How long does a message between two hosts through Mooncake over tcp take, ours against vLLM-Omni's own calls?"""

SIZES = {"1 MB": 1 << 20, "4 MB": 4 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
SEGMENT, LOCAL_BUFFER = 512 << 20, 256 << 20
"""Bytes of a process's part of the store, and of its registered buffers: the same for both."""
OURS, THEIRS = "MooncakeTransport", "MooncakeStoreConnector"
