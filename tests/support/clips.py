"""Small videos of all kinds, made by PyAV's encoders, each once per session of tests."""

from __future__ import annotations

import functools
import io
import itertools
import struct
import tempfile
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import av
import numpy as np

from benchmarks.harness.priority import kept_priority

SIZE = (112, 80)


def scene(n: int, width: int, height: int) -> np.ndarray:
    """Return frame ``n`` of a moving scene: uint8 (height, width, 3). No two frames are equal."""
    y, x = np.mgrid[0:height, 0:width]
    image = np.stack([x * 3 + n * 5, y * 4 - n * 3, (x + y) * 2 + n], axis=-1) % 256
    at = 10 + (n * 7) % max(width - 40, 1), 8 + (n * 5) % max(height - 30, 1)
    image[at[1] : at[1] + 20, at[0] : at[0] + 24] = (255 - n * 3 % 256, 40 + n % 200, 90)
    return image.astype(np.uint8)


def encode(
    encoder: str = "libx264",
    container: str = "mp4",
    *,
    frames: int = 48,
    size: tuple[int, int] = SIZE,
    pixel_format: str = "yuv420p",
    times: Iterable[int] | None = None,
    rate: int = 30,
    rotation: int = 0,
    audio: str = "",
    options: dict[str, str] | None = None,
    **stream_attributes: Any,
) -> bytes:
    """Encode a video file.

    Args:
        times: when frames are shown, in units of 1/1000 s; evenly by default.
        rotation: degrees clockwise by which players turn it.
        audio: encoder of a track of silence beside it.
        options: of the encoder.
        stream_attributes: set on the stream's codec context.
    """
    out = io.BytesIO()
    with kept_priority(), av.open(out, "w", format=container) as file:
        stream = file.add_stream(encoder, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = pixel_format
        stream.options = {"threads": "1", **(options or {})}
        stream.codec_context.thread_count = 1
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for name, value in stream_attributes.items():
            setattr(stream.codec_context, name, value)
        if rotation:
            stream.set_display_rotation(-rotation)
        sound = file.add_stream(audio, rate=48000) if audio else None
        when = iter(times) if times is not None else itertools.count()
        for n in range(frames):
            frame = av.VideoFrame.from_ndarray(scene(n, *size), format="rgb24").reformat(format=pixel_format)
            frame.pts = next(when)
            frame.time_base = stream.codec_context.time_base if times is not None else Fraction(1, rate)
            file.mux(stream.encode(frame))
            if sound is not None:
                file.mux(sound.encode(_silence(n, rate)))
        for each in (stream, sound):
            if each is not None:
                file.mux(each.encode(None))
    return out.getvalue()


def _silence(n: int, rate: int) -> av.AudioFrame:
    samples = 48000 // rate
    frame = av.AudioFrame.from_ndarray(np.zeros((2, samples), np.float32), format="fltp", layout="stereo")
    frame.sample_rate, frame.pts, frame.time_base = 48000, n * samples, Fraction(1, 48000)
    return frame


def audio_only() -> bytes:
    """Return an MP4 with a second of silence."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        sound = file.add_stream("aac", rate=48000)
        for n in range(30):
            file.mux(sound.encode(_silence(n, 30)))
        file.mux(sound.encode(None))
    return out.getvalue()


def sound_with_cover() -> bytes:
    """Return an MP4 with three seconds of silence, and a picture that is its cover."""
    picture = encode("mjpeg", "avi", frames=1, pixel_format="yuvj420p")
    out = io.BytesIO()
    with av.open(io.BytesIO(picture)) as source, av.open(out, "w", format="mp4") as file:
        sound = file.add_stream("aac", rate=48000)
        cover = file.add_stream_from_template(source.streams.video[0])
        cover.disposition = av.stream.Disposition.attached_pic
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = cover
                file.mux(packet)
        for n in range(90):
            file.mux(sound.encode(_silence(n, 30)))
        file.mux(sound.encode(None))
    return out.getvalue()


def remux(data: bytes, container: str, *, skip: int = 0, keep: range | None = None) -> bytes:
    """Return the same packets in another container.

    Args:
        skip: frames at the beginning that an edit list hides, as after ``ffmpeg -ss ... -c copy``.
        keep: of the packets, only these, by file order.
    """
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format=container) as file:
        stream = source.streams.video[0]
        copy = file.add_stream_from_template(stream)
        step = int(1 / (stream.average_rate * stream.time_base))
        for n, packet in enumerate(source.demux(stream)):
            if packet.size and (keep is None or n in keep):
                packet.stream = copy
                packet.pts -= skip * step
                packet.dts -= skip * step
                file.mux(packet)
    return out.getvalue()


def header_first(data: bytes) -> bytes:
    """Return the same video as an MP4 with its header in front."""
    with tempfile.NamedTemporaryFile(suffix=".mp4") as out:  # FFmpeg opens it a second time
        with av.open(io.BytesIO(data)) as source, av.open(out.name, "w", options={"movflags": "faststart"}) as file:
            stream = source.streams.video[0]
            copy = file.add_stream_from_template(stream)
            for packet in source.demux(stream):
                if packet.size:
                    packet.stream = copy
                    file.mux(packet)
        return out.read()


def edited(data: bytes, edits: Iterable[tuple[int, int]]) -> bytes:
    """Return an MP4 with another edit list for its one track.

    Args:
        edits: of each, how long it is in 1/1000 s, and where it begins in the track's own time.
    """
    out = bytearray(data)
    movie = out.index(b"moov") - 4
    track = out.index(b"trak", movie) - 4
    grown = 0
    if b"edts" in out[track:]:
        old = out.index(b"edts", track) - 4
        grown -= int.from_bytes(out[old : old + 4], "big")
        del out[old : old - grown]
    body = b"".join(struct.pack(">IiHH", *edit, 1, 0) for edit in edits)
    elst = struct.pack(">I4sII", 16 + len(body), b"elst", 0, len(body) // 12) + body
    edts = struct.pack(">I4s", 8 + len(elst), b"edts") + elst
    at = out.index(b"mdia", track) - 4
    out[at:at] = edts
    for box in (movie, track):
        size = int.from_bytes(out[box : box + 4], "big") + grown + len(edts)
        out[box : box + 4] = size.to_bytes(4, "big")
    return bytes(out)


def packed(data: bytes) -> bytes:
    """Return an AVI of the same MPEG-4 as DivX packs it: in one packet with a reference is the B-VOP behind it, and the
    next packet is a VOP that is not coded. Two more of these are at the end, so that packets outnumber frames.
    """
    out = io.BytesIO()
    uncoded = b"\0\0\1\xb6\x50\xcf"  # times have 5 bits
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format="avi") as file:
        stream = source.streams.video[0]
        copy = file.add_stream_from_template(stream)
        vops = [bytes(packet) for packet in source.demux(stream) if packet.size]
        is_b = [vop[vop.index(b"\0\0\1\xb6") + 4] >> 6 == 2 for vop in vops]
        first = vops[0].index(b"\0\0\1\xb6")
        vops[0] = vops[0][:first] + b"\0\0\1\xb2DivX503b1393p" + vops[0][first:]
        packets = [
            uncoded if is_b[n] else vop + vops[n + 1] if is_b[n + 1 : n + 2] == [True] else vop
            for n, vop in enumerate(vops)
        ]
        for n, content in enumerate([*packets, uncoded, uncoded]):
            packet = av.Packet(content)
            packet.stream, packet.pts, packet.dts, packet.time_base = copy, n, n, stream.time_base
            packet.is_keyframe = content.startswith(b"\0\0\1\xb0")
            file.mux(packet)
    return out.getvalue()


def damaged(data: bytes, *, at: float = 0.5, nbytes: int = 40, seed: int = 0) -> bytes:
    """Return the data with some bytes overwritten, ``at`` a part of its length."""
    begin = int(len(data) * at)
    noise = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()
    return data[:begin] + noise + data[begin + nbytes :]


def retimed(data: bytes, order: Callable[[list[int]], list[int]]) -> bytes:
    """Return the same packets in Matroska, with other pts.

    Args:
        order: from the pts, in decode order, to others.
    """
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format="matroska") as file:
        stream = source.streams.video[0]
        copy = file.add_stream_from_template(stream)
        packets = [packet for packet in source.demux(stream) if packet.size]
        for packet, pts in zip(packets, order([packet.pts for packet in packets]), strict=True):
            packet.stream, packet.pts = copy, pts
            file.mux(packet)
    return out.getvalue()


def mixed_up(pts: list[int]) -> list[int]:
    """Return timestamps with neighbours that are out of order exchanged, as libxvid's encoder in FFmpeg writes them."""
    found = list(pts)
    for n in range(1, len(found)):
        if pts[n] < pts[n - 1]:
            found[n - 1], found[n] = found[n], found[n - 1]
    return found


def times_damaged(data: bytes) -> bytes:
    """Return the same packets in Matroska, with one pts that another has too, and some that are far too late."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format="matroska") as file:
        stream = source.streams.video[0]
        copy = file.add_stream_from_template(stream)
        packets = [packet for packet in source.demux(stream) if packet.size]
        packets[5].pts = packets[4].pts
        for n, packet in enumerate(packets):
            packet.stream = copy
            packet.pts += 40 * 512 * (n in (13, 14))
            file.mux(packet)
    return out.getvalue()


def zero_frames() -> bytes:
    """Return an MP4 whose video track has no sample."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4", options={"movflags": "empty_moov"}) as file:
        stream = file.add_stream("libx264", rate=30)
        stream.width, stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        file.start_encoding()
    return out.getvalue()


