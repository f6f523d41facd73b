"""Worker half of encode-ahead in an engine with tensor parallelism, where the lanes of all ranks encode together."""

from typing import Any

import torch
from vllm.logger import init_logger

from vllm_omni_sched.config.errors import LaneDiedError, LaneError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.ahead.encode import build_member_lane, first_job, processors_here
from vllm_omni_sched.engine.ahead.messages import AheadOrders, AheadReport, LaneLoss, RankOrders
from vllm_omni_sched.engine.ahead.tensor_parallel import ranks_here
from vllm_omni_sched.engine.ahead.worker import LANE_JOBS, AheadWorker, Item
from vllm_omni_sched.lanes import Done, MemberLane
from vllm_omni_sched.lanes.processors import Processors
from vllm_omni_sched.logs import logger_name

logger = init_logger(logger_name(__name__))

_ANSWERS_WHEN_LOST: dict[str, Any] = {"poll": (), "submit": False, "wait": False}


class RankWorker(AheadWorker):
    """Encodes items as one of several ranks, which get the same orders, and whose lanes run the same jobs in one order.

    1. An item that was ordered is encoded even if it is forgotten meanwhile, because another rank may have begun it.
    2. This rank does not replace a lane by itself: it reports the loss, and waits for the scheduler's `RankOrders`.
    3. Then every rank encodes in that step, in the worker itself and so with vLLM's own tensor-parallel group, what not
       all ranks have got from the lanes; the data of an item is kept until all ranks have encoded it.
    """

    def __init__(self, config: OmniSchedConfig, *, alone: bool = True) -> None:
        super().__init__(config, alone=alone)
        self._generation = 0
        self._stale = False  # whether the lane has weights of an epoch before
        self._loss: LaneLoss | None = None  # of this generation
        self._loss_told = False
        self._unsettled: dict[str, Item] = {}  # mm_hash -> what some rank may not have encoded yet

    def _build_lane(self, model: Any, device: torch.device) -> tuple[Processors, ...]:
        """Build the lane, which joins those of the other ranks."""
        ranks = ranks_here()
        processors = processors_here(self._config, device, alone=self.alone, ranks=ranks)
        self._encode = self._encode.among(ranks)
        self._lane = build_member_lane(self._encode, model, self._config, LANE_JOBS, processors[0])
        return processors

    def _no_lane(self, reason: str) -> None:
        self._lost(reason, final=True)  # the lanes of other ranks are of no use alone

    def carry_out(self, orders: AheadOrders, encoder_cache: dict[str, torch.Tensor]) -> None:
        self._catch_up(orders.epoch)
        if orders.ranks is not None:
            self._follow(orders.ranks)
        for mm_hash in (*orders.forget, *orders.load):
            self._unsettled.pop(mm_hash, None)
        super().carry_out(orders, encoder_cache)

    def _catch_up(self, epoch: int) -> None:
        """Drop all encodings if the orders are of another epoch; they name the lanes that follow (rule 2)."""
        if epoch != self._epoch:
            self._epoch, self._stale = epoch, True
            self.forget()

    def forget(self) -> None:
        super().forget()
        self._unsettled.clear()

    def _follow(self, orders: RankOrders) -> None:
        for mm_hash in orders.settled:
            self._unsettled.pop(mm_hash, None)
        if orders.generation == self._generation:
            return
        self._generation = orders.generation
        if self._loss is not None and not self._loss.final:
            self._loss = None
        for state in (self._backlog, self._at_lane, self._tickets, self._ready, self._failed, self._unknown):
            state.clear()
        if orders.stopped:
            self._loss = None
            self._encode_in_steps()
        elif self._loss is not None:
            # the scheduler began this generation before it heard that there can be none
            self._loss, self._loss_told = self._loss._replace(generation=orders.generation), False
        else:
            self._renew()
        again = [self._unsettled[mm_hash]._replace(ticket=ticket) for mm_hash, ticket in orders.again]
        self._unsettled = {item.mm_hash: item for item in again}
        for item in again:
            self._tickets[item.mm_hash] = item.ticket
            self._record(item, self._in_step(item.job))

    def _renew(self) -> None:
        assert isinstance(self._lane, MemberLane)
        try:
            if self._stale:
                self._lane.renew()
            else:
                self._lane.replace()
            self._stale = False
            self._lane.submit(first_job(self._generation))
        except LaneError as error:
            self._lost(str(error), final=True)

    def _take(self, item: Item) -> None:
        self._unsettled[item.mm_hash] = item
        super()._take(item)

    def _drop(self, key: str) -> None:
        """Do nothing, by rule 1."""

    def _warmed_up(self, done: Done) -> None:
        if isinstance(done.error, LaneDiedError):
            self._lost(str(done.error))
        elif done.error is not None:
            self._lost(f"the warm-up encode failed: {done.error}", final=True)

    def _ended(self, item: Item, done: Done) -> None:
        if isinstance(done.error, LaneDiedError):
            self._lost(str(done.error))
        else:
            self._record(item, done)

    def _ask(self, method: str, *args: Any) -> Any:
        if self._loss is not None:
            return _ANSWERS_WHEN_LOST[method]
        try:
            return getattr(self.lane, method)(*args)
        except LaneError as error:
            self._lost(str(error), final=not isinstance(error, LaneDiedError))
            return _ANSWERS_WHEN_LOST[method]

    def _lost(self, reason: str, *, final: bool = False) -> None:
        """Record that the lane is lost; of several reasons, the first one counts, unless a later one is final."""
        if self._loss is None or (final and not self._loss.final):
            self._loss, self._loss_told = LaneLoss(self._generation, reason, final), False

    def report(self) -> AheadReport | None:
        report = super().report()
        if self._loss is not None and not self._loss_told:
            self._loss_told = True
            restarts = self._restarts + self.lane.restarts
            report = report or AheadReport(restarts=restarts, lane=self._facts, epoch=self._epoch)
            report.loss = self._loss
        return report
