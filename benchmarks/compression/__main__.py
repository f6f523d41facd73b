"""`python -m benchmarks.compression`: see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import queue
import random
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.compression import KINDS, LINKS, OURS, RAW, VARIANTS
from benchmarks.compression.link import LENGTH, Link
from benchmarks.compression.peer import checksum
from benchmarks.harness.arguments import add_common
from benchmarks.harness.child import Child, interrupt_on_terminate
from benchmarks.harness.load import wait_for_idle_machine
from benchmarks.harness.provenance import write_result
from benchmarks.harness.screen import console
from benchmarks.harness.stats import Summary, quantile
from vllm_omni_sched.connectors.compression.compressor import RAW as NO_CODEC
from vllm_omni_sched.connectors.compression.compressor import Compressor
from vllm_omni_sched.connectors.compression.options import CompressionOptions
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.packing import buffer_of, pack

EDGE = Edge("0", "1")
SERIAL, PIPELINED = "serial", "pipelined"
MESSAGES = {SERIAL: 3, PIPELINED: 6}
AHEAD = 2  # messages that are compressed before the link has taken the first of them
CODEC_RUNS = 5
Samples = dict[tuple[str, str, str, str], list[float]]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    interrupt_on_terminate()
    wait_for_idle_machine(options)
    order, rng = random.Random(options.seed), np.random.default_rng(options.seed)
    payloads = {kind: KINDS[kind](rng) for kind in options.kinds}
    records = [codec(kind, payload) for kind, payload in payloads.items()]
    compressors = {
        (kind, variant): Compressor(CompressionOptions.model_validate(VARIANTS[variant]))
        for kind in payloads
        for variant in VARIANTS
    }
    samples: Samples = {}
    with Child("benchmarks.compression.peer") as peer, connected(peer.next_event()["port"]) as sock:
        for turn in range(options.rounds):
            for kind, payload in payloads.items():
                for link in options.links:
                    for variant in order.sample(list(VARIANTS), len(VARIANTS)):
                        compressor = compressors[kind, variant]
                        one_turn(sock, (kind, link, variant), payload, compressor, samples)
            console.print(f"round {turn + 1} of {options.rounds}")
    records += record(samples)
    for shown in tables(records):
        console.print(shown)
    workload = {
        "messages": MESSAGES,
        "link": "token bucket in front of a loopback socket",
        "bytes": {kind: int(payload.nbytes) for kind, payload in payloads.items()},
    }
    path = options.out / "compression.json"
    console.print(str(write_result(path, "compression", records, seed=options.seed, workload=workload)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compression", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS), metavar="LINK")
    add_common(parser, rounds=9)
    return parser.parse_args(arguments)


def connected(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def codec(kind: str, payload: Any) -> dict[str, Any]:
    """Measure the codec of a kind of payload, and the link speeds from which on it does not pay any more.

    *Serial* is one message at a time: encode, send, decode. *Pipelined* is many: the slowest of the three counts.
    """
    buffer = buffer_of(payload)
    always = Compressor(CompressionOptions.model_validate({"mode": "always"}))
    (packed,) = always.compress(str(EDGE), [buffer])
    if packed.codec == NO_CODEC:
        return {"measure": "codec", "kind": kind, "codec": "none shrinks it", "fraction": 1.0}
    own, out = always.codecs[packed.codec], np.empty_like(buffer.raw)
    encodes, decodes = list[float](), list[float]()
    for _ in range(CODEC_RUNS):
        began = time.perf_counter()
        data = own.encode(buffer.raw, buffer.dtype, buffer.shape)
        between = time.perf_counter()
        assert data is not None
        own.decode(data, buffer.dtype, buffer.shape, out)
        encodes.append(between - began)
        decodes.append(time.perf_counter() - between)
    assert np.array_equal(out, buffer.raw), f"{packed.codec} does not give back what it was given"
    encode, decode = Summary.of(encodes), Summary.of(decodes)
    saved = buffer.raw.size - packed.data.size
    return {
        "measure": "codec",
        "kind": kind,
        "codec": packed.codec,
        "fraction": round(packed.data.size / buffer.raw.size, 4),
        "encode_seconds": encode.as_dict(9),
        "decode_seconds": decode.as_dict(9),
        "break_even_bytes_per_second": {
            SERIAL: round(saved / (encode.median + decode.median)),
            PIPELINED: round(buffer.raw.size / max(encode.median, decode.median)),
        },
    }


def one_turn(
    sock: socket.socket, what: tuple[str, str, str], payload: Any, compressor: Compressor, samples: Samples
) -> None:
    """Seconds per message, one at a time and many in a row; the first message is checked and not counted."""
    speed = LINKS[what[1]]
    link = Link(sock, speed)
    link.send(packed(payload, compressor, speed, check=True))
    expected = checksum(payload)
    if acknowledged(sock) != expected:
        raise SystemExit(f"{what}: what arrived is not what was sent")
    began = time.perf_counter()
    for _ in range(MESSAGES[SERIAL]):
        link.send(packed(payload, compressor, speed))
        acknowledged(sock)
    samples.setdefault((*what, SERIAL), []).append((time.perf_counter() - began) / MESSAGES[SERIAL])
    samples.setdefault((*what, PIPELINED), []).append(in_a_row(sock, link, payload, compressor, speed))


def in_a_row(sock: socket.socket, link: Link, payload: Any, compressor: Compressor, speed: float) -> float:
    """Seconds per message when the next is compressed while one is on its way and another is decoded."""
    ready: queue.Queue[bytearray] = queue.Queue(AHEAD)
    count = MESSAGES[PIPELINED]

    def forward() -> None:
        for _ in range(count):
            link.send(ready.get())

    sending = threading.Thread(target=forward)
    began = time.perf_counter()
    sending.start()
    for _ in range(count):
        ready.put(packed(payload, compressor, speed))
    for _ in range(count):
        acknowledged(sock)
    took = time.perf_counter() - began
    sending.join()
    return took / count


def packed(payload: Any, compressor: Compressor, speed: float, check: bool = False) -> bytearray:
    """Return a message as a transport between hosts sends it: compressed where that pays, with a checksum."""
    message = make_message(EDGE, "k", {"x": payload, "check": check})
    return pack(message, compressor, speed).to_buffer(checked=True)


def acknowledged(sock: socket.socket) -> int:
    front = bytearray()
    while len(front) < LENGTH.size:
        front += sock.recv(LENGTH.size - len(front)) or _gone()
    return int(LENGTH.unpack(front)[0])


def _gone() -> bytes:
    raise SystemExit("the receiver has ended")


def record(samples: Samples) -> list[dict[str, Any]]:
    """Return, by kind, link and way of sending, the rounds and the median of raw over it round by round."""
    found = []
    for (kind, link, variant, way), own in samples.items():
        entry = {"measure": way, "kind": kind, "link": link, "variant": variant, **Summary.of(own).as_dict(9)}
        if variant == OURS:
            ratios = [a / b for a, b in zip(samples[kind, link, RAW, way], own, strict=True)]
            entry |= {"raw_over_it": round(quantile(ratios, 0.5), 3)}
            entry |= {"raw_over_it_quartiles": [round(quantile(ratios, q), 3) for q in (0.25, 0.75)]}
        found.append(entry)
    return found


def tables(records: list[dict[str, Any]]) -> list[Table]:
    codecs = Table(title="codecs alone; break-even link speed in MB/s", title_justify="left")
    for column in ("", "codec", "size", "serial", "pipelined"):
        codecs.add_column(column, justify="right")
    for one in records:
        if one["measure"] == "codec":
            even = one.get("break_even_bytes_per_second", {})
            speeds = [f"{even[way] / 1e6:,.0f}" if even else "" for way in (SERIAL, PIPELINED)]
            codecs.add_row(one["kind"], one["codec"], f"{one['fraction']:.2f}", *speeds)
    links = Table(title="ms per message; in brackets raw / ours, and its quartiles", title_justify="left")
    for column in ("", "link", "", "raw", "ours"):
        links.add_column(column, justify="right")
    for one in records:
        if one.get("variant") == OURS:
            raw = next(
                r
                for r in records
                if r.get("variant") == RAW and all(r[k] == one[k] for k in ("measure", "kind", "link"))
            )
            low, high = one["raw_over_it_quartiles"]
            shown = f"{one['median'] * 1e3:.2f} ({one['raw_over_it']:.2f}, {low:.2f} to {high:.2f})"
            links.add_row(one["kind"], one["link"], one["measure"], f"{raw['median'] * 1e3:.2f}", shown)
    return [codecs, links]


if __name__ == "__main__":
    main(sys.argv[1:])
