"""Tiers from options."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.disk import DiskOptions, DiskTransport
from vllm_omni_sched.connectors.modality import Modality
from vllm_omni_sched.connectors.mooncake import MooncakeOptions, MooncakeTransport
from vllm_omni_sched.connectors.tiers.options import TiersOptions
from vllm_omni_sched.connectors.tiers.place import Tier
from vllm_omni_sched.connectors.tiers.transport import TieredTransport
from vllm_omni_sched.connectors.transport import Transport
from vllm_omni_sched.errors import ConfigError


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
