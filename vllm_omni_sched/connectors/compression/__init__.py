"""Compression of buffers between hosts, where that takes less time than sending them as they are.

`Compressor` decides for each buffer, and caches by content. `lossless` has the codecs of token ids and of any data,
`lossy` those of features and of PCM, which are used only on edges that name them.
"""
