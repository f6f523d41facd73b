"""The video loader ``omni_flashcodec``: vLLM's rules choose the frames, our decoders decode them.

::

    operator ─► choice ─► media_io_kwargs: our loader, and the model's own sampling rule
    request ──► loader ─► rule.load_bytes ─► decode_opencv (ours in here) ─► service ─► decoder processes
                          vLLM's              source: what OpenCV would say
"""
