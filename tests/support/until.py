"""Wait for what other threads or processes do."""

import time
from collections.abc import Callable


def until(true: Callable[[], bool]) -> None:
    """Wait until something is true that others finish soon; it is an error if it is not within a minute."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)
