"""Give runs of a request names of their own, for the engines and the connectors.

In async-chunk mode stages exchange pieces under a request's external name, and a piece carries no other mark: a run
that began again under the same name would take the pieces of the earlier run for its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_sched.omni.stages.reports.processes import ReplicaDeadError


@dataclass
class _Runs:
    """Holds the names of a request that ran more than once."""

    suffix: str = ""  # of the names of the present run
    over: list[str] = field(default_factory=list)  # external names of earlier runs
    given: set[str] = field(default_factory=set)  # names that vLLM-Omni passed to its engines
    stale: set[str] = field(default_factory=set)  # names of earlier runs in the engines


class RunNames:
    """Maps the name of a request to its name in the engines; everything else uses its first name.

    1. The first run of a request has the names that vLLM-Omni gives it.
    2. Each further one has names that no other run of any request has had.
    3. Outputs of an engine for an earlier run are dropped where they arrive.
    """

    def __init__(self) -> None:
        self._count = count(1)
        self._runs: dict[str, _Runs] = {}
        self._present: dict[str, str] = {}  # name that vLLM-Omni passed to an engine -> name of the present run
        self._given: dict[str, str] = {}  # the inverse
        self._stale: set[str] = set()
        self._classes: dict[type, type] = {}

    def __len__(self) -> int:
        """Return the number of requests that ran more than once."""
        return len(self._runs)

    def wrap_client(self, client: Any) -> Any:
        """Make the client of a stage rename its inputs and outputs."""
        original = type(client)
        if not issubclass(original, _Renaming):
            if original not in self._classes:
                kind = _RenamingDiffusion if client.stage_type == "diffusion" else _RenamingLLM
                self._classes[original] = type(original.__name__, (kind, original), {})
            # vLLM-Omni makes clients inline, of a class that it chooses there: no constructor can be replaced
            client.__class__ = self._classes[original]
        client.run_names = self
        return client

    def start_new_run(self, request_id: str, given: Iterable[str]) -> None:
        """End the present run of a request, and begin the next one.

        Args:
            given: the names that vLLM-Omni passed to the engines for it.
        """
        runs = self._runs_of(request_id)
        runs.over.append(request_id + runs.suffix)
        for name in given:
            present = self._present.pop(name, name)
            self._given.pop(present, None)
            runs.given.add(name)
            runs.stale.add(present)
        self._stale |= runs.stale
        runs.suffix = f"~{next(self._count)}"

    def renamed(self, request: Any) -> Any:
        """Return a request of an LLM stage under the names of its present run."""
        external = request.external_req_id or request.request_id
        suffix = self.suffix_for(external, request.request_id)
        if suffix is not None:
            request = copy.copy(request)
            request.request_id, request.external_req_id = request.request_id + suffix, external + suffix
        return request

    def suffix(self, request_id: str) -> str:
        """Return the suffix of the names of the present run of a request; empty in its first run."""
        runs = self._runs.get(request_id)
        return "" if runs is None else runs.suffix

    def suffix_for(self, request_id: str, name: str) -> str | None:
        """Return the suffix for a request that an engine is given as ``name``; None in its first run."""
        runs = self._runs.get(request_id)
        if runs is None:
            return None
        self._name_present(runs, name, name + runs.suffix)
        return runs.suffix

    def _name_present(self, runs: _Runs, name: str, present: str) -> None:
        """Record the present name in an engine of what it is given as ``name``."""
        runs.given.add(name)
        self._given.pop(self._present.get(name, name), None)
        self._present[name] = present
        self._given[present] = name

    def _runs_of(self, request_id: str) -> _Runs:
        return self._runs.setdefault(request_id, _Runs())

    def all_names(self, request_id: str) -> list[str]:
        """Return the external names of all runs of a request, the present one last; empty if there was only one."""
        runs = self._runs.get(request_id)
        return [*runs.over, request_id + runs.suffix] if runs is not None else []

    def external(self, request_id: str) -> str:
        """Return the name under which connectors know the present run of a request."""
        return request_id + self.suffix(request_id)

    def present(self, name: str) -> str:
        """Return the present name in an engine of what it was given as ``name``."""
        return self._present.get(name, name)

    def given(self, name: str) -> str | None:
        """Return the original name of what an engine calls ``name``; None if that run is over."""
        return None if name in self._stale else self._given.get(name, name)

    def forget(self, request_id: str) -> None:
        """Forget a request that has left."""
        runs = self._runs.pop(request_id, None)
        if runs is not None:
            self._stale -= runs.stale
            for name in runs.given:
                self._given.pop(self._present.pop(name, name), None)


class _Renaming:
    """Renames the requests of a client; its subclasses are mixed into the client's class."""

    run_names: RunNames

    @contextmanager
    def _naming_deaths(self) -> Iterator[None]:
        """Let a report of the death of this client's process name the client."""
        try:
            yield
        except EngineDeadError as error:
            raise ReplicaDeadError(self, str(error)) from error

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        await self.abort_as_named([self.run_names.present(name) for name in request_ids])

    async def abort_as_named(self, names: list[str]) -> None:
        """Abort the runs that have these names in the engine."""
        await super().abort_requests_async(names)  # type: ignore[misc]


class _RenamingLLM(_Renaming):
    async def add_request_async(self, request: Any, **more: Any) -> None:
        with self._naming_deaths():
            await super().add_request_async(self.run_names.renamed(request), **more)  # type: ignore[misc]

    async def get_output_async(self) -> Any:
        # The front end polls here a thousand times per second, where `_naming_deaths` would cost as much as the call.
        try:
            outputs = await super().get_output_async()  # type: ignore[misc]
        except EngineDeadError as error:
            raise ReplicaDeadError(self, str(error)) from error
        if not len(self.run_names):
            return outputs
        known = []
        for output in outputs.outputs:
            name = self.run_names.given(output.request_id)
            if name is not None:
                output.request_id = name
                known.append(output)
        outputs.outputs = known
        if outputs.finished_requests:
            names = map(self.run_names.given, outputs.finished_requests)
            outputs.finished_requests = {name for name in names if name is not None}
        return outputs


class _RenamingDiffusion(_Renaming):
    async def add_request_async(self, request_id: str, *arguments: Any, **more: Any) -> None:
        suffix = self.run_names.suffix_for(request_id, request_id) or ""
        with self._naming_deaths():
            await super().add_request_async(request_id + suffix, *arguments, **more)  # type: ignore[misc]

    def get_diffusion_output_nowait(self) -> Any | None:
        with self._naming_deaths():
            while (output := super().get_diffusion_output_nowait()) is not None:  # type: ignore[misc]
                name = self.run_names.given(output.request_id)
                if name is not None:
                    output.request_id = name
                    return output
        return None
