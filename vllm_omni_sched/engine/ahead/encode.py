"""The work that a lane of encode-ahead does, and the choice of the lane for a device."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.utils.platform_utils import is_pin_memory_available

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import ConfigError, LaneError, LaneGroupError, NoLaneError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.ahead.tensor_parallel import EncoderGroup, Join, Ranks, why_not_together
from vllm_omni_sched.engine.ahead.warm_up import WARM_UP
from vllm_omni_sched.lanes import CudaDevice, Job, Lane, LaneGroup, LanePool, MemberLane, ProcessLane, StreamLane
from vllm_omni_sched.lanes.base import Pause
from vllm_omni_sched.lanes.processors import (
    AUTO,
    SHARED,
    Part,
    Processors,
    allowed_here,
    bound_here,
    choose,
    choose_part,
    move_here,
    siblings_of,
    together,
)
from vllm_omni_sched.lanes.width import Widening
from vllm_omni_sched.resource.engine.lane import ONE_BUFFER, Obstacle, sets_context, untold_layers

_NICE = 10  # the LLM's threads win


class Encode:
    """Runs one item through the model's encoder, layer by layer, on behalf of a lane.

    Args:
        dummies: makes the batches that warm the encoder up; called in the process that does the warm-up.
        processors: the CPUs to use when the lane is a process of its own; None to leave the affinity as it is.
        ranks: the ranks whose lanes encode each item together; None for a worker that encodes alone.
        everything: the CPUs to use while the LLM leaves its own to the lane; None to stay on ``processors``.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        dummies: Callable[[], Iterable[Any]] = tuple,
        processors: Processors | None = None,
        ranks: Ranks | None = None,
        everything: Processors | None = None,
    ) -> None:
        self._model = model
        self._dummies = dummies
        self._device = device
        self._processors = processors
        self._ranks = ranks
        self._everything = everything
        self._wide = False
        self._group: LaneGroup | None = None  # of the lane's process; None in the worker
        self._pid = os.getpid()
        self._here = (
            threading.local()
        )  # holds the lane's pause: encodes of the step use the same layers and must not pause

    def at(self, processors: Processors | None, everything: Processors | None = None) -> "Encode":
        """Return a copy of this encode for a process on these processors, or ``everything`` while it may use all."""
        return Encode(self._model, self._device, self._dummies, processors, self._ranks, everything)

    def among(self, ranks: Ranks) -> "Encode":
        """Return a copy of this encode for a worker whose lane encodes together with those of the other ranks."""
        return Encode(self._model, self._device, self._dummies, ranks=ranks)

    @property
    def widening(self) -> Widening | None:
        """Return how this encode uses all processors; None if it cannot."""
        if self._processors is None or self._everything is None:
            return None
        return Widening(self._use_all, self._everything.threads / self._processors.threads)

    def _use_all(self, wide: bool) -> None:
        """Use all processors from now on, or those of the lane alone, in the process of the lane."""
        changed, self._wide = wide != self._wide, wide
        if os.getpid() != self._pid:
            return  # `_settle` follows
        if changed:
            self._set_threads()
        if changed or wide:
            self._move()  # also when OpenMP has started threads since the last slice

    def idle_seconds(self) -> float:
        """Return for how long, in all, the encoder in this process has waited for those of other ranks."""
        return 0.0 if self._group is None else self._group.idle_seconds

    def __call__(self, payload: tuple[str, Any] | Join | None, pause: Pause) -> torch.Tensor | None:
        """Encode one item, or warm the encoder up.

        Args:
            payload: modality and data of the item; None to warm up; a `Join` to do so with the other ranks.
            pause: called between the layers of the encoder.

        Returns:
            The embeddings, of shape (num_encoder_embeds, hidden_size); None after a warm-up.
        """
        if os.getpid() == self._pid:
            return self._run(payload, pause)
        self._settle()
        try:
            return self._run(payload, pause)
        finally:
            self._move()  # once more: OpenMP has started its threads since, bound as they were in the parent process

    def _run(self, payload: tuple[str, Any] | Join | None, pause: Pause) -> torch.Tensor | None:
        try:
            if isinstance(payload, Join):
                self._group = self._join(payload.generation)
                payload = None
            return self._encode(payload, pause) if self._group is None else self._together(self._group, payload, pause)
        except LaneGroupError as error:
            raise SystemExit(
                f"Encode-ahead: this encoder process ends, because it is of no use alone: {error}"
            ) from None

    def _join(self, generation: int) -> LaneGroup:
        assert self._ranks is not None
        group = self._ranks.join(generation)
        compat.replace_tensor_parallel_group(EncoderGroup(group, compat.tensor_parallel_group()))
        return group

    def _together(self, group: LaneGroup, payload: tuple[str, Any] | None, pause: Pause) -> torch.Tensor | None:
        group.begin()
        try:
            return self._encode(payload, pause)
        except LaneError:  # it came from another rank
            raise
        except Exception as error:
            group.fail(f"{type(error).__name__}: {error}")
            raise

    def _encode(self, payload: tuple[str, Any] | None, pause: Pause) -> torch.Tensor | None:
        if payload is None:
            with torch.inference_mode():
                for batch in self._dummies():
                    self._model.embed_multimodal(**batch)
            return None
        modality, data = payload
        ((_, _, kwargs),) = group_and_batch_mm_kwargs(
            [(modality, data)], device=self._device, pin_memory=is_pin_memory_available()
        )
        self._here.pause = pause
        try:
            output: torch.Tensor
            with torch.inference_mode():
                (output,) = self._model.embed_multimodal(**kwargs)
        finally:
            self._here.pause = None
        return output

    def _settle(self) -> None:
        """Set threads and CPUs at the first call in a process of its own, where OpenMP starts anew."""
        self._pid = os.getpid()
        self._move()
        self._set_threads()
        self.give_way()

    @property
    def _current(self) -> Processors | None:
        return self._everything if self._wide else self._processors

    def _set_threads(self) -> None:
        if self._current is not None:
            torch._C.set_num_threads(self._current.threads)  # vLLM has made torch.set_num_threads do nothing

    def _move(self) -> None:
        if self._current is not None:
            move_here(self._current.cpus)

    def give_way(self) -> None:
        """Register hooks that let all later encodes of a lane pause between layers."""
        for layer in encoder_layers(self._model):
            layer.register_forward_pre_hook(self._between_layers)

    def _between_layers(self, *_: Any) -> None:
        pause = getattr(self._here, "pause", None)
        if pause is not None:
            pause()


