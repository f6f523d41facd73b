"""An encoder cache manager that evicts encodings by their worth."""

from collections import OrderedDict
from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import EvictionOrder, OmniSchedConfig
from vllm_omni_sched.engine.encoder.cache import OmniEncoderCacheManager
from vllm_omni_sched.resource.engine.worth import Encoding, WorthIndex
from vllm_omni_sched.resource.rate import EncodeCost


class Freeable(OrderedDict[str, int]):
    """vLLM's ``freeable`` (mm_hash -> embeddings), whose first entry is the one that `WorthIndex` evicts next."""

    def __init__(self, manager: "WorthEncoderCacheManager") -> None:
        super().__init__()
        self._manager = manager

    def __setitem__(self, mm_hash: str, num_embeds: int) -> None:
        super().__setitem__(mm_hash, num_embeds)
        self._manager.index.release_all(mm_hash)

    def popitem(self, last: bool = True) -> tuple[str, int]:
        """Remove and return the entry to evict; vLLM calls this with ``last=False``.

        Raises:
            KeyError: there is no freeable entry, or ``last`` is true.
        """
        if last or not self:
            raise KeyError("no freeable entry, or the last one was asked for: only the first can be evicted")
        mm_hash = self._manager.evict()
        return mm_hash, super().pop(mm_hash)


class WorthEncoderCacheManager(OmniEncoderCacheManager):
    """`OmniEncoderCacheManager` that evicts in the order of `WorthIndex`.

    1. Hits, room and bookkeeping are vLLM's own; when its loop takes the first of ``freeable``, the index chooses.
    2. A request that takes an encoding counts as one use, however many of its chunks and items need it.
    3. The cost of an encoding is measured if workers report times, else proportional to its embeddings
       (`EncodeCost`); with the same cost per embedding everywhere, worth is the recent number of uses.

    Args:
        cache_size: capacity in encoder embeddings.
        order: which freeable encoding is evicted first; with ``AGE`` every decision is vLLM's.
        embed_bytes: size of one embedding, in bytes.
        clock: seconds.
        half_life_seconds: age at which a use counts half. A value far above the time between the turns of a
            conversation keeps items of conversations that have ended (`benchmarks.encoder_cache`).
    """

    def __init__(
        self,
        cache_size: int,
        order: EvictionOrder = EvictionOrder.WORTH,
        embed_bytes: int = 1,
        clock: Clock = monotonic_seconds,
        half_life_seconds: float = 30.0,
    ) -> None:
        super().__init__(cache_size)
        self.order = order
        self.embed_bytes = embed_bytes
        self.cost = EncodeCost()
        self.tells_evicted = False
        self._clock = clock
        self._evicted: dict[str, Encoding] = {}
        self._half_life = half_life_seconds
        self.index = WorthIndex(order, half_life_seconds)
        self.freeable = Freeable(self)

    def reset(self) -> None:
        super().reset()
        self.index = WorthIndex(self.order, self._half_life)
        self._evicted = {}

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        feature = request.mm_features[input_id]
        users = self.cached.get(feature.identifier)
        is_use = users is not None and request.request_id not in users
        hit = super().check_and_update_cache(request, input_id)
        if is_use:
            self.index.use(feature.identifier, self._clock(), self._seconds(request, input_id))
        return hit

    def allocate(self, request: Request, input_id: int) -> None:
        super().allocate(request, input_id)
        mm_hash = request.mm_features[input_id].identifier
        if mm_hash not in self.index:
            num_bytes = max(1, request.get_num_encoder_embeds(input_id) * self.embed_bytes)
            self.index.add(mm_hash, num_bytes, self._seconds(request, input_id), self._clock())

    def _seconds(self, request: Request, input_id: int) -> float:
        return self.cost.seconds(request.mm_features[input_id].modality, request.get_num_encoder_embeds(input_id))

    def evict(self) -> str:
        """Remove the encoding to evict next from the index, and return its mm_hash."""
        victim = self.index.evict()
        assert victim is not None, "vLLM has freeable entries, the index has none"
        if self.tells_evicted:
            self._evicted[victim.encoding.mm_hash] = victim.encoding
        return victim.encoding.mm_hash

    def was_evicted(self, mm_hash: str) -> bool:
        """Return whether an encoding of this name was evicted since the last `take_evicted`."""
        return mm_hash in self._evicted

    def take_evicted(self) -> dict[str, Encoding]:
        """Return the encodings evicted since the last call, by mm_hash; some of them may be cached again.

        Empty unless ``tells_evicted`` is set, by a caller that calls this after each step.
        """
        evicted, self._evicted = self._evicted, {}
        return evicted

    def validate(self) -> None:
        super().validate()
        assert len(self.index) == len(self.cached), f"{len(self.index)} in the index, {len(self.cached)} cached"
        assert all(mm_hash in self.index for mm_hash in self.cached), "index and cache hold different contents"
        assert self.index.num_freeable == len(self.freeable)


def refuse_encoder_decoder(config: OmniSchedConfig, model_config: Any) -> None:
    """Refuse options about the encoder cache for models whose encodings vLLM does not keep in it.

    Raises:
        ConfigError: such an option is set, and this is an encoder-decoder model.
    """
    by_worth = config.encoder_cache_order is EvictionOrder.WORTH
    if model_config.is_encoder_decoder and (by_worth or config.encoder_cache_host_bytes):
        name = "encoder_cache_order" if by_worth else "encoder_cache_host_bytes"
        raise ConfigError(
            f"option {name!r} cannot be on here, because this is an encoder-decoder model: its encoder's output goes "
            f"into the KV cache of its decoder, and is evicted with the request. Leave {name!r} out"
        )


def manager_for(manager: EncoderCacheManager, config: OmniSchedConfig, model_config: Any) -> EncoderCacheManager:
    """Return the encoder cache manager that these options require, in place of the unused ``manager``.

    Raises:
        ConfigError: an option needs our manager, but the operator has named another one, or the model is an
            encoder-decoder model.
    """
    refuse_encoder_decoder(config, model_config)
    by_worth = config.encoder_cache_order is EvictionOrder.WORTH
    if not by_worth and not config.encoder_cache_host_bytes:
        return OmniEncoderCacheManager.adopt(manager) if type(manager) is EncoderCacheManager else manager
    if type(manager) not in (EncoderCacheManager, OmniEncoderCacheManager):
        name = "encoder_cache_order" if by_worth else "encoder_cache_host_bytes"
        raise ConfigError(
            f"option {name!r} needs the encoder cache manager of vllm-omni-sched, not {type(manager).__name__}: "
            f"leave {name!r} out, or take encoder_cache_manager_cls out of --ec-manager-config"
        )
    embed_bytes = model_config.get_inputs_embeds_size() * model_config.dtype.itemsize
    return WorthEncoderCacheManager(manager.cache_size, config.encoder_cache_order, max(1, embed_bytes))
