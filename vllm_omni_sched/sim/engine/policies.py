"""Make the policies of a simulated engine: the same objects and options as in the real one."""

from vllm_omni_sched.config import OmniSchedConfig, OrderMode
from vllm_omni_sched.graph.order import SlaClass, WaitingOrder
from vllm_omni_sched.graph.promises import classes_of
from vllm_omni_sched.items.ahead import AheadLedger
from vllm_omni_sched.monitor.step_times import CostModel, StepMeter
from vllm_omni_sched.resource.control import make_control
from vllm_omni_sched.resource.encode_rounds import EncodeRounds
from vllm_omni_sched.resource.encoder_budget import EncoderBudget
from vllm_omni_sched.resource.lane_share import LaneShare
from vllm_omni_sched.resource.pace import PACE, PACE_BESIDE, DecodePace
from vllm_omni_sched.resource.share import EncodeShare
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.waiting import ByArrival, BySla, Waiting


class EnginePolicies:
    """The policies of one engine. Without its option each is None, and a step is the same as in vLLM."""

    def __init__(self, config: OmniSchedConfig, limits: EngineLimits) -> None:
        self.config = config
        self.costs = CostModel()
        self.steps = StepMeter()
        self.itl_target_seconds, self.share_target_seconds = config.itl_target_ms / 1e3, config.share_target_seconds
        self.classes = classes_of(config)
        self.order = WaitingOrder(config.max_wait_seconds) if config.waiting_order is OrderMode.SLA else None
        self.share: EncodeShare | None = None
        self.lane_share: LaneShare | None = None
        self.ledger: AheadLedger | None = None
        self.pace: DecodePace | None = None
        if config.encode_ahead and limits.encodes:
            self.share = EncodeShare(max_alone_seconds=2 * self.itl_target_seconds)
            self.lane_share = LaneShare(config.encode_lane_min_share)
            self.ledger = AheadLedger(limits.encoder_cache_embeds, max_encoding=limits.lane_items + 1)
            if limits.paced:
                pace = PACE_BESIDE if limits.lane_beside else PACE
                self.pace = DecodePace(pace if config.decode_pace is None else config.decode_pace)
        self.batch = make_control(
            config.batch_control, config, config.batch_min, min(config.batch_max, limits.max_num_seqs)
        )
        self.prefill = make_control(
            config.prefill_control, config, config.prefill_min_tokens, limits.max_num_batched_tokens
        )
        split = config.encoder_split and limits.encodes
        self.split = EncoderBudget(limits.encoder_budget_embeds) if split else None
        self.rounds: EncodeRounds | None = None
        if config.encode_rounds and limits.encodes:
            self.rounds = EncodeRounds(config.max_wait_seconds, config.prefill_min_tokens)

    @property
    def measures(self) -> bool:
        """Return whether any policy needs the times of steps."""
        parts = (self.share, self.batch, self.prefill, self.order, self.split, self.rounds)
        return any(part is not None for part in parts)

    def waiting(self) -> Waiting:
        """Return a new queue of waiting requests."""
        return ByArrival() if self.order is None else BySla(self.order, self.costs)

    def sla(self, name: str) -> SlaClass:
        """Return the SLA class of that name.

        Raises:
            KeyError: there is none.
        """
        return self.classes[name]