def _x264(text: str = "", gop: int = 12, **more: Any) -> dict[str, Any]:
    parameters = f"keyint={gop}:min-keyint={gop}:scenecut=0:threads=1{text}"
    return {"options": {"preset": "medium", "x264-params": parameters}, **more}


def _x265(text: str = "", gop: int = 12, **more: Any) -> dict[str, Any]:
    parameters = f"keyint={gop}:min-keyint={gop}:scenecut=0:pools=1:frame-threads=1:log-level=none{text}"
    return {"encoder": "libx265", "options": {"preset": "veryfast", "x265-params": parameters}, **more}


_SPECS: dict[str, dict[str, Any]] = {
    "h264": _x264(":open-gop=0"),
    "h264_open_gop": _x264(":open-gop=1:bframes=3:b-pyramid=normal"),
    "h264_pyramid": _x264(":bframes=7:b-pyramid=strict:b-adapt=0"),
    "h264_no_b": _x264(":bframes=0"),
    "h264_one_gop": _x264(gop=999),
    "h264_intra_refresh": _x264(":intra-refresh=1"),
    "h264_slices": _x264(":slices=4"),
    "h264_interlaced": _x264(":interlaced=1"),
    "h264_odd": _x264(size=(147, 83), pixel_format="yuv444p"),
    "h264_crop": _x264(size=(150, 90)),
    "h264_10_bit": _x264(pixel_format="yuv420p10le"),
    "h264_422": _x264(pixel_format="yuv422p"),
    "h264_full_range": _x264(pixel_format="yuvj420p"),
    "h264_vfr": _x264(times=np.cumsum([0, *([20, 35, 90, 33] * 12)])[:48].tolist()),
    "h264_rotated": _x264(rotation=90),
    "h264_upside_down": _x264(rotation=180),
    "h264_rotated_left": _x264(rotation=270),
    "h264_audio": _x264(audio="aac"),
    "h264_mkv": _x264(container="matroska"),
    "h264_ts": _x264(container="mpegts", gop=20),
    "h264_flv": _x264(container="flv"),
    "h264_avi": _x264(container="avi"),
    "h264_raw": _x264(container="h264"),
    "hevc": _x265(":open-gop=0"),
    "hevc_open_gop": _x265(":open-gop=1:bframes=4"),
    "hevc_10_bit": _x265(pixel_format="yuv420p10le"),
    "hevc_layers": _x265(":temporal-layers=1:bframes=3"),
    "hevc_ts": _x265(container="mpegts"),
    "av1": {"encoder": "libsvtav1", "frames": 40, "options": {"preset": "12", "g": "10", "svtav1-params": "lp=1"}},
    "av1_mkv": {"encoder": "libsvtav1", "container": "matroska", "frames": 40, "options": {"preset": "12", "g": "16"}},
    "vp9": {
        "encoder": "libvpx-vp9", "container": "webm",
        "options": {"deadline": "realtime", "cpu-used": "8", "g": "12"},
    },
    "vp9_hidden": {
        "encoder": "libvpx-vp9", "container": "webm",
        "options": {"deadline": "good", "cpu-used": "5", "g": "20", "auto-alt-ref": "1", "lag-in-frames": "16"},
    },
    "vp8": {"encoder": "libvpx", "container": "webm", "options": {"deadline": "realtime", "cpu-used": "8", "g": "12"}},
    "mpeg4": {"encoder": "mpeg4", "options": {"g": "12", "bf": "2"}},
    "mpeg4_avi": {"encoder": "mpeg4", "container": "avi", "options": {"g": "12"}},
    "mpeg4_b_avi": {"encoder": "mpeg4", "container": "avi", "options": {"g": "12", "bf": "2"}},
    "mpeg2": {"encoder": "mpeg2video", "container": "mpeg", "options": {"g": "12", "bf": "2"}},
    "mjpeg": {"encoder": "mjpeg", "container": "avi", "pixel_format": "yuvj420p"},
    "wmv_audio": {"encoder": "wmv2", "container": "asf", "audio": "libmp3lame", "options": {"g": "12"}},
    "one_frame": _x264(frames=1),
}  # fmt: skip

