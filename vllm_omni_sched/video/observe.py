"""What there is to see of decoding, for metrics."""

from __future__ import annotations

from typing import Protocol

from vllm_omni_sched.errors import VideoError
from vllm_omni_sched.video.base import Report


class Observer(Protocol):
    """Is told what happens; called from several threads, must not block."""

    def busy(self, decoders: int, of: int) -> None:
        """So many decoders work now, of all that run."""

    def loaded(self, report: Report) -> None:
        """A video has become frames."""

    def failed(self, error: VideoError) -> None:
        """A video has not."""

    def restarted(self, kind: str) -> None:
        """A decoder process of this kind has ended, and another will take its place."""


class Unobserved:
    """Looks away."""

    def busy(self, decoders: int, of: int) -> None: ...

    def loaded(self, report: Report) -> None: ...

    def failed(self, error: VideoError) -> None: ...

    def restarted(self, kind: str) -> None: ...
