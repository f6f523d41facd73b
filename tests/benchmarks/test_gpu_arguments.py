"""Check that the benchmarks of a GPU refuse arguments that make no sense, and a machine without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import __main__ as all_parts
from benchmarks.gpu import device
from benchmarks.gpu.copies import __main__ as copies
from benchmarks.gpu.frames import __main__ as frames
from benchmarks.gpu.ipc import __main__ as ipc
from benchmarks.gpu.lanes import __main__ as lanes
from benchmarks.gpu.nvdec import __main__ as nvdec


@pytest.mark.parametrize(
    ("program", "arguments", "complaint"),
    [
        (ipc, ["--sizes", "64 KB,2 MB"], "unknown size '2 MB'"),
        (ipc, ["--variants", "cuda_ipc;nccl"], "unknown variant 'nccl'"),
        (ipc, ["--rounds", "0"], "must be at least 1"),
        (lanes, ["--shares", "1,0"], "a share must be in"),
        (lanes, ["--sms", "16,0"], "must be at least 1"),
        (lanes, ["--batch", "-1"], "must be at least 1"),
        (copies, ["--embeds", "256,0"], "must be at least 1"),
        (nvdec, ["--codecs", "h264,vc1"], "unknown codec 'vc1'"),
        (nvdec, ["--rounds", "0"], "must be at least 1"),
        (frames, ["--codecs", "h264,vc1"], "unknown codec 'vc1'"),
        (frames, ["--device-mib", "0"], "must be at least 1"),
    ],
)
def test_arguments_out_of_range_are_refused(capsys: Any, program: Any, arguments: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit):
        program.parse(arguments)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("program", [all_parts, copies, frames, ipc, lanes, nvdec])
def test_without_a_gpu_it_says_so_in_one_line(capsys: Any, monkeypatch: pytest.MonkeyPatch, program: Any) -> None:
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    with pytest.raises(SystemExit) as left:
        program.main([])
    assert left.value.code == 2
    said = f"{program.__package__} needs a CUDA device that torch can use, and there is none here"
    assert capsys.readouterr().err == said + "\n"
