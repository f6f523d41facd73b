"""Handles and blocks, on a device whose calls are listened to."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.host_device import HostDriver
from vllm_omni_sched.config.errors import CorruptMessageError, DeviceLostError
from vllm_omni_sched.connectors.cuda_ipc import cuda
from vllm_omni_sched.connectors.cuda_ipc.cuda import CudaShare, Handle, packed, unpacked
from vllm_omni_sched.connectors.cuda_ipc.driver import Exported, Mapping
from vllm_omni_sched.connectors.cuda_ipc.share import ShareReason

HANDLE = Handle("sender-1", 1, "host-0", b"memory", 100, 0, b"event")


class Elsewhere(HostDriver):
    """Maps what another process has shared: here, 100 sevens."""

    def map(self, index: int, exported: Exported, keep: list[object]) -> Mapping:
        if isinstance(failure := self.fails.get("map"), Exception):
            raise failure
        self.calls += ["wait"] if exported.event else []
        self.calls.append(f"map {exported.memory!r} at {exported.offset} on {index}")
        self.keeps = keep
        block = torch.full((exported.nbytes,), 7, dtype=torch.uint8)
        return Mapping(block, lambda: self.calls.append("finished"))


@pytest.fixture
def driver() -> Elsewhere:
    return Elsewhere("host-0", "host-1")


@pytest.fixture
def alive() -> set[str]:
    return {"sender-1"}


@pytest.fixture
def share(driver: Elsewhere, alive: set[str]) -> Iterator[CudaShare]:
    yield CudaShare(lambda: "us", lambda token: token in alive, driver)
    cuda._here.clear()


@given(st.binary(max_size=60))
def test_any_bytes_are_a_handle_or_an_error(data: bytes) -> None:
    try:
        handle = unpacked(data)
    except CorruptMessageError:
        return
    assert unpacked(packed(handle)) == handle


@given(st.data())
def test_a_damaged_handle_is_an_error_or_another_handle(data: st.DataObject) -> None:
    whole = packed(HANDLE)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[at] ^= data.draw(st.integers(1, 255))
    for broken in (bytes(damaged), whole[:at], whole + b"\0"):
        try:
            assert isinstance(unpacked(broken), Handle)
        except CorruptMessageError:
            continue
        assert broken not in (whole[:at], whole + b"\0")


@pytest.mark.parametrize(
    "bad", [msgspec.structs.replace(HANDLE, nbytes=-1), msgspec.structs.replace(HANDLE, offset=-8)]
)
def test_a_handle_of_no_room_is_refused(bad: Handle) -> None:
    with pytest.raises(CorruptMessageError, match="invalid handle of a device tensor"):
        unpacked(packed(bad))


@pytest.mark.parametrize("copy", [True, False])
def test_the_stream_waits_for_the_sender_before_it_looks(share: CudaShare, driver: Elsewhere, copy: bool) -> None:
    block = share.open(packed(HANDLE), object(), copy)
    assert driver.calls == ["wait", "map b'memory' at 0 on 0", *(["finished"] if copy else [])]
    driver.calls.clear()
    assert block.unique().tolist() == [7]
    share.open(packed(msgspec.structs.replace(HANDLE, event=b"", device="host-1", offset=8)), object(), copy)
    assert driver.calls[0] == "map b'memory' at 8 on 1"  # its sender has waited


def test_a_copy_gives_the_block_back_once_the_device_has_made_it(share: CudaShare, driver: Elsewhere) -> None:
    driver.idle, keep = False, object()
    copied = share.open(packed(HANDLE), keep, copy=True)
    assert driver.keeps == [keep]
    assert len(driver.events) == 1
    assert share.collect() == 0
    driver.events[0].reached = True
    assert "finished" not in driver.calls
    assert share.collect() == 1
    assert driver.calls[-1] == "finished"
    assert copied.unique().tolist() == [7]
    assert share.collect() == 0


def test_many_copies_are_given_back_in_order(share: CudaShare, driver: Elsewhere) -> None:
    driver.idle = False
    for _ in range(5):
        share.open(packed(HANDLE), object(), copy=True)
    for event in driver.events[:3]:
        event.reached = True
    assert [share.collect(), share.collect()] == [3, 0]


@pytest.mark.parametrize("copy", [True, False])
def test_a_process_does_not_open_what_is_its_own_but_has_it(share: CudaShare, driver: HostDriver, copy: bool) -> None:
    block = share.allocate(torch.zeros(1), 64)
    block.fill_(5)
    handle = share.share(block)
    (copied,) = driver.events
    again = CudaShare(lambda: "other", lambda _: True, driver).open(handle, object(), copy)
    assert again.tolist() == [5] * 64
    assert (again.data_ptr() == block.data_ptr()) is not copy
    assert driver.calls == ["export", "wait", *(["finished"] if copy else [])]
    assert driver.waited == [copied]  # it may be on another thread's stream
    share.release(handle)
    assert driver.exported == 0


class Lease:
    """What is kept."""


def test_a_copy_of_its_own_keeps_the_block_until_the_device_has_made_it(share: CudaShare, driver: HostDriver) -> None:
    driver.idle = False
    keep = Lease()
    kept = weakref.ref(keep)
    handle = share.share(share.allocate(torch.zeros(1), 64))
    share.open(handle, keep, copy=True)
    del keep
    share.release(handle)
    assert share.collect() == 0
    assert (kept() is None, len(driver.files)) == (False, 1)
    driver.events[-1].reached = True
    assert share.collect() == 1
    assert (kept(), driver.files) == (None, {})


def test_a_view_of_its_own_keeps_the_block_as_long_as_it_is_looked_at(share: CudaShare, driver: HostDriver) -> None:
    keep = Lease()
    kept = weakref.ref(keep)
    block = share.open(share.share(share.allocate(torch.zeros(1), 64)), keep, copy=False)
    del keep
    part = block[3:5]
    del block
    assert kept() is not None
    del part
    assert kept() is None


def test_what_cannot_be_recorded_is_not_shared(
    share: CudaShare, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(driver, "record", fails)
    assert share.share(share.allocate(torch.zeros(1), 64)) is ShareReason.REFUSED
    assert (driver.exported, driver.files) == (0, {})


def test_release_twice_releases_once_and_the_driver_collects_after_it(share: CudaShare, driver: HostDriver) -> None:
    handle = share.share(share.allocate(torch.zeros(1), 64))
    share.collect()
    assert "collect" not in driver.calls
    share.release(handle)
    share.release(handle)
    share.collect()
    share.collect()
    assert driver.calls.count("collect") == 1
    assert (driver.exported, driver.files) == (0, {})


def test_a_device_that_is_not_seen_says_how_to_go_on(share: CudaShare) -> None:
    with pytest.raises(DeviceLostError, match=r"device host-7.*see the same devices, or set.*`cuda_ipc` to null"):
        share.open(packed(msgspec.structs.replace(HANDLE, device="host-7")), object(), copy=True)
    assert share.devices() == {"host-0", "host-1"}


def test_memory_of_the_dead_is_not_opened(share: CudaShare, driver: Elsewhere, alive: set[str]) -> None:
    alive.clear()
    with pytest.raises(DeviceLostError, match="has ended"):
        share.open(packed(HANDLE), object(), copy=True)
    assert driver.calls == []


def test_a_driver_that_refuses_is_not_offered_for_that_device_again(share: CudaShare, driver: Elsewhere) -> None:
    driver.fails["map"] = RuntimeError("CUDA error: invalid resource handle")
    with pytest.raises(DeviceLostError, match=r"invalid resource handle.*--ipc=host"):
        share.open(packed(HANDLE), object(), copy=True)
    assert share.devices() == {"host-1"}


def test_a_sender_that_dies_meanwhile_is_not_blamed_on_the_driver(
    share: CudaShare, driver: Elsewhere, alive: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        alive.clear()
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(driver, "map", dies)
    with pytest.raises(DeviceLostError, match="ended while it was received"):
        share.open(packed(HANDLE), object(), copy=True)
    assert share.devices() == {"host-0", "host-1"}


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (RuntimeError("no"), ShareReason.REFUSED),
        (ShareReason.ALLOCATOR, ShareReason.ALLOCATOR),
    ],
)
def test_what_cannot_be_shared_has_a_reason(
    share: CudaShare, driver: HostDriver, failure: Exception | ShareReason, why: ShareReason
) -> None:
    driver.fails["export"] = failure
    assert share.share(share.allocate(torch.zeros(1), 64)) is why
    driver.room = 63
    assert share.allocate(torch.zeros(1), 64) is ShareReason.NO_MEMORY


def test_a_sender_that_cannot_say_that_it_lives_shares_nothing(driver: HostDriver) -> None:
    def no_room() -> str:
        raise OSError(28, os.strerror(28))

    share = CudaShare(no_room, lambda _: True, driver)
    assert share.share(share.allocate(torch.zeros(1), 64)) is ShareReason.REFUSED
    assert driver.exported == 0


def test_devices_are_asked_for_until_there_are_some(driver: HostDriver) -> None:
    names, driver.names = driver.names, []
    share = CudaShare(lambda: "us", lambda _: True, driver)
    assert share.devices() == frozenset()
    driver.names = names
    assert share.devices() == set(names)
