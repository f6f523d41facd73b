"""Compression of buffers between stages, where that takes less time.

* `Compressor`: called by connectors; it decides per buffer, learns per edge and data type, and caches by content.
* `decide`: the policy alone.
* `Codec`: token ids (`ids`), any data (`shuffle_lz4`, `shuffle_zstd`), PCM (`flac`); with loss, on edges that allow it,
  features (`int8`, `fp8`) and PCM (`mulaw`).
"""
