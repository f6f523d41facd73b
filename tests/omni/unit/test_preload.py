"""Checkpoints are read into the page cache before their stages load them, by few threads, and at no risk."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni_sched.config.stage_options import PreloadOptions
from vllm_omni_sched.logs import LOGGER
from vllm_omni_sched.omni.stages.recovery import restart
from vllm_omni_sched.omni.stages.start.preload import Preloader, checkpoint_files, preload_first, weight_files
from vllm_omni_sched.resource.pipeline.preload import PIECE_BYTES, Piece

pytestmark = pytest.mark.omni

PLENTY = 1 << 40


def replica(
    model: Path | str, *, load_format: str = "auto", launch_mode: str = "local", diffusion: bool = False
) -> Any:
    """Return vLLM-Omni's plan of a replica, as far as it concerns its checkpoint."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )
    return SimpleNamespace(
        replica_id=0,
        launch_mode=launch_mode,
        stage_vllm_config=None if diffusion else config,
        engine_args_dict={"model": str(model)},
    )


def checkpoint(folder: Path, *names: str, nbytes: int = 1000, index: list[str] | None = None) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(nbytes))
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {f"layer{number}": name for number, name in enumerate(index)}})
        )
    return folder


def preloader(read: Callable[[Piece, bytearray], None] | None = None, **options: Any) -> Preloader:
    return Preloader(PreloadOptions(enabled=True, **options), lambda: PLENTY, read)


def names(files: list[Path], folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in files]


