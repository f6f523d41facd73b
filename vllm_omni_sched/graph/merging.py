"""Identical work of different requests runs once: common sub-graphs, merged while they are in flight.

Common sub-expression elimination over requests in flight, as multi-query optimisation does it for databases
(Sellis, "Multiple-Query Optimization", ACM TODS 1988). What has finished is a cache's business, not ours.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from vllm_omni_sched.errors import ConfigError


class Role(str, Enum):
    """What a request does in its group."""

    LEAD = "lead"  # runs, for itself and its followers
    FOLLOW = "follow"  # waits for the output of the leader
    ALONE = "alone"  # runs, and nobody may follow


class MergeReason(str, Enum):
    """Why a request got its role."""

    NEW = "new"  # nobody does this work now
    SAME_WORK = "same_work"  # somebody does
    FULL = "full"  # somebody does, and has `max_followers`
    NOT_MERGEABLE = "not_mergeable"  # no key: the work is not deterministic


class Joined(NamedTuple):
    """The role of a request, whose output it gets, and why."""

    role: Role
    leader: str
    reason: MergeReason


class Left(NamedTuple):
    """Which role a request had, None for one that is unknown; and the follower that leads now in its place."""

    role: Role | None
    promoted: str | None = None


@dataclass
class _Group:
    key: Hashable | None
    leader: str
    followers: "OrderedDict[str, None]" = field(default_factory=OrderedDict)  # oldest first


class Merger:
    """Groups requests that want the same work done, in one stage. O(1) per operation, and per follower that is told.

    1. A request without a key is alone.
    2. The first with a key leads. Who comes with the same key before the leader has finished follows.
    3. A group with ``max_followers`` takes no more: the next one leads a new
       group of that key, which takes the others from then on.
    4. A leader that leaves hands over to its oldest follower; the group lives on under that one, with its place
       for new followers. A follower just leaves. The last one ends the group.
    5. When a leader finishes, the group ends, and its followers are told in the order in which they joined.
    6. Ids that are not here, and followers that finish, change nothing: an abort may come after the end.

    Args:
        max_followers: of one group.

    Raises:
        ConfigError: ``max_followers`` is below 1.
    """

    def __init__(self, max_followers: int = 1024) -> None:
        if max_followers < 1:
            raise ConfigError(f"max_followers must be 1 or more, got {max_followers}; to merge nothing, turn it off")
        self.max_followers = max_followers
        self._groups: dict[str, _Group] = {}  # by request, leaders and followers
        self._open: dict[Hashable, _Group] = {}  # by key: the one that takes followers

    def __len__(self) -> int:
        """Requests that are here."""
        return len(self._groups)

    def join(self, key: Hashable | None, request_id: str) -> Joined:
        """A request comes to the stage.

        Args:
            key: of its work, as from `content_key`: the stage, its inputs, its parameters; None: not deterministic.

        Raises:
            ValueError: the request is here already.
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
        """The leader and its followers, in the order in which they joined; nothing for one that leads nobody here."""
        group = self._led_by(leader)
        return () if group is None else (leader, *group.followers)

    def regroup(self, leader: str, followers: Iterable[str]) -> None:
        """Work whose group has ended runs again, for these: a group that nobody else may join.

        Raises:
            ValueError: the leader is here already.
        """
        self.join(None, leader)
        group = self._groups[leader]
        for follower in followers:
            if follower not in self._groups:
                group.followers[follower] = None
                self._groups[follower] = group

    def leader(self, request_id: str) -> str:
        """Whose output a request gets: its own, unless it follows another."""
        group = self._groups.get(request_id)
        return request_id if group is None else group.leader

    def finish(self, leader: str) -> tuple[str, ...]:
        """The leader's work is done; the followers that get its output, oldest first."""
        group = self._led_by(leader)
        if group is None:
            return ()
        self._end(group)
        for follower in group.followers:
            del self._groups[follower]
        return tuple(group.followers)

    def leave(self, request_id: str) -> Left:
        """The request is aborted, or failed by itself."""
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
