"""What has become of messages, whatever carries them."""

from dataclasses import dataclass


@dataclass
class MessageCounts:
    """Of a sender; each kind of path counts more."""

    put: int = 0
    put_bytes: int = 0
    consumed: int = 0
    replaced: int = 0
    discarded: int = 0
    expired: int = 0
    refused: int = 0
