"""Imported last by the server that stages are forked from: what is there by then, no collection looks at again.

vLLM-Omni collects garbage several times while a stage starts; that would copy every page the stage shares with the
server, a gigabyte each.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
