"""What `benchmarks.compression` sends, how its link is shaped, and what it makes of what it has measured."""

import json
import socket

import numpy as np
import pytest
import torch

from benchmarks.compression import KINDS, OURS, RAW, __main__, link
from benchmarks.compression.peer import checksum
from vllm_omni_sched.connectors.compression.compressor import Compressor
from vllm_omni_sched.connectors.framing import Arrival


class Clock:
    """Time that goes on when somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


def test_the_link_takes_as_long_as_its_speed_says(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(link, "time", clock)
    sender, receiver = socket.socketpair()
    with sender, receiver:
        shaped = link.Link(sender, 1e6)
        for nbytes in (1000, 70_000, 0):
            began = clock.now
            shaped.send(bytes(nbytes))
            assert clock.now - began == pytest.approx((nbytes + 8) / 1e6, abs=link.SLACK + 1e-9)
            assert link.receive(receiver) == bytes(nbytes)
        sender.close()
        assert link.receive(receiver) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_comes_back_and_is_what_its_name_says(kind):
    payload = KINDS[kind](np.random.default_rng(1))
    assert payload.nbytes > 900_000
    data = __main__.packed(payload, Compressor(), 1e6, check=True)
    assert len(data) < 0.95 * payload.nbytes  # a link as slow as that is worth it
    arrival = Arrival(data)
    arrival.unpack(Compressor().decompress)
    found = arrival.open()
    assert found["check"]
    assert found["x"].dtype == payload.dtype
    assert checksum(found["x"]) == checksum(payload)
    if isinstance(payload, torch.Tensor):
        assert torch.equal(found["x"], payload)


def test_break_even_speeds_follow_from_what_the_codec_took():
    found = __main__.codec("ids, int64", KINDS["ids, int64"](np.random.default_rng(2)))
    encode, decode = (found[name]["median"] for name in ("encode_seconds", "decode_seconds"))
    nbytes, even = 131_072 * 8, found["break_even_bytes_per_second"]
    assert even["serial"] == pytest.approx((1 - found["fraction"]) * nbytes / (encode + decode), rel=1e-3)
    assert even["pipelined"] == pytest.approx(nbytes / max(encode, decode), rel=1e-3)


def test_raw_over_ours_is_of_the_same_round():
    samples = {("k", "l", RAW, "serial"): [4.0, 6.0, 8.0], ("k", "l", OURS, "serial"): [2.0, 2.0, 8.0]}
    raw, ours = __main__.record(samples)
    assert "raw_over_it" not in raw
    assert (ours["raw_over_it"], ours["raw_over_it_quartiles"]) == (2.0, [1.5, 2.5])


def test_a_run_leaves_all_it_measured(tmp_path):
    __main__.main(["--rounds", "2", "--kinds", "ids, int64", "--links", "400 MB/s", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "compression.json").read_text())
    assert [one["measure"] for one in found["results"]] == ["codec", *["serial", "pipelined"] * 2]
    assert all(one["samples"] == 2 and one["median"] > 0 for one in found["results"][1:])
