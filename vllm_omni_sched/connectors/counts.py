"""Counts of the outcomes of messages, for all paths."""

from dataclasses import dataclass


@dataclass
class MessageCounts:
    """Counts of a sender; each kind of path adds more."""

    put: int = 0
    put_bytes: int = 0
    consumed: int = 0
    replaced: int = 0
    discarded: int = 0
    expired: int = 0
    refused: int = 0
