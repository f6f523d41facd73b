"""Decide what is encoded beside the steps of an engine, and which share of the device that gets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class LaneFacts:
    """Facts about an engine that decide whether it may have an encoder lane; the defaults allow one.

    ``workers``: ranks of its tensor parallelism. ``groups``: of them, or pipeline stages, that run the model together.
    ``spread``: the workers may be on several hosts. ``device``: its type, as vLLM names it. ``vllm``: the version, for
    messages. ``reports_of_all_workers``: those of connectors reach the scheduler. ``encodes_only``: whether another
    engine decodes what this one encodes (role ``ec_producer``). ``graphs_of_unknown_sizes``: whether vLLM captures CUDA
    graphs of the encoder for sizes that it chooses while it starts. ``encoder_lora``: whether adapters may change the
    encoder. ``sets_context``: class of the model, or a base of it, that sets vLLM's forward context while it encodes;
    empty if none does. ``one_buffer``: whether all attention of the encoder works in one buffer.
    ``items_with_workers``: whether the processor cache keeps items where only the workers can read them.
    """

    multimodal: bool = True
    workers: int = 1
    groups: int = 1
    spread: bool = False
    device: str = "cuda"
    vllm: str = ""
    connectors_hold_back: bool = True
    runner_runs_connectors: bool = True
    reports_of_all_workers: bool = True
    compiled_encoder: bool = False
    graphs_of_unknown_sizes: bool = False
    encodes_only: bool = False
    encoder_lora: bool = False
    encoder_decoder: bool = False
    sets_context: str = ""
    one_buffer: bool = False
    items_with_workers: bool = False


@dataclass(frozen=True)
class Obstacle:
    """Reason why an engine cannot have an encoder lane, as a clause, and what removes it, if anything does."""

    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return self.reason

    @property
    def refusal(self) -> str:
        """Return the error for an operator who has set ``encode_ahead``, in one sentence with the fix."""
        remedy = f"{self.remedy}, or " if self.remedy else ""
        return f"option 'encode_ahead' cannot be on here, because {self.reason}: {remedy}set it to false"


ONE_BUFFER = Obstacle(
    "all FlashInfer attention of the encoder works in one buffer", "choose another --mm-encoder-attn-backend"
)


def sets_context(model: str) -> Obstacle:
    """Return the obstacle that the class ``model`` is, which sets vLLM's forward context, to a lane in a thread."""
    return Obstacle(
        f"{model} sets vLLM's forward context while it encodes, and there is one for all threads of a process"
    )


def untold_layers(model: str) -> Obstacle:
    """Return the obstacle that the class ``model`` is where adapters are loaded: any of its layers may be adapted."""
    return Obstacle(
        f"{model} does not tell vLLM which of its layers belong to the language model, so that its encoder may get "
        "LoRA weights",
        "name layers of the language model alone in --lora-target-modules",
    )


def refusal(facts: LaneFacts) -> str | None:
    """Return why ``encode_ahead`` is refused for such an engine, in one sentence with the fix; None if it is not."""
    found = obstacle(facts)
    return None if found is None else found.refusal


