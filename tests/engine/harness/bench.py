"""Run the real scheduler with encode-ahead, and a worker that only records what it holds and what it was sent."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import RequestStatus

from vllm_omni_sched import OmniScheduler, OmniSyncScheduler
from vllm_omni_sched.engine.ahead.host_messages import HostOrders, HostReport
from vllm_omni_sched.engine.ahead.messages import AheadReport, Encoded, LaneFacts
from vllm_omni_sched.testing import make_item, make_request, make_runner_output, make_scheduler
from vllm_omni_sched.testing.steps import sample_by_position

EMBEDS = 8  # of an item
ITEM_BYTES = 4 * EMBEDS


class Bench:
    """A scheduler with a model of its worker's encoder cache and lane."""

    def __init__(
        self,
        *,
        async_scheduling: bool = False,
        host_bytes: int = 0,
        lane: LaneFacts | None = None,
        **config: Any,
    ) -> None:
        ahead = {"encode_ahead": True, "metrics": False}
        host = {"encoder_cache_host_bytes": host_bytes}
        self.scheduler: Any = make_scheduler(
            OmniScheduler if async_scheduling else OmniSyncScheduler,
            async_scheduling=async_scheduling,
            max_item_embeds=EMBEDS,
            options={**ahead, **host},
            **{"max_num_batched_tokens": 64, "encoder_cache_size": 64, **config},
        )
        policies = self.scheduler.omni.policies
        policies._encodes = lambda *step: {}  # steps take no time here, from which no encode's time can be learnt
        self.planner = policies.planner
        self.lane_facts = lane or LaneFacts()
        self.planner.take_report(AheadReport(lane=self.lane_facts))
        self.cache: set[str] = set()
        self.in_flight: list[tuple[Any, Any]] = []
        self.depth = 1 if async_scheduling else 0  # steps scheduled ahead of the outputs known
        self.lane: list[tuple[str, int]] = []  # with its ticket
        self.rested = 0.0  # seconds for which steps are held back
        self.made: set[str] = set()
        self.submitted: list[str] = []
        self.in_step: list[str] = []
        self.poisoned: set[str] = set()
        self.host_bytes = host_bytes
        self.host: set[str] = set()
        self.no_room_for: set[str] = set()
        self.restored: list[str] = []
        self.epoch = 0
        self.data: dict[str, Any] = {}
        self.contents: list[tuple[str, int]] = []  # to the lane, with the numbers that the items are made of
        self.loaded: dict[str, str] = {}
        self.left: dict[str, list[str]] = {}
        self.features: dict[str, Any] = {}

    def add(self, request_id: str, prompt: int, items: list[tuple[int, str]], max_tokens: int = 4) -> None:
        features = [make_item(offset, EMBEDS, mm_hash, data=self._data_of(mm_hash)) for offset, mm_hash in items]
        request = make_request(request_id, prompt, features, max_tokens=max_tokens)
        self.features[request_id] = list(features)
        self.scheduler.add_request(request)

    def _data_of(self, mm_hash: str) -> Any:
        """Return what the item of this name is made of now: a number, or names of fields whose data is elsewhere."""
        data = self.data.get(mm_hash, 0)
        return data if isinstance(data, int) else MultiModalKwargsItem(data)

    def step(self, finish: int = 0) -> Any:
        """Run one step, in which the lane finishes ``finish`` items."""
        scheduled = self.scheduler.schedule()
        self._as_worker(scheduled)
        output = make_runner_output(self.scheduler, scheduled, sample_by_position)
        report = self._encode(finish)
        report.host, report.rested, report.epoch = self.host_report, self.rested, self.epoch
        output.ec_connector_output = ECConnectorOutput(ec_connector_worker_meta=report)
        self.in_flight.append((scheduled, output))
        while len(self.in_flight) > self.depth or (self.in_flight and not scheduled.num_scheduled_tokens):
            for outputs in self.scheduler.update_from_output(*self.in_flight.pop(0)).values():
                for out in outputs.outputs:
                    if out.finish_reason is not None:
                        self.left.setdefault(out.request_id, []).append(str(out.finish_reason))
        self.scheduler.omni.policies.core.validate()
        self.scheduler.encoder_cache_manager.validate()
        return scheduled

    def forget(self) -> None:
        """Drop all encodings outside of the encoder cache, as a worker does."""
        self.lane, self.made, self.host = [], set(), set()

    def _as_worker(self, scheduled: Any) -> None:
        orders = scheduled.ec_connector_metadata
        if orders.epoch != self.epoch:
            self.epoch = orders.epoch
            self.forget()
        self.host_report = self._host(orders.host, scheduled.free_encoder_mm_hashes)
        self.cache.difference_update(scheduled.free_encoder_mm_hashes)
        for mm_hash in orders.forget:
            assert mm_hash in self.made or mm_hash in self.poisoned or mm_hash in [h for h, _ in self.lane]
            self.made.discard(mm_hash)
            self.lane = [job for job in self.lane if job[0] != mm_hash]
        for content, mm_hash in orders.load.items():
            self.made.remove(content)
            self.cache.add(mm_hash)
            self.loaded[content] = mm_hash
        for mm_hash in orders.host.restore:
            assert mm_hash in self.host, "restored from nothing"
            self.cache.add(mm_hash)
            self.restored.append(mm_hash)
        for mm_hash, ticket, modality, data, embeds in orders.submit:
            assert mm_hash not in self.made
            assert mm_hash not in [h for h, _ in self.lane]
            assert (modality, data is None, embeds) == ("image", False, EMBEDS)
            self.lane.append((mm_hash, ticket))
            self.submitted.append(mm_hash)
            self.contents.append((mm_hash, int(data["values"].data.flatten()[0])))
        for new in scheduled.scheduled_new_reqs:
            if self.planner.decisions.goes_ahead(new.req_id):
                assert [f.data for f in new.mm_features] == [None] * len(new.mm_features), "data crossed twice"
        for request_id, ids in scheduled.scheduled_encoder_inputs.items():
            for i in ids:
                self.cache.add(self.features[request_id][i].identifier)
                self.in_step.append(self.features[request_id][i].identifier)
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            end = self.scheduler.requests[request_id].num_computed_tokens
            for feature in self.features[request_id]:
                offset = feature.mm_position.offset
                if offset < end and offset + EMBEDS > end - num_tokens:
                    assert feature.identifier in self.cache, "Encoder cache miss"

    def _host(self, orders: HostOrders, freed: list[str]) -> HostReport:
        report = HostReport()
        for mm_hash in orders.drop:
            # one that had no room may be dropped before the planner knows that it had none
            assert mm_hash in self.host or mm_hash in self.no_room_for
            self.host.discard(mm_hash)
        for mm_hash, ticket in orders.keep:
            assert mm_hash in self.cache
            assert mm_hash in freed
            assert mm_hash not in self.host
            if mm_hash in self.no_room_for:
                report.lost[ticket] = mm_hash
            else:
                self.host.add(mm_hash)
                report.kept[ticket] = mm_hash, ITEM_BYTES
                report.embeds += EMBEDS
        assert len(self.host) * ITEM_BYTES <= self.host_bytes
        return report

    def _encode(self, count: int) -> AheadReport:
        done, self.lane = self.lane[:count], self.lane[count:]
        report = AheadReport(lane=self.lane_facts)
        for mm_hash, ticket in done:
            if mm_hash in self.poisoned:
                report.failed[ticket] = (mm_hash, "bad")
            else:
                self.made.add(mm_hash)
                report.ready[ticket] = Encoded(mm_hash, 0.1)
        return report

    @property
    def at_lane(self) -> list[str]:
        return [mm_hash for mm_hash, _ in self.lane]

    def decode(self) -> None:
        """Somebody decodes from now on, for long."""
        self.add("text", 4, [], max_tokens=10_000)
        self.step()

    def churn(self, chance: Random, count: int, content: Callable[[], int]) -> None:
        """Random arrivals, with items ``content()``, aborts and a lane of changing speed, until ``count`` have left.

        Asserts that each of them has left exactly once.
        """
        added, aborted = 0, set()
        for _ in range(3000):
            if added < count and chance.random() < 0.4:
                items, offset = [], 0
                for gap in [chance.randrange(0, 40) for _ in range(chance.randrange(0, 5))]:
                    items.append((offset + gap, f"item-{content()}"))
                    offset += gap + EMBEDS
                self.add(f"r{added}", offset + chance.randrange(1, 20), items, max_tokens=chance.randrange(1, 30))
                added += 1
            if chance.random() < 0.03 and self.scheduler.requests:
                victim = chance.choice(sorted(self.scheduler.requests))
                self.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
                aborted.add(victim)
            self.step(finish=chance.choice([0, 0, 1, 3]))
            if added == count and not self.scheduler.requests:
                break
        assert not self.scheduler.requests
        assert set(self.left) | aborted == {f"r{i}" for i in range(count)}
        assert not set(self.left) & aborted
        assert all(len(reasons) == 1 for reasons in self.left.values())
