"""Turn the connectors that the options name into one `OmniAutoConnector` with a route for each of them.

vLLM-Omni 0.30 creates one connector for each stage, for its input and its output. So several connectors on an edge, as
in the design article, become transports of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import read_options
from vllm_omni_sched.config.stage_options import ConnectorOptions, StageSchedConfig
from vllm_omni_sched.config.stage_options import PoolOptions as PoolSizes
from vllm_omni_sched.config.units import Bytes
from vllm_omni_sched.connectors.arena import ArenaOptions, tuning
from vllm_omni_sched.connectors.arena.options import Modality, PoolOptions
from vllm_omni_sched.connectors.auto import AutoOptions, ForeignOptions
from vllm_omni_sched.connectors.extra import check_extra, own_keys
from vllm_omni_sched.connectors.mooncake import MooncakeOptions

AUTO = "OmniAutoConnector"
SHARED = "SharedMemoryConnector"
ARENA = "ArenaConnector"
MOONCAKE = ("MooncakeConnector", "MooncakePoolConnector")
"""The design article's name, and ours. vLLM-Omni's `MooncakeStoreConnector` stays its own as a route."""
HAVE_POOLS = (ARENA, AUTO, "CudaIpcConnector")
POOL_GROWTH = 4  # a pool of a given first size grows up to so many times as much
INLINE_MESSAGES = 16  # messages of the largest inline size for which the ring has room
SIZES = {
    "text_pool_size": Modality.TEXT,
    "image_pool_size": Modality.IMAGE,
    "audio_pool_size": Modality.AUDIO,
}


class SharedMemoryExtra(BaseModel):
    """Options of a `SharedMemoryConnector` that is one of several routes. Unknown keys are errors.

    ``modality``: default: of several such connectors, the one with the lowest threshold is for text, the one with the
    highest for images, and the one between them for audio; a single one is for everything.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shm_threshold_bytes: Bytes = Field(
        64 << 10, ge=0, le=1 << 30, description="Payloads up to this size go inline, without room of their own."
    )
    modality: Modality | None = Field(None, description="Modality of the messages that the connector is for.")


@dataclass(frozen=True)
class Route:
    """One of the routes that a message of an edge can take.

    ``name``: of the connector in the options; "" if a default applies. ``carries``: the messages it is for.
    ``values``: its options, resolved.
    """

    name: str
    carries: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class EdgeConnector:
    """A connector for the edges of a pipeline, in the form of vLLM-Omni's configuration.

    ``routes``: the named connectors that were combined into it; empty if it is one by itself. ``options``: those of
    ours in ``extra``, by the keys under which they are written.
    """

    name: str
    extra: Mapping[str, Any]
    routes: tuple[Route, ...] = ()

    options: Mapping[str, BaseModel] = field(default_factory=dict, compare=False)

    def parts(self) -> Iterator[tuple[str, BaseModel]]:
        """Yield the key and the values of all groups of options, with those in others."""
        for at, options in self.options.items():
            yield from _groups(at, options)


def _groups(at: str, options: BaseModel) -> Iterator[tuple[str, BaseModel]]:
    yield at, options
    for name, value in options:
        for key, one in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(one, BaseModel):
                yield from _groups(f"{at}.{name}" + (f".{key}" if key else ""), one)


def resolved_connectors(config: StageSchedConfig) -> dict[str, EdgeConnector]:
    """Return the connectors to be used on edges, by name; several without ``edges`` become one, named after all.

    1. With ``edges``, or a single connector, each connector stays what it is.
    2. Otherwise every message of every edge takes the route that suits it. Shared memory reaches stages on this host;
       a Mooncake store, and vLLM-Omni's other connectors, reach stages elsewhere.
    3. All `SharedMemoryConnector` together are one arena. Their thresholds decide by modality up to which size a
       message goes inline; larger ones go through the pool of the modality.
    4. ``pools.text_pool_size`` and its like are the first sizes of these pools.

    Raises:
        ConfigError: an option of a connector is unknown or invalid, or the connectors cannot be combined. The message
            names the key and the fix.
    """
    runtime, pools = config.runtime, config.pools
    if runtime.edges or len(runtime.connectors) < 2:
        found = {name: _with_pools(name, one, pools) for name, one in runtime.connectors.items()}
        pooled = any(one.name in HAVE_POOLS for one in runtime.connectors.values())
    else:
        combined = _Combination(pools)
        for name, one in runtime.connectors.items():
            combined.add(name, one)
        found = {", ".join(runtime.connectors): combined.result()}
        pooled = combined.has_arena
    if pools.of_connectors and not pooled:
        raise ConfigError(
            f"option 'pools.{next(iter(pools.of_connectors))}' is for the shared memory of connectors, and "
            "'runtime.connectors' names none with pools: add one, such as `local: {name: OmniAutoConnector}`, or "
            "remove the option"
        )
    return found


