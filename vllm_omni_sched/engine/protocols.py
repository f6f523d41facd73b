"""Define the attributes of vLLM's objects that `SchedulerExtension` uses, to type and test it without vLLM."""

from collections.abc import Collection
from typing import Any, Protocol


class Request(Protocol):
    """The part of vLLM's `Request` that is read."""

    request_id: str
    client_index: int
    resumable: bool
    status: Any
    mm_features: list[Any]
    num_computed_tokens: int
    num_prompt_tokens: int
    num_output_placeholders: int
    num_in_flight_tokens: int

    def get_num_encoder_embeds(self, input_id: int) -> int: ...


class EncoderCache(Protocol):
    """The part of vLLM's `EncoderCacheManager` that is asked about single items."""

    def get_cached_input_ids(self, request: Any) -> Collection[int]: ...
    def check_and_update_cache(self, request: Any, input_id: int) -> bool: ...
    def get_cached_num_encoder_embeds(self, request: Any, input_id: int) -> int | None: ...
    def can_allocate(self, request: Any, input_id: int, budget: int, num_embeds_to_schedule: int) -> bool: ...


class Scheduler(Protocol):
    """The part of vLLM's `Scheduler` that is read, and its encoder cache manager, which is replaced during a call.

    `_pending_encoder_input_ids` is vLLM's record, by request, of inputs whose data model runner V2 holds (0.33).
    """

    requests: dict[str, Any]
    encoder_cache_manager: Any
    connector: Any
    max_model_len: int
    _pending_encoder_input_ids: dict[str, Any]

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any: ...
