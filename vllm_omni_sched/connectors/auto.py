"""Construction of the transport that the options of OmniAutoConnector describe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport
from vllm_omni_sched.connectors.bounds import Seconds
from vllm_omni_sched.connectors.compression.compressor import Compressor
from vllm_omni_sched.connectors.compression.options import CompressionOptions
from vllm_omni_sched.connectors.cuda_ipc import CudaIpcOptions, CudaIpcTransport
from vllm_omni_sched.connectors.disk import DiskTransport
from vllm_omni_sched.connectors.modality import Modality
from vllm_omni_sched.connectors.mooncake import MooncakeOptions, MooncakeTransport
from vllm_omni_sched.connectors.routing import Presence, RoutedTransport, RoutingOptions, Way
from vllm_omni_sched.connectors.tiers import TiersOptions
from vllm_omni_sched.connectors.tiers.place import Tier
from vllm_omni_sched.connectors.tiers.transport import TieredTransport
from vllm_omni_sched.connectors.transport import Transport


class ForeignOptions(BaseModel):
    """Options of one of vLLM-Omni's own connectors as a transport. Unknown keys are errors."""

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
        None,
        description="Transport that tells receivers where a message is, if the connector needs that; default: the one "
        "with the largest distance.",
    )


def tiered_transport(first: Transport, arena: ArenaOptions, options: TiersOptions) -> TieredTransport:
    """Return the tiers that the options enable, below ``first``, which consists of an arena, a Mooncake store or both.

    Raises:
        ConfigError: see `MooncakeTransport` and `DiskTransport`.
        RendezvousError: the directory of the disk cannot be used, or there is no Mooncake master.
    """
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
            undo.callback(tiers[-1].transport.close)
        transport = TieredTransport(tiers, options, arena.max_inflight, arena.window_size)
        undo.pop_all()
    return transport


HOST, NETWORK = 0, 1  # distances


class AutoOptions(RoutingOptions):
    """Options of all transports. Unknown keys are errors."""

    arena: ArenaOptions | None = Field(
        ArenaOptions(), description="Options of the transport within a host; null for none."
    )
    cuda_ipc: CudaIpcOptions | None = Field(
        None,
        description="Options of device tensors that stay on their device; null to send them through host "
        "memory. If set, the transport within a host is named 'cuda_ipc', not 'arena'.",
    )
    mooncake: MooncakeOptions | None = Field(None, description="Options of the transport between hosts; null for none.")
    compression: CompressionOptions = Field(
        CompressionOptions(), description="Compression of buffers on transports between hosts."
    )
    tiers: TiersOptions | None = Field(
        None,
        description="Storage for messages that do not fit into these transports, or that wait for long; null for none.",
    )
    foreign: dict[str, ForeignOptions] = Field(
        default_factory=dict, description="vLLM-Omni's own connectors as further transports, by names of your choice."
    )
    put_timeout_seconds: Seconds = Field(30.0, ge=0, description="How long `put` waits for room or for its receiver.")

    @model_validator(mode="after")
    def _can_be_combined(self) -> AutoOptions:
        if self.cuda_ipc is not None and self.arena is None:
            raise ValueError("option 'cuda_ipc' needs the arena, through which its messages go: leave 'arena' out")
        near = None if self.arena is None else "arena" if self.cuda_ipc is None else "cuda_ipc"
        ways = {name for name in (near, self.mooncake and "mooncake") if name}
        for name in ways & self.foreign.keys():
            raise ValueError(f"option 'foreign.{name}' has the name of another transport: take a different one")
        ways |= self.foreign.keys()
        if not ways:
            raise ValueError("option 'arena' is null, and no other transport is named: name one")
        for edge, names in self.edges.items():
            if not set(names) <= ways:
                raise ValueError(f"option 'edges.{edge}' names {names}; there are {sorted(ways)}")
        return self

    @model_validator(mode="after")
    def _tiered(self) -> AutoOptions:
        """Refuse what tiers cannot have: a message that a tier drops counts as received, and distorts waits."""
        tiers = self.tiers
        if tiers is None:
            return self
        if self.foreign:
            raise ValueError(
                "options 'tiers' and 'foreign' exclude each other: vLLM-Omni's connectors do not report when a message "
                "was received, so that tiers would keep each of them forever; unset one of both"
            )
        if self.arena is None:
            raise ValueError("option 'tiers': the tier above them is the arena, and 'arena' is null; set one of them")
        if self.mooncake is not None and tiers.mooncake is not None:
            raise ValueError(
                "option 'tiers': Mooncake is the transport between hosts or a tier; unset one of both 'mooncake'"
            )
        below = {f"tiers.{name}": getattr(tiers, name) for name in tiers.order}
        for name, one in {"arena": self.arena, "mooncake": self.mooncake, **below}.items():
            if one is not None and one.ttl_seconds < tiers.ttl_seconds:
                raise ValueError(
                    f"option '{name}.ttl_seconds' ({one.ttl_seconds:g}) is below 'tiers.ttl_seconds' "
                    f"({tiers.ttl_seconds:g}): messages that it drops would count as received; raise the first, or "
                    "lower the second"
                )
        return self


MoreWays = Callable[[Sequence[Way]], Iterable[Way]]


def auto_transport(
    options: AutoOptions, more: MoreWays | None = None, stage: str | None = None, replica: int = 0
) -> Transport:
    """Return the transport that the options describe.

    Args:
        more: makes additional transports, given those of this package.
        stage, replica: the stage replica that this process serves; announced to others of the same arena.

    Raises:
        ConfigError: a transport cannot work.
        RendezvousError: the arena's directory cannot be used, or no Mooncake master answers.
    """
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
            undo.callback(ways[-1].transport.close)
        if options.mooncake is not None:
            ways.append(Way(MooncakeTransport(options.mooncake), NETWORK))
            undo.callback(ways[-1].transport.close)
        for way in more(ways) if more is not None else ():
            ways.append(way)
            undo.callback(way.transport.close)
        if arena is not None and len(ways) > 1:  # there is something to choose from
            presence = Presence(arena.directory)
            undo.callback(presence.close)
            if stage is not None:
                presence.announce(stage, replica)
        far = any(way.distance for way in ways)
        compressor = Compressor(options.compression) if far else None
        transport: Transport = RoutedTransport(ways, options, compressor, presence=presence)
        if options.tiers is not None and options.arena is not None:
            first = transport if len(ways) > 1 else ways[0].transport  # a single transport needs no routing
            transport = tiered_transport(first, options.arena, options.tiers)
        undo.pop_all()
    return transport
