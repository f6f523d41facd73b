"""Start a benchmark only where nothing else wants the cores that it times."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

MOST_PER_CORE = 0.5
PATIENCE_SECONDS = 180.0
POLL_SECONDS = 5.0


def wait_for_idle_machine(
    options: argparse.Namespace,
    load: Callable[[], float] = lambda: os.getloadavg()[0],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the load average of the last minute is at most half a process for each core.

    The load of a benchmark that ran just before decays in that time. With ``--despite-load`` nothing is waited for; the
    result then has the flag in its command.

    Raises:
        SystemExit: the machine is still busy after ``PATIENCE_SECONDS``.
    """
    most = MOST_PER_CORE * (os.cpu_count() or 1)
    if options.despite_load or load() <= most:
        return
    print(f"waiting for an idle machine: the load average is {load():.2f}, and must be at most {most:g}", flush=True)
    for _ in range(int(PATIENCE_SECONDS / POLL_SECONDS)):
        sleep(POLL_SECONDS)
        if load() <= most:
            return
    raise SystemExit(
        f"the load average is {load():.2f} and must be at most {most:g} ({MOST_PER_CORE:g} for each core): "
        "measure on an idle machine, or add --despite-load for a trial; the result then says so"
    )
