"""Transports that the contract suite runs over: each kind is a context in which ends of one transport can be opened.

Every end has room for 96 MB and less than 800 MB, and sees the messages of the others. What was opened is closed with
the context.
"""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.arena import MIB, place, small
from tests.support.host_device import device, without_device
from tests.support.mooncake import Deployment, why_not
from tests.support.mooncake_clients import ReusedClients
from tests.support.tiers import disk, tiers
from vllm_omni_sched.connectors.arena import ArenaTransport
from vllm_omni_sched.connectors.mooncake import MooncakeTransport, store
from vllm_omni_sched.connectors.transport import Transport

POOL = {"block_bytes": 4096, "initial_bytes": MIB, "max_bytes": 96 * MIB, "inline_bytes": 4096}

Open = Callable[[], Transport]
Kind = Callable[[], AbstractContextManager[Open]]


class Opened:
    """Opens ends, and closes them."""

    def __init__(self, make: Open) -> None:
        self._make, self.paths = make, list[Transport]()

    def __call__(self) -> Transport:
        self.paths.append(self._make())
        return self.paths[-1]

    def close(self) -> None:
        for path in self.paths:
            path.close()


@contextmanager
def arena(**options: Any) -> Iterator[Open]:
    with place() as root, closing(Opened(lambda: ArenaTransport(small(root, image=POOL, **options)))) as opened:
        yield opened


def arena_that_copies() -> AbstractContextManager[Open]:
    return arena(copy_out=True)


def arena_with_checksums() -> AbstractContextManager[Open]:
    return arena(checksum=True)


@contextmanager
def _in_a_place(make: Callable[[str], Transport]) -> Iterator[Open]:
    with place() as root, closing(Opened(lambda: make(root))) as opened:
        yield opened


def files() -> AbstractContextManager[Open]:
    return _in_a_place(disk)


def arena_above_files() -> AbstractContextManager[Open]:
    return _in_a_place(tiers)


def device_memory() -> AbstractContextManager[Open]:
    return _in_a_place(device)


def device_memory_with_checksums() -> AbstractContextManager[Open]:
    return _in_a_place(lambda root: device(root, checksum=True))


def no_device() -> AbstractContextManager[Open]:
    return _in_a_place(without_device)


@contextmanager
def mooncake() -> Iterator[Open]:
    """Open clients of a real master, in a network namespace."""
    if reason := why_not():
        pytest.skip(reason)
    deployment, clients = mooncake_deployment()
    options = deployment.options(namespace=secrets.token_hex(4), segment="112MB")
    with (
        deployment.inside(),
        patch.object(store, "load_library", clients),
        closing(Opened(lambda: MooncakeTransport(options))) as opened,
    ):
        yield opened
        opened.close()
        clients.clear(options.namespace)


@cache
def mooncake_deployment() -> tuple[Deployment, ReusedClients]:
    """Start one master for the whole run."""
    made, clients = Deployment(), ReusedClients()
    atexit.register(made.close)
    atexit.register(clients.close)
    return made, clients


CHECKING: list[Kind] = [arena_with_checksums, files, device_memory_with_checksums, mooncake]
"""Those that put a checksum of its buffers into each message."""
WAKING: list[Kind] = [arena, arena_that_copies, arena_with_checksums, device_memory, no_device]
"""Those that tell which messages are there, and wake who waits for one."""
TRANSPORTS: list[Kind] = [
    *(arena, arena_that_copies, arena_with_checksums),
    *(files, arena_above_files, device_memory, no_device, mooncake),
]
