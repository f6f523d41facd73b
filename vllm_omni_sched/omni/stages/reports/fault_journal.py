"""Open the journal of faults that the options ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from vllm_omni_sched import __version__
from vllm_omni_sched.bounded_log import BoundedLog
from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.stage_options import JournalOptions
from vllm_omni_sched.monitor.journal.fault import Fault, FaultKind, line_of
from vllm_omni_sched.monitor.journal.recorder import FaultRecorder


class FaultJournal(FaultRecorder):
    """Writes the entries of `FaultRecorder` to a bounded file, without waiting for the disk.

    Args:
        options: with a path.
        names: of the stages, by id.
        wall: the wall clock.
    """

    def __init__(self, options: JournalOptions, names: Mapping[int, str], wall: Clock) -> None:
        assert options.path is not None

        def lost(entries: int) -> bytes:
            cause = f"{entries} entries of this journal were lost, because it could not be written"
            return line_of(Fault(wall(), FaultKind.ENTRIES_LOST.value, cause=cause))

        self._log = BoundedLog(Path(options.path), options.max_bytes, "journal of faults", lost)
        super().__init__(names, lambda fault: self._log.write(line_of(fault)), wall)
        stages = ", ".join(names.values())
        self.pipeline(FaultKind.STARTED, f"vllm-omni-sched {__version__}, process {os.getpid()}, stages {stages}")

    def close(self) -> None:
        """Record that the pipeline stops, and write what is not written yet."""
        self.pipeline(FaultKind.STOPPED, f"process {os.getpid()}")
        self._log.close()
