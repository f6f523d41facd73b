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
from vllm_omni_sched.connectors.medium import MediumTransport
from vllm_omni_sched.connectors.mooncake import MooncakeOptions, MooncakeTransport
from vllm_omni_sched.connectors.routing import Presence, RoutedTransport, RoutingOptions, Way
from vllm_omni_sched.connectors.tiers import TieredTransport, TiersOptions
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
        description="Storage for messages that do not fit into the memory within a host; null for none.",
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
        if self.tiers is not None and self.arena is None:
            raise ValueError("option 'tiers': the tier above them is the arena, and 'arena' is null; set one of them")
        if self.tiers is not None and self.tiers.mooncake is not None and self.mooncake is not None:
            raise ValueError(
                "option 'tiers': Mooncake is the transport between hosts or a tier; unset one of both 'mooncake'"
            )
        if not ways:
            raise ValueError("option 'arena' is null, and no other transport is named: name one")
        for edge, names in self.edges.items():
            if not set(names) <= ways:
                raise ValueError(f"option 'edges.{edge}' names {names}; there are {sorted(ways)}")
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
    edges = options.edges
    with contextlib.ExitStack() as undo:
        if options.arena is not None:
            arena = (
                ArenaTransport(options.arena)
                if options.cuda_ipc is None
                else CudaIpcTransport(options.cuda_ipc, options.arena)
            )
            undo.callback(arena.close)
            near: Transport = arena
            if options.tiers is not None:
                near = _tiered(arena, options.arena, options.tiers, undo)
                edges = {
                    edge: [near.name if name == arena.name else name for name in names] for edge, names in edges.items()
                }
            ways.append(Way(near, HOST))
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
        transport = RoutedTransport(ways, options.model_copy(update={"edges": edges}), compressor, presence=presence)
        undo.pop_all()
    return transport


def _tiered(
    arena: ArenaTransport, of_arena: ArenaOptions, options: TiersOptions, undo: contextlib.ExitStack
) -> Transport:
    """Return tiers below an arena; ``undo`` closes what was made."""
    tiers: list[MediumTransport] = [arena]
    if options.mooncake is not None:
        tiers.append(MooncakeTransport(options.mooncake))
        undo.callback(tiers[-1].close)
    if options.disk is not None:
        tiers.append(DiskTransport(options.disk.model_copy(update={"arena": options.disk.arena or of_arena.arena})))
        undo.callback(tiers[-1].close)
    transport = TieredTransport(tiers, of_arena)
    undo.callback(transport.close)
    return transport