_DERIVED = {
    "h264_trimmed": lambda: remux(clip("h264"), "mp4", skip=17),
    "h264_open_gop_trimmed": lambda: remux(clip("h264_open_gop"), "mp4", skip=17),
    "h264_two_edits": lambda: edited(clip("h264"), [(600, 2 * 512), (600, 32 * 512)]),
    "h264_edits_back": lambda: edited(clip("h264_no_b"), [(600, 28 * 512), (600, 3 * 512)]),
    "h264_same_edit_again": lambda: edited(clip("h264"), [(600, 7 * 512), (600, 7 * 512)]),
    "h264_three_edits": lambda: edited(clip("h264"), [(166, 17 * 512), (166, 35 * 512), (166, 5 * 512)]),
    "h264_open_gop_headless": lambda: remux(clip("h264_open_gop"), "matroska", keep=range(20, 48)),
    "hevc_open_gop_headless": lambda: remux(clip("hevc_open_gop"), "matroska", keep=range(18, 48)),
    "mpeg4_mkv": lambda: remux(clip("mpeg4"), "matroska"),
    "mpeg4_mixed_up": lambda: retimed(clip("mpeg4"), mixed_up),
    "h264_mixed_up": lambda: retimed(clip("h264"), mixed_up),
    "mpeg4_decoding_times": lambda: retimed(clip("mpeg4"), sorted),
    "h264_decoding_times": lambda: retimed(clip("h264_pyramid"), sorted),
    "h264_interlaced_decoding_times": lambda: retimed(clip("h264_interlaced"), sorted),
    "hevc_decoding_times": lambda: retimed(clip("hevc_open_gop"), sorted),
    "vp9_mp4": lambda: remux(clip("vp9"), "mp4"),
    "mpeg4_packed": lambda: packed(encode("mpeg4", "avi", options={"g": "12", "bf": "1"})),
}

