"""The preprocessing pool in vLLM's API process.

::

    load_bytes ─► UndecodedPicture: its header alone is read here
    renderer ───► ahead: which items no cache has ─► pool ─► vLLM's own code, with the HF processor's result at hand
"""
