"""The copies that `benchmarks.gpu.copies` times are right where streams are queues and pinned memory is read late."""

from __future__ import annotations

from benchmarks.gpu.copies import __main__ as copies


def test_encodings_and_frames_are_what_they_were() -> None:
    options = copies.parse(["--embeds", "16,256", "--frames", "4,8", "--rounds", "3", "--no-encode"])
    rows = copies.measure(options, "cuda")
    assert [(row["task"], row["wrong"]) for row in rows] == [("host tier", 0)] * 2 + [("stitch", 0)] * 2
