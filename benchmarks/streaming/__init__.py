"""Measure whether tokens leave a server, and reach a client beside it, as evenly as the engine makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

STOCK, ONE_PROCESS, SLEEPING, EXACT, OURS = "stock", "stock, one process", "stock, worker sleeps", "exact", "ours"
DEFAULT = (STOCK, ONE_PROCESS, SLEEPING, EXACT, OURS)


@dataclass(frozen=True)
class Variant:
    """Names a way to serve, and holds what it adds to the command and environment of `vllm serve`.

    Attributes:
        words: further arguments of `vllm serve`.
        environment: of the server.
        polling: whether the worker polls between messages as vLLM's does; else it sleeps half a millisecond at a time.
    """

    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    polling: bool = True

    @property
    def stock(self) -> bool:
        """Return whether it is vLLM without the plugin."""
        return "--scheduler-cls" not in self.words


_SCHEDULER = ("--scheduler-cls", "vllm_omni_sched.OmniScheduler")
_CHAT = (*_SCHEDULER, "--additional-config", json.dumps({"omni_sched": "chat"}))
_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}

VARIANTS: dict[str, Variant] = {
    STOCK: Variant(),
    # the worker runs in the engine core's process, where nobody polls for it; vLLM binds no thread to a core then
    ONE_PROCESS: Variant(environment=_ONE_PROCESS | _ONE_THREAD),
    SLEEPING: Variant(polling=False),
    EXACT: Variant(_SCHEDULER),
    OURS: Variant(_CHAT),
    "stock, one process, two threads": Variant(environment=_ONE_PROCESS),
    "stock, spin loop": Variant(environment={"VLLM_USE_SPINLOOP_EXT": "1"}),
    "stock, unbound": Variant(environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"} | _ONE_THREAD),
    "stock, core 0": Variant(environment={"VLLM_CPU_OMP_THREADS_BIND": "0"}),
    "stock, both cores": Variant(environment={"VLLM_CPU_OMP_THREADS_BIND": "0,1"}),
    "stock, 2 API servers": Variant(("--api-server-count", "2")),
    "stock, 8 tokens an event": Variant(("--stream-interval", "8")),
    "ours, worker sleeps": Variant(_CHAT, polling=False),
    "ours, one process": Variant(_CHAT, _ONE_PROCESS | _ONE_THREAD),
}
"""The ways to serve; *exact* is our scheduler without an option, with which it waits as stock does."""