def _with_pools(name: str, connector: ConnectorOptions, pools: PoolSizes) -> EdgeConnector:
    """Return a connector that stands alone, with the sizes of pools in its options if it has pools."""
    extra = dict(connector.extra)
    at = f"runtime.connectors.{name}.extra"
    if pools.of_connectors and connector.name in HAVE_POOLS:
        within, key = (extra, at) if connector.name == ARENA else (extra.get("arena", {}), f"{at}.arena")
        if not isinstance(within, Mapping):
            raise ConfigError(
                f"option '{key}' must be a mapping to have pools, got {within!r}; remove it, or the sizes in 'pools'"
            )
        arena = _sized(within, pools, key)
        extra = arena if connector.name == ARENA else {**extra, "arena": arena}
    options = check_extra(connector.name, extra, at)
    return EdgeConnector(connector.name, extra, options={} if options is None else {at: options})


def _sized(arena: Mapping[str, Any], pools: PoolSizes, at: str) -> dict[str, Any]:
    """Return options of an arena with the sizes of pools; ``at``: the key of these options."""
    found = dict(arena)
    if pools.pool_growth_factor is not None:
        if "growth_factor" in found:
            raise ConfigError(f"options 'pools.pool_growth_factor' and '{at}.growth_factor' are the same: keep one")
        found["growth_factor"] = pools.pool_growth_factor
    for option, modality in SIZES.items():
        nbytes = getattr(pools, option)
        if nbytes is None:
            continue
        pool = dict(found.get(modality.value) or {})
        if "initial_bytes" in pool:
            raise ConfigError(
                f"options 'pools.{option}' and '{at}.{modality.value}.initial_bytes' are the same: keep one"
            )
        pool = {"max_bytes": min(POOL_GROWTH * nbytes, 1 << 40), **pool, "initial_bytes": nbytes}
        if isinstance(pool["max_bytes"], int) and pool["max_bytes"] < nbytes:
            raise ConfigError(
                f"option 'pools.{option}' ({nbytes}) must not be above '{at}.{modality.value}.max_bytes' "
                f"({pool['max_bytes']}): lower the one or raise the other"
            )
        found[modality.value] = pool
    return found


