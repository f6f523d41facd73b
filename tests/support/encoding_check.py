"""A check of encodings from the store between hosts that refuses what a test puts there for it."""

from __future__ import annotations

from vllm_omni_sched.connectors.between_hosts import SharedItem

MALFORMED = b"malformed"


class Encodings:
    """Refuses `MALFORMED`, and can tell while ``knows``.

    ``learnt``: the encodings that it was told of, with their items.
    """

    def __init__(self) -> None:
        self.knows = True
        self.learnt: list[tuple[bytes, SharedItem]] = []

    def can_tell(self, item: SharedItem) -> bool:
        return self.knows

    def why_refused(self, data: bytes, item: SharedItem) -> str | None:
        return "it is malformed" if data == MALFORMED else None

    def learn(self, data: bytes, item: SharedItem) -> None:
        self.learnt.append((data, item))
