"""All paths of this package, combined into one from options."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport
from vllm_omni_sched.connectors.bounds import Seconds
from vllm_omni_sched.connectors.compression import CompressionOptions, Compressor
from vllm_omni_sched.connectors.cuda_ipc import CudaIpcOptions, CudaIpcTransport
from vllm_omni_sched.connectors.disk import DiskOptions, DiskTransport
from vllm_omni_sched.connectors.modality import Modality
from vllm_omni_sched.connectors.mooncake import MooncakeOptions, MooncakeTransport
from vllm_omni_sched.connectors.routing import Presence, RoutedTransport, RoutingOptions, Way
from vllm_omni_sched.connectors.tiers import TiersOptions
from vllm_omni_sched.connectors.tiers.place import Tier
from vllm_omni_sched.connectors.tiers.transport import TieredTransport
from vllm_omni_sched.connectors.transport import Transport


class ForeignOptions(BaseModel):
    """Options of one of vLLM-Omni's own connectors as a path. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, description="Name of the connector as in a stage config, such as `NixlConnector`.")
    distance: int = Field(1, ge=0, le=9, description="0: it reaches processes of this host; 1: other hosts, too.")
    extra: dict[str, Any] = Field(default_factory=dict, description="Options of the connector.")
    checksum: bool | None = Field(
        None,
        description="Messages carry a CRC-32 of their tensors, and one that was altered on its way is an error; "
        "default: those to other hosts do.",
    )
    mail: str | None = Field(
        None, description="Path that tells receivers where a message lies, where it needs that; default: the farthest."
    )


def tiered_transport(
    first: Transport, arena: ArenaOptions | None, mooncake: MooncakeOptions | None, options: TiersOptions
) -> TieredTransport:
    """The tiers that the options ask for, below ``first``, which is made of an arena, or a Mooncake store, or both.

    Raises:
        ConfigError: they cannot be; see also `MooncakeTransport` and `DiskTransport`.
        RendezvousError: the directory of the disk cannot be used, or there is no Mooncake master.
    """
    if arena is None:
        raise ConfigError("option `tiers`: the tier above them is the arena, and `arena` is null; set one of them")
    if mooncake is not None and options.mooncake is not None:
        raise ConfigError("option `tiers`: Mooncake is the path between hosts or a tier; unset one of both `mooncake`")
    _check_ages({"arena": arena, "mooncake": mooncake, **_below(options)}, options.ttl_seconds)
    tiers = [Tier(first, {kind.value: arena.pool(kind).max_bytes for kind in Modality})]
    with contextlib.ExitStack() as undo:
        for name in options.order:
            if name == "mooncake" and options.mooncake is not None:
                tiers.append(Tier(MooncakeTransport(options.mooncake), {"": options.mooncake.segment}))
            elif name == "disk" and options.disk is not None:
                disk = options.disk.model_copy(update={"arena": options.disk.arena or arena.arena})
                tiers.append(Tier(DiskTransport(disk), {"": disk.max_bytes}))
            else:
                continue
            undo.callback(tiers[-1].path.close)
        path = TieredTransport(tiers, options, arena.max_inflight, arena.window_size)
        undo.pop_all()
    return path


def _below(options: TiersOptions) -> dict[str, MooncakeOptions | DiskOptions | None]:
    return {f"tiers.{name}": options.mooncake if name == "mooncake" else options.disk for name in options.order}


def _check_ages(paths: Mapping[str, ArenaOptions | MooncakeOptions | DiskOptions | None], ttl_seconds: float) -> None:
    """Refuse a tier that drops messages before the tiers' age: they would count as received, and distort expected
    waits.
    """
    for name, path in paths.items():
        if path is not None and path.ttl_seconds < ttl_seconds:
            raise ConfigError(
                f"option `{name}.ttl_seconds` ({path.ttl_seconds:g}) is below `tiers.ttl_seconds` ({ttl_seconds:g}): "
                "messages that it drops would count as got; raise the first, or lower the second"
            )


HOST, NETWORK = 0, 1  # distances


class AutoOptions(RoutingOptions):
    """Options of all paths. Unknown keys are errors."""

    arena: ArenaOptions | None = Field(ArenaOptions(), description="Options of the path within a host; null for none.")
    cuda_ipc: CudaIpcOptions | None = Field(
        None,
        description="Options of device tensors that stay on their device; null to send them through host "
        "memory. With them "
        "the path within a host is named 'cuda_ipc', not 'arena'.",
    )
    mooncake: MooncakeOptions | None = Field(None, description="Options of the path between hosts; null for none.")
    compression: CompressionOptions = Field(
        CompressionOptions(), description="Compression of buffers on paths between hosts."
    )
    tiers: TiersOptions | None = Field(
        None,
        description="Storage for messages that these paths have no room for, or that wait for long; null for none.",
    )
    foreign: dict[str, ForeignOptions] = Field(
        default_factory=dict, description="vLLM-Omni's own connectors as further paths, by names of your choice."
    )
    put_timeout_seconds: Seconds = Field(30.0, ge=0, description="How long `put` waits for room or for its receiver.")


MoreWays = Callable[[Sequence[Way]], Iterable[Way]]


def auto_transport(
    options: AutoOptions, more: MoreWays | None = None, stage: str | None = None, replica: int = 0
) -> Transport:
    """Return the path that the options ask for.

    Args:
        more: makes additional paths, given those of this package.
        stage, replica: the stage replica that this process serves; announced to others of the same arena.

    Raises:
        ConfigError: the options name no path, or one that cannot work.
        RendezvousError: the arena's directory cannot be used, or no Mooncake master answers.
    """
    if options.cuda_ipc is not None and options.arena is None:
        raise ConfigError("option `cuda_ipc` needs the arena, through which its messages go: leave `arena` out")
    if options.tiers is not None and options.foreign:
        raise ConfigError(
            "options `tiers` and `foreign` exclude each other: vLLM-Omni's connectors do not report when a message was "
            "received, so that tiers would keep each of them forever; unset one of both"
        )
    ways: list[Way] = []
    arena: ArenaTransport | None = None
    presence: Presence | None = None
    with contextlib.ExitStack() as undo:
        if options.arena is not None:
            arena = (
                ArenaTransport(options.arena)
                if options.cuda_ipc is None
                else CudaIpcTransport(options.cuda_ipc, options.arena)
            )
            ways.append(Way(arena, HOST))
            undo.callback(ways[-1].path.close)
        if options.mooncake is not None:
            ways.append(Way(MooncakeTransport(options.mooncake), NETWORK))
            undo.callback(ways[-1].path.close)
        for way in more(ways) if more is not None else ():
            ways.append(way)
            undo.callback(way.path.close)
        if arena is not None and len(ways) > 1:  # there is something to choose from
            presence = Presence(arena.directory)
            undo.callback(presence.close)
            if stage is not None:
                presence.announce(stage, replica)
        far = any(way.distance for way in ways)
        compressor = Compressor(options.compression) if far else None
        path: Transport = RoutedTransport(ways, options, compressor, presence=presence)
        if options.tiers is not None:
            first = path if len(ways) > 1 else ways[0].path  # one path needs no routing
            path = tiered_transport(first, options.arena, options.mooncake, options.tiers)
        undo.pop_all()
    return path
