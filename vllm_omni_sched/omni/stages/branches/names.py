"""Name the runs of requests in one stage, with the stages that their outputs are for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from vllm_omni_sched.omni.branch_connector import address
from vllm_omni_sched.omni.stages.recovery.run_names import RunNames


class BranchRunNames(RunNames):
    """Names of the runs of one stage, which is one of several that a request is in at a time.

    Connectors know a run by its name: under it the stage gets its input, and after a mark it lists the runs of the
    stages that its output is for (`OmniBranchConnector`).

    Args:
        targets: returns the suffixes of the names of these runs, by stage, for a request that is being sent.
    """

    def __init__(self, targets: Callable[[str], Mapping[int, str]]) -> None:
        super().__init__()
        self._targets = targets

    def renamed(self, request: Any) -> Any:
        external, name = request.external_req_id or request.request_id, request.request_id
        runs, targets = self._runs_of(external), self._targets(external)
        request = copy.copy(request)
        request.external_req_id = address(external, runs.suffix, targets)
        # the worker of a stage that receives nothing sends under this name
        request.request_id = address(name, runs.suffix, targets)
        self._name_present(runs, name, request.request_id)
        return request
