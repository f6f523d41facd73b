"""The one place that reads a clock; everything else is handed one."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds, from any fixed point, never going back."""

monotonic_seconds: Clock = time.perf_counter
