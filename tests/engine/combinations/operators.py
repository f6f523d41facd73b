"""An EC connector as an operator might name it: it says what the test lets it say, and notes what it was asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorWorkerMetadata,
)


@dataclass
class Wanted(ECConnectorMetadata):
    """Carries what the scheduler's half of `Operators` tells the workers' halves."""

    step: int = 0


@dataclass
class Stored(ECConnectorWorkerMetadata):
    """What the workers' half of `Operators` reports."""

    count: int = 0

    def aggregate(self, other: Any) -> Stored:
        return Stored(self.count + other.count)


class Operators(ECConnectorBase):
    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.config = vllm_config.ec_transfer_config
        self.has: set[str] = set()
        self.holds_back = False
        self.pending = False
        self.unavailable: set[str] = set()
        self.report: Stored | None = None
        self.asked: list[Any] = []
        self.outputs: list[Any] = []

    def has_cache_item(self, identifier: str) -> bool:
        return identifier in self.has

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        self.asked.append(("ensure", request.request_id, num_computed_tokens))
        return not self.holds_back

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self.asked.append(("alloc", request.request_id, index))

    def update_state_after_free(self, request: Any, index: int) -> None:
        self.asked.append(("free", request.request_id, index))

    def build_connector_meta(self, scheduler_output: Any) -> Wanted:
        return Wanted(7)

    def update_connector_output(self, connector_output: Any) -> None:
        self.outputs.append(connector_output)

    def take_unavailable_requests(self) -> set[str]:
        gone, self.unavailable = self.unavailable, set()
        return gone

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        return True, {"sent": request.request_id}

    def has_pending_push_work(self) -> bool:
        return self.pending

    def start_save_caches(self, **kwargs: Any) -> None:
        self.asked.append(("start_save", sorted(kwargs)))

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        self.asked.append(("load", self._get_connector_metadata().step))
        encoder_cache["theirs"] = "loaded by the operator's"

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        self.asked.append(("save", mm_hash, encoder_cache[mm_hash]))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return finished_req_ids, None

    def start_worker_services(self) -> None:
        self.asked.append("services")

    def register_caches(self, ec_caches: dict[str, Any]) -> None:
        self.asked.append(("register", sorted(ec_caches)))

    def build_connector_worker_meta(self) -> Stored | None:
        return self.report

    def shutdown(self) -> None:
        self.asked.append("shutdown")