def obstacle(facts: LaneFacts) -> Obstacle | None:
    """Return why such an engine cannot have an encoder lane; None if it can.

    1. A model without multimodal items has no use for it: the option has no effect, and nothing is refused.
    2. Otherwise the first reason that holds is returned.
    """
    if not facts.multimodal:
        return None
    reasons = {
        Obstacle(f"connectors of vLLM {facts.vllm} cannot hold requests back"): not facts.connectors_hold_back,
        Obstacle(
            f"model runner V2 of vLLM {facts.vllm} does not run connectors in every step"
        ): not facts.runner_runs_connectors,
        Obstacle(f"the device {facts.device!r} is not supported"): facts.device not in ("cpu", "cuda"),
        Obstacle(
            "a compiled encoder cannot yield to decode steps", "leave compile_mm_encoder out"
        ): facts.compiled_encoder,
        Obstacle(
            "vLLM chooses the sizes of the encoder's CUDA graphs while it starts, and the scheduler must know them to "
            "leave those items to the step",
            "name them in encoder_cudagraph_token_budgets",
        ): facts.graphs_of_unknown_sizes,
        Obstacle(
            "this engine only encodes (ec_role 'ec_producer'), so no request decodes beside an encode",
            "set ec_role to 'ec_both'",
        ): facts.encodes_only,
        Obstacle("of several pipeline stages or context-parallel groups, only the first has the encoder"): facts.groups
        > 1,
        Obstacle(
            "the lanes of several GPUs would each need a stream and a process group of their own, which no machine "
            "with GPUs has tried"
        ): facts.workers > 1 and facts.device != "cpu",
        Obstacle("its workers encode together, and may be on several hosts"): facts.workers > 1 and facts.spread,
        Obstacle(f"vLLM {facts.vllm} reads the reports of one worker only"): facts.workers > 1
        and not facts.reports_of_all_workers,
        Obstacle(
            "the encoder may have LoRA weights, which vLLM activates for the items of one step at a time",
            "leave --enable-tower-connector-lora out",
        ): facts.encoder_lora,
        Obstacle("this is an encoder-decoder model"): facts.encoder_decoder,
        # On a CPU the lane is a process, with a forward context and buffers of its own.
        sets_context(facts.sets_context): bool(facts.sets_context) and facts.device == "cuda",
        ONE_BUFFER: facts.one_buffer and facts.device == "cuda",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@dataclass
class LaneLoad:
    """Work that one lane of a pool holds, in sizes of jobs, and its seconds for each unit of size; None until timed."""

    held: float = 0.0
    seconds_per_size: float | None = None

    _WEIGHT = 0.3  # of the newest job

    def left(self, size: float) -> None:
        """Record that the lane holds a job of this size no more."""
        self.held = max(0.0, self.held - size)

    def ended(self, size: float, seconds: float) -> None:
        """Record that the lane took so many seconds for a job of this size."""
        rate = seconds / size
        known = self.seconds_per_size
        self.seconds_per_size = rate if known is None else known + self._WEIGHT * (rate - known)


def earliest(loads: Sequence[LaneLoad], size: float) -> int:
    """Return which lane is expected to finish a further job of this size first.

    1. A lane finishes it after all that it holds, at its measured speed.
    2. A lane that was not timed yet is as quick as the quickest that was.
    3. Of several, the first one.
    """
    quickest = min((one.seconds_per_size for one in loads if one.seconds_per_size is not None), default=1.0)
    return min(
        range(len(loads)),
        key=lambda at: (loads[at].held + size) * (quickest if (rate := loads[at].seconds_per_size) is None else rate),
    )


def lanes_to_widen(jobs: Sequence[int], *, llm_idle: bool) -> list[bool]:
    """Return for each lane of a pool whether it may use the processors of all lanes.

    1. None while the LLM computes: an encode of several threads waits for the slowest one, and so would the step.
    2. Only a lane that alone has jobs: lanes that work at the same time use all processors already.

    Args:
        jobs: the number of jobs that each lane holds.
        llm_idle: whether the step that runs now has no tokens.
    """
    alone = llm_idle and sum(map(bool, jobs)) == 1
    return [alone and number > 0 for number in jobs]


PACE, PACE_BESIDE = 0.8, 0.25
"""Fractions of the ITL target: where the encoder shares the LLM's processors, and where it has others, too."""

IDLE_STEP_SECONDS = 0.01
"""A step without tokens lasts until an encode has ended, but no longer: new requests wait behind it."""


class PaceReason(str, Enum):
    """Reason for the length of the pause before a step."""

    NOT_ENCODING = "not_encoding"  # no pause: nothing is being encoded
    NO_DECODE = "no_decode"  # no pause: a step without tokens waits for an encode anyway
    PREFILL = "prefill"  # no pause: requests wait for their first token
    OVER_TARGET = "over_target"  # no pause: decoding is already slower than promised
    SHARE = "share"  # for as long as the lane's share asks
    TARGET = "target"  # shorter than that, or tokens would be late


class DecodePace:
    """Pauses between decode steps while an encode runs, so that the lane gets its share of the time.

    A lane of low priority gets what decoding leaves, which on a CPU is next to nothing, and decoding much faster than
    promised is of no use (people read at most about 50 tokens a second). So, with a step that takes ``busy`` seconds:

    1. The pause is busy * share / (1 - share).
    2. But a step and its pause take at most ``fraction`` of the inter-token-latency target.
    3. There is no pause before a step that computes prompts: it is long enough, and first tokens wait for it.
    4. There is no pause while the measured latency is above the target.

    Args:
        fraction: fraction of the target, in [0, 1]; 0 means no pauses.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def rest(
        self,
        share: float,
        busy_seconds: float,
        itl_seconds: float | None,
        itl_target_seconds: float,
        *,
        encoding: bool,
        decoding: bool,
        prefill: bool = False,
    ) -> tuple[float, PaceReason]:
        """Return the seconds to pause before the next step, and the reason. ``prefill``: it computes prompts."""
        if not encoding:
            return 0.0, PaceReason.NOT_ENCODING
        if not decoding:
            return 0.0, PaceReason.NO_DECODE
        if prefill:
            return 0.0, PaceReason.PREFILL
        if itl_seconds is not None and itl_seconds > itl_target_seconds:
            return 0.0, PaceReason.OVER_TARGET
        most = max(0.0, self.fraction * itl_target_seconds - busy_seconds)
        wanted = busy_seconds * share / (1 - share) if share < 1 else most
        return (wanted, PaceReason.SHARE) if wanted < most else (most, PaceReason.TARGET)


class ShareReason(str, Enum):
    """Reason for the lane's share."""

    NO_DECODE = "no_decode"  # all of it: no request decodes
    NO_TARGET = "no_target"  # all of it: no decoding request has an ITL target
    NOT_MEASURED = "not_measured"  # held: no latency is known yet
    OVER_TARGET = "over_target"  # lowered
    UNDER_TARGET = "under_target"  # raised
    AT_MIN = "at_min"  # over target, cannot go lower
    AT_MAX = "at_max"  # under target, cannot go higher


@dataclass(frozen=True)
class DecodeLoad:
    """Load of the requests that decode now, with their tightest target; ITL in seconds, None before it is measured.

    Raises:
        ValueError: the latency is negative or not finite, or the target is not above 0.
    """

    itl_target_seconds: float
    itl_seconds: float | None = None  # EWMA

    def __post_init__(self) -> None:
        if not self.itl_target_seconds > 0:
            raise ValueError(f"itl_target_seconds must be above 0, got {self.itl_target_seconds}")
        if self.itl_seconds is not None and not 0 <= self.itl_seconds < math.inf:
            raise ValueError(f"itl_seconds must be finite and >= 0, got {self.itl_seconds}")


class LaneShare:
    """Controls the lane's share by a PI controller on the relative ITL error, (target - ITL) / target.

    1. Nobody decodes, or nobody has a target: the whole device. What was learnt is kept for when
       decoding goes on.
    2. While the ITL is over its target, the share falls at every update, by at least the integral's part.
    3. Otherwise it moves by proportional x change of the error + integral x error x seconds passed.
    4. It stays in ``[min_share, 1]``, so encoding is never starved. The integral is the share itself, so
       bounding it prevents windup.
    5. A pause between updates counts as at most one second, and the error as no less than -1.
    """

    def __init__(self, min_share: float = 0.1, proportional: float = 0.2, integral: float = 0.5) -> None:
        self.min_share = min_share
        self.proportional = proportional
        self.integral = integral
        self._share = 1.0
        self._error: float | None = None
        self._updated = -math.inf

    def update(self, decoding: DecodeLoad | None, now: float) -> tuple[float, ShareReason]:
        """Return the share from ``now`` on, and its reason. ``decoding``: None if nobody decodes."""
        if decoding is None:
            return self.follow(None, None, now)
        return self.follow(decoding.itl_target_seconds, decoding.itl_seconds, now)

    def follow(
        self, itl_target_seconds: float | None, itl_seconds: float | None, now: float
    ) -> tuple[float, ShareReason]:
        """Return what `update` does for a `DecodeLoad` of these two; a target of None: nobody decodes."""
        passed = now - self._updated
        if passed > 0.0:
            self._updated = now
            if passed > 1.0:
                passed = 1.0
        else:
            passed = 0.0
        if itl_target_seconds is None or itl_target_seconds == math.inf:
            self._error = None
            return 1.0, ShareReason.NO_DECODE if itl_target_seconds is None else ShareReason.NO_TARGET
        if itl_seconds is None:
            return self._share, ShareReason.NOT_MEASURED
        error = 1 - itl_seconds / itl_target_seconds
        if error < -1.0:
            error = -1.0
        change = held = self.integral * error * passed
        if self._error is not None:
            change += self.proportional * (error - self._error)
        self._error = error
        if error < 0:
            self._share = share = max(self._share + min(change, held), self.min_share)
            return share, ShareReason.AT_MIN if share == self.min_share else ShareReason.OVER_TARGET
        wanted = self._share + change
        if wanted >= 1:
            self._share = 1.0
            return 1.0, ShareReason.AT_MAX
        self._share = share = wanted if wanted > self.min_share else self.min_share
        return share, ShareReason.UNDER_TARGET


class Where(str, Enum):
    """Place where an item is encoded."""

    IN_STEP = "in_step"  # by this step, at full width, while decoding waits
    LANE = "lane"  # beside the steps


class WhereReason(str, Enum):
    """Reason for the place; each is a label of ``encode_placements_total``."""

    NO_DECODE = "no_decode"  # in the step: no other request is held up
    TOO_LONG = "too_long"  # in the lane: no request is held up now, but one could arrive, or the lane is quicker
    WOULD_NOT_BE_NOTICED = "would_not_be_noticed"  # in the step: ends within the ITL target
    WOULD_STALL_DECODE = "would_stall_decode"  # in the lane

    @property
    def where(self) -> Where:
        """Return the place that this is a reason for."""
        in_step = self in (WhereReason.NO_DECODE, WhereReason.WOULD_NOT_BE_NOTICED)
        return Where.IN_STEP if in_step else Where.LANE


@dataclass(frozen=True)
class Placement:
    """Decision where the next items are encoded, with its reason."""

    where: Where
    reason: WhereReason


class EncodeShare:
    """Decides which items are encoded where. The first rule that fits decides:

    1. No request decodes: in the step, at full width, what ends within ``max_alone_seconds``. In the lane it would end
       later by its way there and back, and nobody would gain. What takes longer goes to the lane: a request that
       arrives in the middle of a step waits for its end.
    2. But several items that the lane encodes at a time end earlier there: in the step only what ends within
       ``max_several_seconds``.
    3. Their time fits into what the ITL target leaves of this step, which is nothing before an ITL was measured: in
       the step.
    4. Otherwise: in the lane.
    """

    def __init__(self, max_alone_seconds: float, max_several_seconds: float = 0.0) -> None:
        self.max_alone_seconds = max_alone_seconds
        self.max_several_seconds = max_several_seconds

    def place(self, decoding: DecodeLoad | None, seconds: float, at_a_time: int = 1) -> Placement:
        """Place items that together take so many seconds at full width.

        ``decoding``: None if no other request could be held up. ``at_a_time``: how many of the items the lane would
        encode at the same time.
        """
        if decoding is None:
            limit = self.max_alone_seconds if at_a_time <= 1 else self.max_several_seconds
            reason = WhereReason.NO_DECODE if seconds <= limit else WhereReason.TOO_LONG
        elif decoding.itl_seconds is not None and seconds <= decoding.itl_target_seconds - decoding.itl_seconds:
            reason = WhereReason.WOULD_NOT_BE_NOTICED
        else:
            reason = WhereReason.WOULD_STALL_DECODE
        return _PLACEMENTS[reason]


_PLACEMENTS = {reason: Placement(reason.where, reason) for reason in WhereReason}