def processors_here(
    config: OmniSchedConfig, device: torch.device, *, alone: bool, ranks: Ranks | None = None
) -> tuple[Processors, ...]:
    """Return the CPUs for each process lane of this worker; empty when no lane is a process.

    Args:
        config: the options of the engine.
        device: that of the worker.
        alone: no other engine uses CPUs of this machine, as far as vLLM knows.
        ranks: the ranks that share the CPUs which the LLM leaves, with one lane each; None for a worker alone.

    Raises:
        ConfigError: ``encode_lane_cpus`` names a processor that this process may not use, or too few for all ranks.
    """
    if device.type != "cpu":
        return ()
    option = config.encode_lane_cpus if alone or config.encode_lane_cpus != AUTO else SHARED
    bound = bound_here()
    if ranks is None:
        return choose(option, allowed_here(), bound, siblings_of, torch.get_num_threads())
    return choose_part(
        option,
        allowed_here() | ranks.bound,
        bound,
        siblings_of,
        torch.get_num_threads(),
        Part(ranks.rank, ranks.size, ranks.bound),
    )


def build_lane(
    encode: Encode,
    model: Any,
    device: torch.device,
    config: OmniSchedConfig,
    capacity: int,
    processors: Sequence[Processors] = (),
) -> Lane:
    """Build the lane for a device: a side stream on CUDA; on a CPU one process, or one for each of ``processors``.

    Raises:
        NoLaneError: this model's encoder cannot run in a thread beside the LLM.
        ConfigError: an option for CUDA is set on another device.
        LaneError: the device or the operating system does not support such a lane.
    """
    if device.type != "cuda":
        if config.encode_lane_sms is not None:
            raise ConfigError(f"option 'expert.encode_lane_sms' needs a CUDA device, not {device.type!r}: leave it out")
        encodes = [encode.at(one, together(processors)) for one in processors or (None,)]
        lanes = [
            ProcessLane(
                one,
                capacity,
                nice=niceness(on),
                widening=one.widening,
                measures_memory=config.kv_lending > 0,
            )
            for one, on in zip(encodes, processors or (None,), strict=True)
        ]
        for lane in lanes:
            lane.submit(WARM_UP)
        return lanes[0] if len(lanes) == 1 else LanePool(lanes)
    why = why_no_thread(model)
    if why is not None:
        raise NoLaneError(why.refusal)
    beside = StreamLane(encode, capacity, device=CudaDevice(device, config.encode_lane_sms))
    encode.give_way()
    return beside


