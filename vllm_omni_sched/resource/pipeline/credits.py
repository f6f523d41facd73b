"""Apply back-pressure between stages: a stage starts only requests that its successors have room for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from vllm_omni_sched.config.errors import ConfigError


@dataclass
class _Account:
    """Credits of one request. ``path``: its stages, in the order of the graph."""

    path: tuple[str, ...]
    started: set[str] = field(default_factory=set)
    reserved: set[str] = field(default_factory=set)  # credit taken, not handed over yet
    used: set[str] = field(default_factory=set)  # queued or running there
    passed: set[str] = field(default_factory=set)  # given back

    @property
    def held(self) -> set[str]:
        return self.reserved | self.used


class Credits:
    """The credits of every stage: how many requests it may hold, queued and running.

    1. A request enters its first stage if that stage and all stages that it will visit have credit. Only the
       credit of the first stage and of its successors is taken; others may use that of later stages until then.
    2. It starts in a stage only together with the credit of all successors of that stage; all or none are taken.
    3. A reserved credit becomes used when the request is handed over, and free when it is given back: the stage
       is done with the request, or the request was aborted.
    4. Credits are taken in one order of the graph: together with a stage, all of the request's earlier stages, unless
       it has or had them. Where branches meet again, two requests could otherwise each hold what the other waits for.
    5. Nothing is taken twice: repeating a call changes nothing.
    6. A request that gets the output of another one's work in a stage needs no credit there (`skip`).

    Rule 4 is the ordering of resources (Havender, 1968), which excludes deadlock: of the requests that wait, the
    one that holds the last stage in that order needs only later stages, which no request holds. This only needs
    capacities of 1, and that each request that started ends. Rule 4 has no effect on a line of stages.

    Args:
        successors: of each stage; a stage named only as a successor is a stage too.
        capacities: of each stage, 1 or more.

    Raises:
        ConfigError: the stages form a cycle, or a capacity is missing, below 1, or of an unknown stage.
    """

    def __init__(self, successors: Mapping[str, Iterable[str]], capacities: Mapping[str, int]) -> None:
        graph = {stage: tuple(dict.fromkeys(after)) for stage, after in successors.items()}
        for after in list(graph.values()):
            for stage in after:
                graph.setdefault(stage, ())
        if missing := sorted(graph.keys() - capacities.keys()):
            raise ConfigError(f"stages without a capacity: {', '.join(missing)}; give each a capacity of 1 or more")
        if unknown := sorted(capacities.keys() - graph.keys()):
            raise ConfigError(f"capacities of stages that are not in the graph: {', '.join(unknown)}")
        if too_small := sorted(stage for stage, capacity in capacities.items() if capacity < 1):
            raise ConfigError(f"capacities below 1: {', '.join(too_small)}")
        before = {stage: [one for one, after in graph.items() if stage in after] for stage in graph}
        try:
            # Breadth first, so that rule 4 takes little more than rule 2: not one branch to its end before the next.
            self.order = tuple(TopologicalSorter(before).static_order())
        except CycleError as error:
            raise ConfigError(f"the stages form a cycle: {' -> '.join(error.args[1])}") from None
        self._successors = graph
        self._position = {stage: i for i, stage in enumerate(self.order)}
        self._free, self._capacities = dict(capacities), dict(capacities)
        self._accounts: dict[str, _Account] = {}

    def has_started(self, request_id: str, stage: str) -> bool:
        """Return whether the request has started in the stage and is not finished."""
        account = self._accounts.get(request_id)
        return account is not None and stage in account.started

    def free(self, stage: str) -> int:
        """Return the free credit of the stage."""
        return self._free[self._known(stage)]

    def take(self, stage: str, request_id: str, path: Iterable[str] | None = None) -> bool:
        """Take the credits for the request to start in the stage; return whether it may start now.

        Args:
            path: when it enters, the stages that it will visit, including this one; default: all reachable stages.

        Raises:
            ValueError: the stage is unknown or not on the path, or a stage before it on the path has not handed the
                request over yet.
        """
        account = self._account(stage, request_id, path)
        if stage in account.started or stage in account.passed:
            return True
        if not all(self._free[one] for one in self._looked_at(stage, request_id, account)):
            return False
        for needed in self._needed(stage, account):
            self._free[needed] -= 1
            account.reserved.add(needed)
        account.reserved.discard(stage)
        account.used.add(stage)
        account.started.add(stage)
        self._accounts[request_id] = account
        return True

    def needed(self, stage: str, request_id: str, path: Iterable[str] | None = None) -> tuple[str, ...]:
        """Return the stages that must all have credit for ``take`` to take; none if it has started there.

        They stay the same until credit is taken or given back for this request. Arguments and errors are those of
        ``take``.
        """
        account = self._account(stage, request_id, path)
        if stage in account.started or stage in account.passed:
            return ()
        return tuple(self._looked_at(stage, request_id, account))

    def hand_over(self, request_id: str, from_stage: str, to_stage: str) -> None:
        """Record that the output of one stage is with the next, where the request is queued now.

        Raises:
            ValueError: the request never started in ``from_stage``, or ``to_stage`` is not a successor of it.
        """
        account = self._accounts.get(request_id)
        if account is None or from_stage not in account.started:
            raise ValueError(f"request {request_id!r} has not started in {from_stage!r}: take() its credits first")
        if to_stage not in self._successors[from_stage]:
            raise ValueError(f"stage {to_stage!r} is not a successor of {from_stage!r}")
        if to_stage in account.reserved:
            account.reserved.discard(to_stage)
            account.used.add(to_stage)

    def skip(self, stage: str, request_id: str, path: Iterable[str]) -> None:
        """Record that the request needs no credit of the stage; what it has is given back.

        Args:
            path: if it is the first of its stages, all that it visits, including this one.
        """
        if request_id not in self._accounts:
            order = sorted({self._known(one) for one in path}, key=self._position.__getitem__)
            self._accounts[request_id] = _Account(tuple(order))
        self.give_back(request_id, stage)

    def give_back(self, request_id: str, stage: str | None = None) -> None:
        """Give back the credit of a stage that is finished or skipped; without a stage, all: the request has ended."""
        account = self._accounts.get(request_id)
        if account is None:
            return
        stages = account.path if stage is None else (self._known(stage),)
        for one in stages:
            self._free[one] += one in account.held
            account.reserved.discard(one)
            account.used.discard(one)
            account.passed.add(one)
        if account.passed.issuperset(account.path):
            del self._accounts[request_id]

    def validate(self) -> None:
        """Check that each stage's credit is free or held by a request; O(n), for tests.

        Raises:
            AssertionError: it is not.
        """
        for stage, capacity in self._capacities.items():
            held = sum(stage in account.held for account in self._accounts.values())
            free = self._free[stage]
            assert free + held == capacity, f"stage {stage}: {free} free, {held} held of {capacity}"
            assert free >= 0, f"stage {stage}: {-free} more are held than its {capacity}"

    def _known(self, stage: str) -> str:
        if stage not in self._position:
            raise ValueError(f"unknown stage {stage!r}; known stages are {', '.join(self.order)}")
        return stage

    def _account(self, stage: str, request_id: str, path: Iterable[str] | None) -> _Account:
        self._known(stage)
        account = self._accounts.get(request_id)
        if account is None:
            wanted = self._reachable(stage) if path is None else {self._known(one) for one in path}
            account = _Account(tuple(sorted(wanted, key=self._position.__getitem__)))
        if stage not in account.path:
            raise ValueError(f"request {request_id!r}: stage {stage!r} is not on its path {account.path}")
        if stage not in account.used and stage not in account.passed and self._before(stage, account):
            raise ValueError(f"request {request_id!r}: nothing was handed over to stage {stage!r} yet")
        return account

    def _before(self, stage: str, account: _Account) -> bool:
        """Return whether a stage of the path that was not skipped comes directly before ``stage``."""
        left_out = account.passed - account.started
        return any(stage in self._successors[one] for one in account.path if one not in left_out)

    def _reachable(self, stage: str) -> set[str]:
        found, to_see = {stage}, [stage]
        while to_see:
            for after in self._successors[to_see.pop()]:
                if after not in found:
                    found.add(after)
                    to_see.append(after)
        return found

    def _looked_at(self, stage: str, request_id: str, account: _Account) -> Iterable[str]:
        """Return the stages that must have credit to start there: rules 1 and 2."""
        return self._needed(stage, account) if request_id in self._accounts else account.path

    def _needed(self, stage: str, account: _Account) -> list[str]:
        """Return the stages whose credit is to be taken to start there: rules 2 and 4."""
        path, held = account.path, account.held
        wanted = {stage, *(one for one in self._successors[stage] if one in path)}
        last = max(path.index(one) for one in wanted)
        return [one for one in path[: last + 1] if one not in held and one not in account.passed]