BROKEN = {
    "h264_truncated": lambda: clip("h264_ts")[: len(clip("h264_ts")) * 2 // 3],
    "h264_mkv_truncated": lambda: clip("h264_mkv")[: len(clip("h264_mkv")) * 2 // 3],
    "h264_avi_truncated": lambda: clip("h264_avi")[: len(clip("h264_avi")) * 2 // 3],
    "mpeg4_avi_truncated": lambda: clip("mpeg4_avi")[: len(clip("mpeg4_avi")) * 2 // 3],
    "vp9_mp4_truncated": lambda: header_first(clip("vp9_mp4"))[: len(clip("vp9_mp4")) * 2 // 3],
    "h264_mp4_truncated": lambda: header_first(clip("h264"))[: len(clip("h264")) * 2 // 3],
    "h264_times_damaged": lambda: times_damaged(clip("h264")),
    **{
        f"{name}_damaged_{n}": (lambda name=name, n=n: damaged(clip(name), at=0.2 + 0.17 * n, seed=n))
        for name in ("h264", "h264_open_gop", "hevc_open_gop", "h264_ts", "mpeg4", "vp9", "av1", "hevc_ts")
        for n in range(4)
    },
}
"""Damaged ones, from which some frames can be had."""

SOUND = (*_SPECS, *_DERIVED)


@functools.cache
def clip(name: str) -> bytes:
    """Return a video by its name, one of `SOUND` or `BROKEN`."""
    if name in _SPECS:
        return encode(**_SPECS[name])
    return (_DERIVED.get(name) or BROKEN[name])()


PLAYLISTS = {
    "hls": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n/etc/hostname\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile '/etc/hostname'\n",
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
}
"""Files that name others, for whoever reads them as videos to open."""
