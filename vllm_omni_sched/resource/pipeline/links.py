"""Estimate how long the input of a request takes to the host of a replica."""

from collections.abc import Collection, Iterator, Mapping

from vllm_omni_sched.config.errors import ConfigError

HERE = ""
"""The host of the front end."""

RECENT = 0.1  # weight of the latest measurement of payloads


class HostLinks:
    """Knows the host of each replica, the speed of the links between hosts, and the size of payloads.

    1. Within a host a payload takes no time. Between two hosts it takes its bytes divided by the speed of the slower
       of their two links.
    2. The size of a payload is the mean of the recent messages of its edge; 0 until one was measured.
    3. Links without a speed, by name or by ``default``, cost nothing.

    Args:
        speeds: bytes per second of the link of a host, by its address.
        default: bytes per second of the other links; None: unknown.

    Raises:
        ConfigError: a speed is not above 0.
    """

    def __init__(self, speeds: Mapping[str, float] | None = None, default: float | None = None) -> None:
        self._speeds, self._default = dict(speeds or {}), default
        for name, speed in (*self._speeds.items(), ("default", default)):
            if speed is not None and not speed > 0:
                raise ConfigError(f"the speed of the link {name!r} must be above 0 bytes per second, got {speed}")
        self._hosts: dict[tuple[int, int], str] = {}
        self._bytes: dict[tuple[int, int], float] = {}

    def place(self, stage_id: int, replica_id: int, host: str) -> None:
        """Record the host of a replica; `HERE` is that of the front end."""
        self._hosts[stage_id, replica_id] = host

    def host(self, stage_id: int, replica_id: int) -> str:
        """Return the host of a replica; `HERE` for an unknown one."""
        return self._hosts.get((stage_id, replica_id), HERE)

    def forget(self, stage_id: int, replica_id: int) -> None:
        """Forget a replica that is gone."""
        self._hosts.pop((stage_id, replica_id), None)

    def measured(self, from_stage: int, to_stage: int, messages: int, nbytes: int) -> None:
        """Record messages of an edge, with so many bytes together."""
        if messages > 0:
            edge, each = (from_stage, to_stage), nbytes / messages
            before = self._bytes.get(edge, each)
            self._bytes[edge] = before + RECENT * (each - before)

    def payload_bytes(self, from_stage: int, to_stage: int) -> float:
        """Return the expected size of a payload of an edge (rule 2)."""
        return self._bytes.get((from_stage, to_stage), 0.0)

    def seconds(self, source: tuple[int, int], target: tuple[int, int]) -> float:
        """Return how long the payload of a request takes from one replica to another, both as (stage, replica)."""
        nbytes = self.payload_bytes(source[0], target[0])
        start, end = self.host(*source), self.host(*target)
        if not nbytes or start == end:
            return 0.0
        speeds = [speed for one in (start, end) if (speed := self._speeds.get(one, self._default)) is not None]
        return nbytes / min(speeds) if speeds else 0.0

    def distances(self, source: tuple[int, int], stage_id: int, replicas: Collection[int]) -> Mapping[int, float]:
        """Return the non-zero values of `seconds` to replicas of a stage, computed on access."""
        return _Distances(self, source, stage_id, replicas)

    def knows_speeds(self) -> bool:
        """Return whether any link has a speed."""
        return self._default is not None or bool(self._speeds)


class _Distances(Mapping[int, float]):
    def __init__(self, links: HostLinks, source: tuple[int, int], stage_id: int, replicas: Collection[int]) -> None:
        self._links, self._source, self._stage_id, self._replicas = links, source, stage_id, replicas

    def __getitem__(self, replica_id: int) -> float:
        seconds = self._links.seconds(self._source, (self._stage_id, replica_id))
        if not seconds:
            raise KeyError(replica_id)
        return seconds

    def __iter__(self) -> Iterator[int]:
        return (one for one in self._replicas if self._links.seconds(self._source, (self._stage_id, one)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return True  # possibly wrong, but checking would mean looking at all of them