@pytest.mark.parametrize(
    ("there", "index", "chosen"),
    [
        (["b.safetensors", "a.safetensors", "c.bin", "config.json"], None, ["a.safetensors", "b.safetensors"]),
        (["a.safetensors", "b.safetensors", "other.safetensors"], ["b.safetensors", "a.safetensors"] * 2, None),
        (["consolidated.safetensors", "model.safetensors"], None, ["model.safetensors"]),
        (["consolidated.safetensors"], None, ["consolidated.safetensors"]),
        (["x.bin"], None, ["x.bin"]),
        (["vae/x.safetensors", "model.safetensors"], None, ["model.safetensors"]),
        (
            ["model_index.json", "vae/x.safetensors", "unet/y.safetensors"],
            None,
            ["unet/y.safetensors", "vae/x.safetensors"],
        ),
        (["config.json"], None, []),
    ],
)
def test_the_files_that_vllm_loads_are_chosen(
    tmp_path: Path, there: list[str], index: list[str] | None, chosen: list[str] | None
) -> None:
    checkpoint(tmp_path, *there, index=index)
    assert names(weight_files(tmp_path), tmp_path) == (sorted(set(index or [])) if chosen is None else chosen)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_as_none(tmp_path: Path, text: str) -> None:
    checkpoint(tmp_path, "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert names(weight_files(tmp_path), tmp_path) == ["a.safetensors"]


def test_replicas_and_stages_with_one_checkpoint_read_it_once(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "first", "a.safetensors", nbytes=PIECE_BYTES + 5)
    second = checkpoint(tmp_path / "second", "b.safetensors")
    read: list[Piece] = []
    plans = [replica(first), replica(first), replica(second), replica(second, diffusion=True)]
    preloader(lambda piece, _: read.append(piece), threads=1).run(plans)
    assert [(Path(piece.path).name, piece.nbytes) for piece in read] == [
        ("a.safetensors", PIECE_BYTES),
        ("a.safetensors", 5),
        ("b.safetensors", 1000),
    ]


@pytest.mark.parametrize("how", [{"load_format": "dummy"}, {"launch_mode": "remote"}])
def test_what_is_not_loaded_here_is_not_read(tmp_path: Path, how: dict[str, str]) -> None:
    assert list(checkpoint_files([replica(checkpoint(tmp_path, "a.safetensors"), **how)])) == []


def test_a_checkpoint_that_has_to_be_downloaded_is_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model in ("nobody/has-this-model", "/no/such/folder"):
        assert list(checkpoint_files([replica(model)])) == []


def cached(file: Path) -> bool:
    """Return whether the first page of a file is in the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def test_afterwards_the_files_are_in_the_page_cache(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "a.safetensors", "b.safetensors", nbytes=1 << 20)
    files = weight_files(folder)
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    preloader().run([replica(folder)])
    assert [cached(file) for file in files] == [True, True]


def test_no_more_threads_read_than_the_option_says(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, *(f"{number}.safetensors" for number in range(12)))
    lock, all_read = threading.Lock(), threading.Barrier(3)
    readers: set[int] = set()

    def read(piece: Piece, buffer: bytearray) -> None:
        with lock:
            readers.add(threading.get_ident())
        all_read.wait(60)  # goes on when three read at the same time

    preloader(read, threads=3).run([replica(folder)])
    assert len(readers) == 3


def test_a_file_that_cannot_be_read_costs_a_warning_and_no_other_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(tmp_path, "a.safetensors", "b.safetensors", nbytes=2 * PIECE_BYTES)
    read: list[str] = []

    def fail(piece: Piece, buffer: bytearray) -> None:
        if piece.path.endswith("a.safetensors"):
            raise OSError(5, "Input/output error")
        read.append(piece.path)

    with caplog.at_level("INFO", logger=LOGGER):
        preloader(fail, threads=1).run([replica(folder)])
    assert read == [str(folder / "b.safetensors")] * 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "a.safetensors cannot be read ahead (Input/output error)" in told[0]
    assert "read 1 checkpoint files" in told[1]


def test_files_that_do_not_fit_into_the_memory_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoint(tmp_path, "a.safetensors", "b.safetensors")
    with caplog.at_level("INFO", logger=LOGGER):
        plan = Preloader(PreloadOptions(enabled=True), lambda: 2000).run([replica(folder)])
    assert [Path(piece.path).name for piece in plan.pieces] == ["a.safetensors"]
    assert "1 files do not fit" in caplog.text


class Runtime:
    """vLLM-Omni's `StageRuntime`, as far as a start of a replica goes."""

    _stage_init_timeout = 1

    def __init__(self, *replicas: Any) -> None:
        self.started: list[Any] = []
        self._plans = [SimpleNamespace(replicas=[one]) for one in replicas]

    def _prepare_stage_plans(self) -> list[Any]:
        return self._plans

    def _initialize_replica(self, plan: Any, timeout: int) -> str:
        self.started.append(plan)
        return "client"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """What was begun to be read."""
    found: list[list[Any]] = []
    monkeypatch.setattr(Preloader, "begin", lambda self, replicas: found.append(list(replicas)))
    return found


def test_a_replica_that_starts_again_is_read_ahead(tmp_path: Path, begun: list[list[Any]]) -> None:
    plans = [replica(tmp_path / "first"), replica(tmp_path / "second")]
    runtime = Runtime(*plans)
    assert restart.start_replica(runtime, 1, 0, None, preloader()) == "client"
    assert begun == [[plans[1]]]
    assert runtime.started == [plans[1]]
    restart.start_replica(runtime, 0, 0)
    assert len(begun) == 1  # without the option nothing is read


def test_all_stages_are_read_ahead_once_when_a_pipeline_starts(tmp_path: Path, begun: list[list[Any]]) -> None:
    plans = [replica(tmp_path / "first"), replica(tmp_path / "second")]
    runtime, options = Runtime(*plans), PreloadOptions(enabled=True)
    preload_first(runtime, PreloadOptions(), runtime._prepare_stage_plans())
    assert begun == []
    for _ in range(2):  # stages are planned again when a replica starts again
        preload_first(runtime, options, runtime._prepare_stage_plans())
    assert begun == [plans]
    preload_first(Runtime(*plans), options, runtime._prepare_stage_plans())
    assert len(begun) == 2
