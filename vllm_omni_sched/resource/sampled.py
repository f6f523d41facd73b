"""Which replica, in a pool so large that nobody can look at all of it."""

from collections.abc import Callable, Iterator, Sequence
from typing import overload

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.balance import Balancer, CostBalancer, Dice, Pick, PickReason, ReplicaState


class SampledBalancer(Balancer):
    """Picks among ``choices`` replicas that are drawn by lot.

    1. Each replica is as likely to be drawn as any other, and is drawn once. One that is sick is no choice: another one
       is drawn instead, while there are any.
    2. Of the choices ``balancer`` takes the one that it would take were there no others.
    3. A replica that was not drawn is not looked at, so `LazyReplicas` need not describe it: O(choices).

    The second choice takes the longest queue of n replicas from about log n / log log n to log log n / log 2, each
    further one gains little (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 2001).

    Args:
        balancer: default: ``CostBalancer()``.
        choices: 2 or more.

    Raises:
        ConfigError: ``choices`` is below 2.
    """

    def __init__(self, balancer: Balancer | None = None, choices: int = 2) -> None:
        if choices < 2:
            raise ConfigError(f"choices must be 2 or more, got {choices}: one choice is chance")
        self.balancer = balancer or CostBalancer()
        self.choices = choices

    def pick(self, cost_seconds: float, replicas: Sequence[ReplicaState], dice: Dice) -> Pick:
        """The replica for a request of that cost.

        Raises:
            ValueError: the cost is negative or not finite, or two of the replicas drawn have the same id.
        """
        drawn: list[ReplicaState] = []
        for index in _drawn(len(replicas), dice):
            one = replicas[index]
            if one.healthy:
                drawn.append(one)
                if len(drawn) == self.choices:
                    break
        return super().pick(cost_seconds, drawn, dice)

    def finish_seconds(self, cost_seconds: float, replica: ReplicaState) -> float:
        """As ``balancer`` has it."""
        return self.balancer.finish_seconds(cost_seconds, replica)

    def _pick(
        self, cost_seconds: float, healthy: Sequence[ReplicaState], dice: Dice
    ) -> tuple[ReplicaState, PickReason]:
        return self.balancer._pick(cost_seconds, healthy, dice)


class LazyReplicas(Sequence[ReplicaState]):
    """``count`` replicas, each described when it is looked at."""

    def __init__(self, count: int, describe: Callable[[int], ReplicaState]) -> None:
        self._indices, self._describe = range(count), describe

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> ReplicaState: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReplicaState]: ...
    def __getitem__(self, index: int | slice) -> ReplicaState | list[ReplicaState]:
        if isinstance(index, slice):
            return [self._describe(one) for one in self._indices[index]]
        return self._describe(self._indices[index])


def _drawn(count: int, dice: Dice) -> Iterator[int]:
    """All of range(count) in random order, one by one: Fisher and Yates, noting only what has moved."""
    moved: dict[int, int] = {}
    for first in range(count):
        at = first + int(dice.random() * (count - first))
        yield moved.get(at, at)
        moved[at] = moved.get(first, first)
