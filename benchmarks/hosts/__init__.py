"""Time messages between two hosts over links of 100 Mbit/s to 10 Gbit/s, by our connectors and by vLLM-Omni's."""

STORE, ENGINE = "MooncakeStoreConnector", "MooncakeTransferEngineConnector"
RAW, PACKED = "OmniAutoConnector", "OmniAutoConnector, compressed"
SIDES = (STORE, ENGINE, RAW, PACKED)
LINKS = {"100 Mbit/s": 100_000_000, "1 Gbit/s": 1_000_000_000, "10 Gbit/s": 10_000_000_000}
SIZES = {"64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20}
HIDDEN, IDS = "hidden states, bf16", "ids, int64"
KINDS = (HIDDEN, IDS)
SEGMENT, LOCAL_BUFFER, POOL = 256 << 20, 64 << 20, 192 << 20
"""Bytes of a process's part of the store, of its registered buffers, and of the pool of the transfer engine."""
