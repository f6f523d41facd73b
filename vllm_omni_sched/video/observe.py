"""The events of decoding, for metrics."""

from __future__ import annotations

from typing import Protocol

from vllm_omni_sched.errors import VideoError
from vllm_omni_sched.video.base import Report


class Observer(Protocol):
    """Receives the events of decoding; called from several threads, must not block."""

    def busy(self, decoders: int, of: int) -> None:
        """Note the number of decoders that work now, and of all that run."""

    def loaded(self, report: Report) -> None:
        """Note that a video was decoded."""

    def failed(self, error: VideoError) -> None:
        """Note that a video could not be decoded."""

    def restarted(self, kind: str) -> None:
        """Note that a decoder process of this kind has ended, and will be replaced."""


class Unobserved:
    """An observer that ignores all events."""

    def busy(self, decoders: int, of: int) -> None: ...

    def loaded(self, report: Report) -> None: ...

    def failed(self, error: VideoError) -> None: ...

    def restarted(self, kind: str) -> None: ...