@dataclass
class _Combination:
    """Collects the routes of one connector."""

    pools: PoolSizes
    shared: dict[str, SharedMemoryExtra] = field(default_factory=dict)
    arena: tuple[str, dict[str, Any]] | None = None
    mooncake: tuple[str, dict[str, Any]] | None = None
    foreign: dict[str, dict[str, Any]] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)  # options of the connector as a whole, and of models
    _given_by: dict[str, str] = field(default_factory=dict)

    @property
    def has_arena(self) -> bool:
        return bool(self.shared) or self.arena is not None

    def add(self, name: str, connector: ConnectorOptions) -> None:
        at = f"runtime.connectors.{name}"
        if connector.name == SHARED:
            own = self._own(name, connector.extra, SharedMemoryExtra)
            self.shared[name] = read_options(SharedMemoryExtra, own, "", group=f"{at}.extra")
        elif connector.name == ARENA:
            self._only("arena", name, self.arena)
            own = self._own(name, connector.extra, ArenaOptions)
            read_options(ArenaOptions, own, "", group=f"{at}.extra")
            self.arena = name, own
        elif connector.name in MOONCAKE:
            self._only("Mooncake store", name, self.mooncake)
            own = self._own(name, connector.extra, MooncakeOptions)
            read_options(MooncakeOptions, own, "", group=f"{at}.extra")
            self.mooncake = name, own
        elif connector.name in HAVE_POOLS:
            raise ConfigError(
                f"option '{at}.name': {connector.name} cannot be one of several routes; use it alone, with the other "
                "connectors as its options, or name SharedMemoryConnector or ArenaConnector here"
            )
        else:
            self.foreign[name] = {"name": connector.name, "extra": dict(connector.extra)}
        if self.shared and self.arena is not None:
            raise ConfigError(
                f"options 'runtime.connectors.{self.arena[0]}' and 'runtime.connectors.{next(iter(self.shared))}' are "
                "the same shared memory: keep ArenaConnector, with `inline_bytes` of its pools, or "
                "SharedMemoryConnector, with `shm_threshold_bytes`"
            )

    def _only(self, what: str, name: str, before: tuple[str, Any] | None) -> None:
        if before is not None:
            raise ConfigError(
                f"options 'runtime.connectors.{before[0]}' and 'runtime.connectors.{name}' are each the {what} of all "
                "edges: keep one"
            )

    def _own(self, name: str, extra: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
        """Return the options of a route; those that vLLM-Omni's models keep beside them go to the whole connector."""
        own = own_keys(extra, model.model_fields, f"runtime.connectors.{name}.extra")
        for key, value in extra.items():
            if key in own:
                continue
            if self.common.setdefault(key, value) != value:
                raise ConfigError(
                    f"options 'runtime.connectors.{self._given_by[key]}.extra.{key}' and "
                    f"'runtime.connectors.{name}.extra.{key}' are for one connector: give both the same value"
                )
            self._given_by.setdefault(key, name)
        return own

    def result(self) -> EdgeConnector:
        thresholds = _by_modality(self.shared)
        arena: dict[str, Any] | None = None
        if self.has_arena:
            name, given = self.arena or (next(iter(self.shared)), {})
            arena = _sized(given, self.pools, f"runtime.connectors.{name}.extra")
            for modality, (_, nbytes) in thresholds.items():
                arena[modality.value] = {**arena.get(modality.value, {}), "inline_bytes": nbytes}
            most = INLINE_MESSAGES * max((nbytes for _, nbytes in thresholds.values()), default=0)
            if most > ArenaOptions().ring_bytes:
                arena.setdefault("ring_bytes", most)
        extra: dict[str, Any] = {**self.common, "arena": arena}
        if self.mooncake is not None:
            extra["mooncake"] = self.mooncake[1]
        if self.foreign:
            extra["foreign"] = self.foreign
        options = check_extra(AUTO, extra, "runtime.connectors")
        assert isinstance(options, AutoOptions)
        parts: dict[str, BaseModel | None] = {} if self.mooncake is None else {self.mooncake[0]: options.mooncake}
        parts |= {name: options.arena} if self.has_arena else {}
        given = {f"runtime.connectors.{name}.extra": one for name, one in parts.items() if one is not None}
        return EdgeConnector(AUTO, extra, tuple(self._routes(options, thresholds)), given)

    def _routes(self, options: AutoOptions, thresholds: Mapping[Modality, tuple[str, int]]) -> list[Route]:
        found = []
        if options.arena is not None:
            arena_name = "" if self.arena is None else self.arena[0]
            for modality in Modality:
                name = thresholds.get(modality, (arena_name, 0))[0]
                values = _pool_values(options.arena, options.arena.pool(modality))
                found.append(Route(name, f"{modality.value} to stages on this host", values))
        if self.mooncake is not None and options.mooncake is not None:
            where = "stages on other hosts" if options.arena is not None else "all stages"
            far = options.mooncake.model_dump(
                include={"host", "metadata_server", "master", "segment", "localbuf", "proto"}
            )
            found.append(Route(self.mooncake[0], f"all messages to {where}", far))
        found += [_foreign_route(name, one) for name, one in options.foreign.items()]
        return found


def _pool_values(arena: ArenaOptions, pool: PoolOptions) -> dict[str, Any]:
    tuned = tuning.bounds_of(pool.inline_bytes) if arena.tune_inline else (pool.inline_bytes,) * 2
    return {
        "inline_up_to_bytes": pool.inline_bytes,
        "tuned_from_bytes": tuned[0],
        "tuned_to_bytes": tuned[1],
        "pool_bytes": pool.initial_bytes,
        "pool_max_bytes": pool.max_bytes,
        "growth_factor": arena.growth_factor,
    }


def _foreign_route(name: str, options: ForeignOptions) -> Route:
    where = "stages on other hosts" if options.distance else "stages on this host"
    return Route(name, f"all messages to {where}", {"name": options.name, **options.extra})


def _by_modality(shared: Mapping[str, SharedMemoryExtra]) -> dict[Modality, tuple[str, int]]:
    """Return, for each modality that a connector is for, its name and threshold.

    Raises:
        ConfigError: two are for the same modality, or there are more connectors than modalities.
    """
    found: dict[Modality, tuple[str, int]] = {}
    rest = []
    for name, one in shared.items():
        if one.modality is None:
            rest.append((name, one.shm_threshold_bytes))
        elif one.modality in found:
            raise ConfigError(
                f"options 'runtime.connectors.{found[one.modality][0]}' and 'runtime.connectors.{name}' are both for "
                f"{one.modality.value}: give one of them another `modality`, or remove it"
            )
        else:
            found[one.modality] = name, one.shm_threshold_bytes
    free = [modality for modality in (Modality.TEXT, Modality.AUDIO, Modality.IMAGE) if modality not in found]
    if len(rest) > len(free):
        raise ConfigError(
            f"option 'runtime.connectors.{rest[-1][0]}': there are {len(shared)} connectors of shared memory, "
            "but at most one for each of text, audio and image: remove some"
        )
    rest.sort(key=lambda one: one[1])
    if len(shared) == 1 and rest:
        return dict.fromkeys(Modality, rest[0])
    if len(rest) == 2 and len(free) == 3:
        free = [Modality.TEXT, Modality.IMAGE]
    return found | dict(zip(free, rest, strict=False))
