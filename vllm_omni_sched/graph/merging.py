"""Merge identical work of requests in flight, so that it runs once; equal content has an equal key in every process.

This is common sub-expression elimination, as multi-query optimisation does it for databases
(Sellis, "Multiple-Query Optimization", ACM TODS 1988). Finished work is left to caches.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec


def content_key(parts: Mapping[str, Any]) -> str:
    """Return the digest of nested mappings, lists, strings, numbers, bytes and None: BLAKE2b (RFC 7693), 256 bits, hex.

    1. MessagePack tells types and lengths: 1, 1.0, "1", b"1" and True all differ, and no two adjacent values can be
       confused. It is written in C, and a prompt has thousands of token ids.
    2. The order of a mapping's keys does not matter. A tuple equals a list. 0.0 and -0.0 differ.
    3. Users choose the content, and equal keys share an output: hence a cryptographic digest of full length.

    Raises:
        TypeError: a value cannot be encoded; an integer needs more than 64 bits; a text is not Unicode.
    """
    try:
        encoded = msgspec.msgpack.encode(parts, order="deterministic")
    except (OverflowError, ValueError, RecursionError) as error:
        raise TypeError(str(error)) from error
    return blake2b(encoded, digest_size=32).hexdigest()


class Role(str, Enum):
    """Role of a request in its group."""

    LEAD = "lead"  # runs, for itself and its followers
    FOLLOW = "follow"  # waits for the output of the leader
    ALONE = "alone"  # runs, and no request may follow it


class MergeReason(str, Enum):
    """Reason for the role of a request."""

    NEW = "new"  # no other request does this work now
    SAME_WORK = "same_work"  # another request does this work
    FULL = "full"  # another request does this work, but already has `max_followers`
    NOT_MERGEABLE = "not_mergeable"  # no key: the work is not deterministic


class Joined(NamedTuple):
    """The role of a request, the request whose output it gets, and the reason."""

    role: Role
    leader: str
    reason: MergeReason


class Left(NamedTuple):
    """The role that a request had (None for an unknown request), and the follower that now leads in its place."""

    role: Role | None
    promoted: str | None = None


@dataclass
class _Group:
    key: Hashable | None
    leader: str
    followers: "OrderedDict[str, None]" = field(default_factory=OrderedDict)  # oldest first


class Merger:
    """Groups requests of one stage that want the same work done; O(1) per operation and per follower returned.

    1. A request without a key is alone.
    2. The first request with a key leads. Requests that join with the same key before it has finished follow it.
    3. A group with ``max_followers`` takes no more: the next request with that key leads a new
       group, which takes all later ones.
    4. When a leader leaves, its oldest follower takes over, and its place among the followers
       becomes free. When a follower leaves, nothing else changes. When the last one leaves, the group ends.
    5. When a leader finishes, the group ends, and `finish` returns its followers in the order in which they joined.
    6. Unknown ids, and followers that finish, change nothing: an abort may arrive after the end.

    Args:
        max_followers: most followers of one group.
    """

    def __init__(self, max_followers: int = 1024) -> None:
        self.max_followers = max_followers
        self._groups: dict[str, _Group] = {}  # by request, leaders and followers
        self._open: dict[Hashable, _Group] = {}  # by key: the one that takes followers

    def __len__(self) -> int:
        """Return the number of requests in all groups."""
        return len(self._groups)

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request is in a group, also alone."""
        return request_id in self._groups

    def join(self, key: Hashable | None, request_id: str) -> Joined:
        """Add a request and return its role.

        Args:
            key: key of its work, as from `content_key` (stage, inputs, parameters); None if it is not deterministic.

        Raises:
            ValueError: the request has joined already.
        """
        if request_id in self._groups:
            raise ValueError(f"request {request_id!r} has joined already; let it leave or finish first")
        reason = self._reason(key)
        group = self._open.get(key) if reason is MergeReason.SAME_WORK else None
        if group is not None:
            group.followers[request_id] = None
            self._groups[request_id] = group
            return Joined(Role.FOLLOW, group.leader, reason)
        group = self._groups[request_id] = _Group(key, request_id)
        if key is None:
            return Joined(Role.ALONE, request_id, reason)
        self._open[key] = group
        return Joined(Role.LEAD, request_id, reason)

    def _reason(self, key: Hashable | None) -> MergeReason:
        if key is None:
            return MergeReason.NOT_MERGEABLE
        group = self._open.get(key)
        if group is None:
            return MergeReason.NEW
        return MergeReason.FULL if len(group.followers) >= self.max_followers else MergeReason.SAME_WORK

    def members(self, leader: str) -> tuple[str, ...]:
        """Return the leader and its followers in the order in which they joined; empty if it leads no group."""
        group = self._groups.get(leader)
        if group is None or group.leader != leader:
            return ()
        return (leader, *group.followers) if group.followers else (leader,)

    def regroup(self, leader: str, followers: Iterable[str]) -> None:
        """Form a closed group, which no other request may join, for work that runs again after its group has ended.

        Raises:
            ValueError: the leader has joined already.
        """
        self.join(None, leader)
        group = self._groups[leader]
        for follower in followers:
            if follower not in self._groups:
                group.followers[follower] = None
                self._groups[follower] = group

    def leader(self, request_id: str) -> str:
        """Return the request whose output this request gets: itself, unless it follows another."""
        group = self._groups.get(request_id)
        return request_id if group is None else group.leader

    def finish(self, leader: str) -> tuple[str, ...]:
        """End the leader's group and return the followers that get its output, oldest first."""
        group = self._led_by(leader)
        if group is None:
            return ()
        self._end(group)
        for follower in group.followers:
            del self._groups[follower]
        return tuple(group.followers)

    def leave(self, request_id: str) -> Left:
        """Remove a request that was aborted or failed on its own."""
        group = self._groups.get(request_id)
        if group is None:
            return Left(None)
        if request_id != group.leader:
            del group.followers[request_id], self._groups[request_id]
            return Left(Role.FOLLOW)
        if not group.followers:
            self._end(group)
            return Left(Role.ALONE if group.key is None else Role.LEAD)
        del self._groups[request_id]
        group.leader, _ = group.followers.popitem(last=False)
        return Left(Role.LEAD, group.leader)

    def _led_by(self, leader: str) -> _Group | None:
        group = self._groups.get(leader)
        return group if group is not None and group.leader == leader else None

    def _end(self, group: _Group) -> None:
        del self._groups[group.leader]
        if group.key is not None and self._open.get(group.key) is group:
            del self._open[group.key]
