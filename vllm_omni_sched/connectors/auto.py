"""All paths that this package has, as one, from options."""

from __future__ import annotations

import contextlib

from pydantic import Field

from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaPath
from vllm_omni_sched.connectors.base import Path
from vllm_omni_sched.connectors.compression import CompressionOptions, Compressor
from vllm_omni_sched.connectors.cuda_ipc import CudaIpcOptions, CudaIpcPath
from vllm_omni_sched.connectors.mooncake import MooncakeOptions, MooncakePath
from vllm_omni_sched.connectors.routing import RoutedPath, RoutingOptions
from vllm_omni_sched.connectors.routing.path import Way
from vllm_omni_sched.connectors.tiers import TiersOptions
from vllm_omni_sched.connectors.tiers.auto import path_over_tiers
from vllm_omni_sched.errors import ConfigError

HOST, NETWORK = 0, 1  # distances


class AutoOptions(RoutingOptions):
    """Options of all paths. Unknown keys are errors."""

    arena: ArenaOptions | None = Field(
        ArenaOptions(), description="Options of the path within a host; null: there is none."
    )
    cuda_ipc: CudaIpcOptions | None = Field(
        None,
        description="Options of device tensors that stay on their device; null: they go through host memory. With them "
        "the path within a host is named 'cuda_ipc', not 'arena'.",
    )
    mooncake: MooncakeOptions | None = Field(
        None, description="Options of the path between hosts; null: there is none."
    )
    compression: CompressionOptions = Field(
        CompressionOptions(), description="When buffers are compressed on paths between hosts."
    )
    tiers: TiersOptions | None = Field(
        None, description="Where messages go that these paths have no room for, or that wait for long; null: nowhere."
    )
    put_timeout_seconds: float = Field(30.0, ge=0, description="How long `put` waits for room or for its receiver.")


def auto_path(options: AutoOptions) -> Path:
    """The paths that the options ask for.

    Raises:
        ConfigError: there is none, or one cannot work.
        RendezvousError: the arena's directory cannot be used, or there is no Mooncake master.
    """
    if options.cuda_ipc is not None and options.arena is None:
        raise ConfigError("option `cuda_ipc` needs the arena, through which its messages go: leave `arena` out")
    ways: list[Way] = []
    with contextlib.ExitStack() as undo:
        if options.arena is not None:
            arena = ArenaPath(options.arena)
            ways.append(Way(arena if options.cuda_ipc is None else CudaIpcPath(options.cuda_ipc, arena), HOST))
            undo.callback(ways[-1].path.close)
        if options.mooncake is not None:
            ways.append(Way(MooncakePath(options.mooncake), NETWORK))
            undo.callback(ways[-1].path.close)
        far = any(way.distance for way in ways)
        path: Path = RoutedPath(ways, options, Compressor(options.compression) if far else None)
        if options.tiers is not None:
            path = path_over_tiers(path, options.arena, options.mooncake, options.tiers)
        undo.pop_all()
    return path
