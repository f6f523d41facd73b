"""Keep garbage collections of a process short, and the pages that it shares with others shared."""

from __future__ import annotations

import gc

_freeze = gc.freeze


def freeze_for_good() -> None:
    """Hide all that is there by now from the garbage collector, whatever is said to it later.

    An engine of vLLM freezes what is there when it has started, and undoes that when it ends. The collection after that
    would look at everything that was imported: a second of a processor for each engine, and in a forked process a copy
    of every page. A program that runs several engines calls this before each one: an engine collects garbage five
    times, and the first ones import a lot.
    """
    gc.collect()
    _freeze()
    gc.freeze = gc.unfreeze = _nothing


def _nothing() -> None:
    pass
