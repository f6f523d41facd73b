"""Worker half of encode-ahead: runs the lane and keeps its results."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from vllm.logger import init_logger

from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import LaneDiedError, LaneError, NoLaneError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.ahead.encode import Encode, build_lane, processors_here, refuse_lora_layers
from vllm_omni_sched.engine.ahead.full_width import FullWidth
from vllm_omni_sched.engine.ahead.host_store import HostStore
from vllm_omni_sched.engine.ahead.messages import NO_LANE, AheadOrders, AheadReport, Encoded, LaneFacts
from vllm_omni_sched.engine.ahead.polling import sleep_beside
from vllm_omni_sched.engine.ahead.warm_up import WARM_UP
from vllm_omni_sched.engine.lending.pages import KvPages
from vllm_omni_sched.lanes import Done, InlineLane, Job, Lane
from vllm_omni_sched.lanes.processors import Processors, together
from vllm_omni_sched.logs import logger_name

logger = init_logger(logger_name(__name__))

LANE_JOBS = 4
"""Jobs submitted to the lane at once; those queued behind them in the worker can be dropped at no cost."""


class Item(NamedTuple):
    """An item to encode: ticket of its order, mm_hash, modality, data, and number of embeddings."""

    ticket: int
    mm_hash: str
    modality: str
    data: Any
    embeds: int

    @property
    def job(self) -> Job:
        """Return the job for a lane. Its key differs from that of an earlier attempt, which may still be running."""
        return Job(str(self.ticket), (self.modality, self.data), max(1, self.embeds))


class AheadWorker:
    """Encodes items in a lane, keeps the results until they are loaded, and reports to the scheduler.

    The lane is built by `start`, once the model is loaded.

    ``alone``: whether no other engine uses CPUs of this machine, as far as vLLM and `attach_encode_ahead` know.
    ``kv_pages``: returns the memory of the KV cache, which there is once steps come.
    """

    kv_pages: Callable[[], KvPages]

    def __init__(self, config: OmniSchedConfig, *, alone: bool = True) -> None:
        self._config = config
        self.alone = alone
        self._facts = LaneFacts()
        self._told: LaneFacts | None = None
        self._lane: Lane | None = None
        self._full_width: FullWidth | None = None
        self._backlog: dict[str, Item] = {}  # job key -> item
        self._at_lane: dict[str, Item] = {}
        self._made: dict[str, torch.Tensor] = {}
        self._tickets: dict[str, int] = {}  # of the items in the backlog or in the lane that are still wanted
        self._ready: dict[int, Encoded] = {}
        self._failed: dict[int, tuple[str, str]] = {}
        self._share = 1.0
        self._unknown: set[int] = set()  # tickets that were reported, which the scheduler may not know yet
        self._rested = 0.0  # seconds for which this step was held back
        self._restarts = 0  # of lanes before this one
        self._epoch = 0  # of the last orders
        self._times: dict[str, tuple[int, float]] = {}  # modality -> embeddings, seconds
        self._pages: KvPages | None = None
        self._given_back = 0
        self._bytes_per_embed = 0.0
        self.host = HostStore(config.encoder_cache_host_bytes)

    def start(self, model: Any, device: torch.device, dummies: Callable[[], Iterable[Any]] = tuple) -> None:
        """Build the lane around this model's encoders and warm it up.

        Where there can be no lane although a profile asks for one, vLLM encodes all items, as without the option: the
        scheduler uses no lane that was not reported.

        Raises:
            NoLaneError: this model cannot have a lane, and the operator has set ``encode_ahead``.
            LaneError: this machine cannot have one, and the operator has set ``encode_ahead``.
            ConfigError: an option about the lane cannot be used here.
        """
        self._encode = Encode(model, device, dummies)
        try:
            processors = self._build_lane(model, device)
        except (NoLaneError, LaneError) as error:
            if "encode_ahead" in self._config.given:
                raise
            logger.warning(
                "Profile %s has turned on 'encode_ahead', which this engine cannot have: all items are encoded in the "
                "step, as without it. %s",
                self._config.profile.value,
                error,
            )
            self._lane, self._facts = InlineLane(self._encode, LANE_JOBS), NO_LANE
            self._no_lane(str(error))
        else:
            self._lane_started(processors)

    def _build_lane(self, model: Any, device: torch.device) -> tuple[Processors, ...]:
        """Build the lane, and return the CPUs of its processes; raises the errors of `start`."""
        refuse_lora_layers(model)
        processors = processors_here(self._config, device, alone=self.alone)
        self._full_width = FullWidth(processors)
        if self._full_width.lends:
            # oneDNN keeps a kernel for each size, with as many threads as there are when it is first used; vLLM is
            # about to profile the encoder with those of the LLM alone.
            with self._full_width.lent():
                self._warmed_up(self._in_step(WARM_UP))
        self._lane = build_lane(self._encode, model, device, self._config, LANE_JOBS, processors)
        return processors

    def _no_lane(self, reason: str) -> None:
        """Record that this worker has no lane from the start."""

    def _lane_started(self, processors: tuple[Processors, ...]) -> None:
        for one in processors:
            whose = "of its own" if one.own else "shared with the LLM"
            logger.info("Encode-ahead starts an encoder process on CPUs %s, %s", sorted(one.cpus), whose)
        if (everything := together(processors)) is not None:
            logger.info(
                "Encode-ahead encodes an item that is alone on CPUs %s while the LLM computes nothing",
                sorted(everything.cpus),
            )
        if processors:  # those of the lane may be where this process polls for its next message
            sleep_beside(self)
        self._facts = LaneFacts(max(1, len(processors)), own_processors=any(one.own for one in processors))

    @property
    def lane(self) -> Lane:
        """Return the lane; `start` must have been called."""
        assert self._lane is not None, "a step came before the model was loaded"
        return self._lane

    @property
    def encoding(self) -> bool:
        """Return whether the lane has jobs."""
        return bool(self._at_lane)

    def in_step(self) -> AbstractContextManager[None]:
        """Return the context in which a step encodes its items: at full width, unless the lane is at work."""
        if self._full_width is None:
            return nullcontext()
        return self._full_width.lent(lane_idle=not self._at_lane)

    def carry_out(self, orders: AheadOrders, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Carry out the scheduler's orders for this step, on ``encoder_cache`` (mm_hash -> embeddings)."""
        self._catch_up(orders.epoch)
        self._collect()
        self._unknown.difference_update(orders.known)
        if orders.lent:
            self._give_back(orders.lent)
        for mm_hash in orders.forget:
            self._made.pop(mm_hash, None)
            ticket = self._tickets.pop(mm_hash, None)
            if ticket is not None:
                self._drop(str(ticket))
        for content, mm_hash in orders.load.items():
            encoder_cache[mm_hash] = self._made.pop(content)
        self.host.restore(orders.host, encoder_cache)
        for mm_hash, ticket, modality, data, embeds in orders.submit:
            self._take(Item(ticket, mm_hash, modality, data, embeds))
        if orders.share != self._share:
            self._share = orders.share
            self.lane.set_share(orders.share)
        if orders.llm_idle != self.lane.llm_idle:
            self.lane.set_llm_idle(orders.llm_idle)
        self._feed()
        if orders.rest_seconds and self._may_wait:
            begun = monotonic_seconds()
            self._ask("wait", orders.rest_seconds)
            self._rested = monotonic_seconds() - begun

    def _catch_up(self, epoch: int) -> None:
        """Drop all encodings, and replace lanes that have former weights, if the orders are of another epoch."""
        if epoch != self._epoch:
            self._epoch = epoch
            self.forget()
            if not self.lane.sees_owner:
                self._ask("renew")

    def forget(self) -> None:
        """Drop all encodings: the weights may have changed, or will.

        A lane that works with the weights of this process has ended its work when this returns; others are replaced
        with the next orders.
        """
        if self._lane is None:
            return
        for state in (
            self._backlog,
            self._at_lane,
            self._made,
            self._tickets,
            self._ready,
            self._failed,
            self._unknown,
        ):
            state.clear()
        self._told = None  # the scheduler ignores reports of the epoch before
        self.host.forget()
        if self.lane.sees_owner:
            self.lane.renew()

    def _give_back(self, block_ids: tuple[int, ...]) -> None:
        """Give the memory of lent KV blocks back to the operating system, before the encodes begin that need it."""
        if self._pages is None:
            self._pages = self.kv_pages()
        try:
            self._given_back += self._pages.give_back(block_ids)
        except OSError as error:
            logger.error(
                "Encode-ahead: the operating system keeps the memory of %d KV blocks that were lent to encodes, which "
                "therefore take more memory in all; set 'kv_lending' to 0: %s",
                len(block_ids),
                error,
            )

    def _take(self, item: Item) -> None:
        self._tickets[item.mm_hash] = item.ticket
        self._backlog[item.job.key] = item

    def _drop(self, key: str) -> None:
        """Stop the encode of an item that no request needs any more, if it has not ended."""
        self._backlog.pop(key, None)
        if self._at_lane.pop(key, None) is not None:
            self.lane.cancel(key)

    def _feed(self) -> None:
        while self._backlog:
            key, item = next(iter(self._backlog.items()))
            if not self._ask("submit", item.job):
                return
            self._at_lane[key] = self._backlog.pop(key)

    def _collect(self) -> None:
        for done in self._ask("poll"):
            if done.key == WARM_UP.key:
                self._warmed_up(done)
            else:
                self._ended(self._at_lane.pop(done.key), done)

    def _warmed_up(self, done: Done) -> None:
        if done.error is not None:
            logger.warning("Encode-ahead: the warm-up encode failed, so the first item may take longer: %s", done.error)

    def _ended(self, item: Item, done: Done) -> None:
        if isinstance(done.error, LaneDiedError):
            logger.warning(
                "Encode-ahead: the encoder process died while it encoded item %s, which is encoded in the step "
                "instead; a new process is started: %s",
                item.mm_hash,
                done.error,
            )
            done = self._in_step(item.job)
        self._record(item, done)

    def _record(self, item: Item, done: Done) -> None:
        """Keep a result if it is still wanted, and report it in any case."""
        wanted = self._tickets.get(item.mm_hash) == item.ticket
        if wanted:
            del self._tickets[item.mm_hash]
        if done.error is None:
            if wanted:
                self._made[item.mm_hash] = done.result
            self._ready[item.ticket] = Encoded(item.mm_hash, done.seconds)
            embeds, seconds = self._times.get(item.modality, (0, 0.0))
            self._times[item.modality] = (embeds + len(done.result), seconds + done.seconds)
            self._bytes_per_embed = max(self._bytes_per_embed, done.peak_bytes / max(1, len(done.result)))
        else:
            logger.error(
                "Encode-ahead: item %s cannot be encoded; the requests that need it fail: %s", item.mm_hash, done.error
            )
            self._failed[item.ticket] = (item.mm_hash, str(done.error))

    def _in_step(self, job: Job) -> Done:
        """Run the job here and now, as vLLM would, except that an error fails this job alone."""
        here = InlineLane(self._encode)
        here.submit(job)
        (done,) = here.poll()
        return done

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the lane; if the lane cannot be restarted, replace it by one that encodes in the step."""
        try:
            return getattr(self.lane, method)(*args)
        except LaneError as error:
            logger.error(
                "Encode-ahead stops: its encoder cannot be restarted, so all further items are encoded in the step. "
                "Restart the engine to encode ahead again: %s",
                error,
            )
            self._encode_in_steps()
            self._backlog = {**self._at_lane, **self._backlog}
            self._at_lane = {}
            return getattr(self.lane, method)(*args)

    def _encode_in_steps(self) -> None:
        """Replace the lane by one that encodes in the step."""
        self.lane.close(0.0)
        self._restarts += self.lane.restarts + 1
        self._lane, self._facts = InlineLane(self._encode, LANE_JOBS), NO_LANE

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` for an encode to end, or for a loan that lets one begin; for steps without tokens."""
        if self._may_wait:
            self._ask("wait", seconds)
        elif not (self._at_lane or self._backlog or self._unknown or self._ready or self._failed):
            sleep_seconds(seconds)

    @property
    def _may_wait(self) -> bool:
        """Return whether an encode is under way, and none has ended that the scheduler does not know of."""
        return bool(self._at_lane) and not (self._unknown or self._ready or self._failed)

    def report(self) -> AheadReport | None:
        """Return the encodes that ended since the last report; None if there is nothing new."""
        if self._lane is None:
            return None
        self._collect()
        self._feed()
        host, restarts = self.host.take_report(), self._restarts + self._lane.restarts
        rested, self._rested = self._rested, 0.0
        given_back, self._given_back = self._given_back, 0
        news = self._ready or self._failed or host or rested or given_back
        if not news and self._told == self._facts:
            return None
        self._told = self._facts
        self._unknown.update(self._ready, self._failed)
        report = AheadReport(
            self._ready,
            self._failed,
            restarts,
            self._times,
            host,
            self._facts,
            rested=rested,
            given_back_bytes=given_back,
            bytes_per_embed=self._bytes_per_embed,
            epoch=self._epoch,
        )
        self._ready, self._failed, self._times = {}, {}, {}
        return report

    def close(self) -> None:
        """Close the lane."""
        if self._lane is not None:
            self._lane.close(1.0)