def build_member_lane(
    encode: Encode, model: Any, config: OmniSchedConfig, capacity: int, processors: Processors
) -> MemberLane:
    """Build the lane of one of several ranks, a process that joins those of the others in its first job.

    Raises:
        NoLaneError: this model's encoder cannot run in the lanes of several ranks.
        ConfigError: an option for CUDA is set.
        LaneError: the operating system does not support such a lane.
    """
    if config.encode_lane_sms is not None:
        raise ConfigError("option 'expert.encode_lane_sms' needs a CUDA device: leave it out")
    reason = why_not_together(encoder_modules(model))
    if reason is not None:
        raise NoLaneError(Obstacle(reason).refusal)
    here = encode.at(processors)
    lane = MemberLane(here, capacity, nice=niceness(processors), idle_seconds=here.idle_seconds)
    lane.submit(first_job(0))
    return lane


def first_job(generation: int) -> Job:
    """Return the first job of a lane of several ranks: to join the others, and to warm the encoder up."""
    return Job(WARM_UP.key, Join(generation))


def niceness(processors: Processors | None) -> int:
    """Return the niceness of a lane's process; 0 when the LLM computes on other processors."""
    return 0 if processors is not None and processors.own else _NICE


def why_no_thread(model: Any) -> Obstacle | None:
    """Return why the encoder and the LLM cannot run in two threads of a process; None if no reason is known."""
    for module in model.modules():
        if getattr(getattr(module, "attn_backend", None), "name", None) == "FLASHINFER":
            return ONE_BUFFER
        if cls := compat.sets_forward_context(type(module)):
            return sets_context(cls)
    return None


def refuse_lora_layers(model: Any) -> None:
    """Refuse a model whose encoder may get LoRA weights, although no option asks for that.

    vLLM wraps all linear layers of a model that does not tell it which belong to the language model.

    Raises:
        NoLaneError: a layer of an encoder is one to which LoRA weights may be added.
    """
    for layer in encoder_layers(model):
        if any(compat.is_lora_layer(module) for module in layer.modules()):
            raise NoLaneError(untold_layers(type(model).__qualname__).refusal)


def encoder_layers(model: Any) -> Iterator[torch.nn.Module]:
    """Return the layers of all encoders of a multimodal model: members of module lists outside its language model."""
    language_model = model.get_language_model() if hasattr(model, "get_language_model") else None

    def walk(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        for child in module.children():
            if child is language_model:
                continue
            if isinstance(child, torch.nn.ModuleList):
                yield from child
            else:
                yield from walk(child)

    return walk(model)


def encoder_modules(model: Any) -> Iterator[torch.nn.Module]:
    """Return all modules of a multimodal model outside its language model."""
    language_model = model.get_language_model() if hasattr(model, "get_language_model") else None
    decodes = set() if language_model is None else {id(module) for module in language_model.modules()}
    return (module for module in model.modules() if id(module) not in decodes)
