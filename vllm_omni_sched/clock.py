"""The one place that reads a clock, and waits on it; everything else is handed one."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds, from any fixed point, never going back."""

monotonic_seconds: Clock = time.perf_counter

wall_seconds: Clock = time.time
"""Seconds since 1970; the clock may be set, so only to tell people when something was, never for a duration."""

sleep_seconds: Callable[[float], None] = time.sleep
