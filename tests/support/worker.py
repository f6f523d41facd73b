"""Track what a worker knows after each scheduler output, without a model: the bookkeeping of vLLM's two model runners.

It executes nothing. It keeps each request's tokens, blocks and items as runner V1 (`_update_states`) and runner V2
(`add_requests`, `update_requests`) keep them, and says where a real runner would have gone wrong.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class WorkerRequest:
    """One request as the worker holds it; `block_ids` by KV cache group."""

    prompt_token_ids: list[int]
    features: list[Any]
    block_ids: list[list[int]]
    num_computed_tokens: int
    sampling_params: Any


class Complaint(NamedTuple):
    """A point where a runner would fail, or go on with a wrong embedding."""

    what: str
    request_id: str
    input_id: int


class Worker:
    """Models one worker of one engine.

    Args:
        use_v2_model_runner: whose rules to follow.
        separate_process: pickle each message, as for a worker in another process; else share its objects with the
            scheduler, as the executor of a single GPU does.
        expander: turns our session messages back into vLLM's (`SessionReceiver`); None for stock.
    """

    def __init__(self, *, use_v2_model_runner: bool, separate_process: bool, expander: Any = None) -> None:
        self._v2 = use_v2_model_runner
        self._separate_process = separate_process
        self._expander = expander
        self.requests: dict[str, WorkerRequest] = {}
        self.encoder_outputs: set[str] = set()
        self.encoder_input_updates: dict[tuple[str, int], Any] = {}
        self.complaints: set[Complaint] = set()

    def receive(self, output: SchedulerOutput) -> SchedulerOutput:
        """Take the message of one step; returns it as a runner of vLLM sees it, with session messages expanded."""
        self.complaints = set()
        if self._separate_process:
            output = pickle.loads(_pickled(output))
        else:
            output = replace(output, scheduled_new_reqs=list(output.scheduled_new_reqs))
        if self._expander is not None:
            self._expander.expand(output)
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        if self._v2:
            for request_id in output.preempted_req_ids or ():
                self.requests.pop(request_id, None)
        self.encoder_outputs.difference_update(output.free_encoder_mm_hashes)
        self._add_requests(output)
        self._update_requests(output)
        self._update_encoder_inputs(getattr(output, "encoder_input_updates", None) or {})
        self._encode(output)
        self._gather(output)
        return output

    def reset_encoder_cache(self) -> None:
        self.encoder_outputs.clear()

    def _add_requests(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            # Runner V1 keeps the message's own list of items, which in one process is the sender's, and so does
            # ours. Stock's is copied, for it grows as soon as the session does: before the worker is told.
            shares_list = self._expander is not None and not self._v2
            features = new.mm_features if shares_list else list(new.mm_features)
            self.requests[new.req_id] = WorkerRequest(
                prompt_token_ids=list(new.prompt_token_ids),
                features=features,
                block_ids=[list(group) for group in new.block_ids],
                num_computed_tokens=new.num_computed_tokens,
                sampling_params=new.sampling_params,
            )

    def _update_requests(self, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        for request_id, restored in getattr(cached, "restored", {}).items():
            self._expander.restore(request_id, restored, self.requests[request_id].features)
        for index, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            request.num_computed_tokens = cached.num_computed_tokens[index]
            new_block_ids = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                request.block_ids = [list(group) for group in new_block_ids]
            elif new_block_ids is not None:
                for group, new in zip(request.block_ids, new_block_ids, strict=True):
                    group.extend(new)

    def _update_encoder_inputs(self, updates: dict[str, dict[int, Any]]) -> None:
        """Update items as runner V2 does since 0.33. `encoder_input_updates` keeps those that matter: letting go of
        an item installed without its tensors (M-RoPE models keep a few fields of it) does not."""
        self.encoder_input_updates = {}
        for request_id, by_item in updates.items():
            features = self.requests[request_id].features
            for input_id, data in by_item.items():
                held = features[input_id].data
                if data is not None or (held is not None and any(not e.field.keep_on_cpu for e in held.values())):
                    self.encoder_input_updates[request_id, input_id] = data
                features[input_id] = replace(features[input_id], data=data)

    def _encode(self, output: SchedulerOutput) -> None:
        for request_id, input_ids in output.scheduled_encoder_inputs.items():
            for input_id in input_ids:
                feature = self.requests[request_id].features[input_id]
                if feature.data is None and feature.identifier not in self.encoder_outputs:
                    self.complaints.add(Complaint("no data to encode", request_id, input_id))
                self.encoder_outputs.add(feature.identifier)

    def _gather(self, output: SchedulerOutput) -> None:
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens
            for input_id, feature in enumerate(request.features):
                position = feature.mm_position
                first = max(start - position.offset, 0)
                last = min(start + num_tokens - position.offset, position.length)
                if first >= last or not _embeds(position, first, last):
                    continue
                if feature.identifier not in self.encoder_outputs:
                    self.complaints.add(Complaint("encoder cache miss", request_id, input_id))


def _embeds(position: Any, first: int, last: int) -> int:
    start, end = position.get_embeds_indices_in_range(first, last)
    return int(end - start)


def needs_data(request: WorkerRequest) -> Callable[[Any], bool]:
    """Whether an item's data may still be asked for: vLLM's own rule for what it strips."""
    return lambda feature: feature.mm_position.offset + feature.mm_position.length > request.num_computed_tokens


def _pickled(output: SchedulerOutput) -> bytes:
    """Pickle a message with its tensors as arrays: torch writes an archive of its own for each, at 2 ms."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5)
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: lambda one: (torch.from_numpy, (one.numpy(),))}
    pickler.dump(output)
    return stream.getvalue()
