import builtins
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.connectors.mooncake import MooncakeOptions
from vllm_omni_sched.connectors.mooncake.options import GIB, MIB
from vllm_omni_sched.connectors.mooncake.store import load_library


@pytest.mark.parametrize(
    ("said", "nbytes"),
    [(GIB, GIB), ("512MB", 512 * MIB), ("64 MiB", 64 * MIB), ("1g", GIB), ("1048576", MIB), ("1.5GB", 3 * GIB // 2)],
)
def test_sizes(said: Any, nbytes: int) -> None:
    options = MooncakeOptions(segment=said, localbuf=said, window_size=said)
    assert (options.segment, options.localbuf, options.window_size) == (nbytes,) * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"segment": "many"},
        {"segment": -1},
        {"localbuf": "1 KB"},
        {"segment": "9" * 400 + "MB"},
        {"segment": "9" * 400},
        {"proto": "udp"},
        {"master": "50051"},
        {"master": "http://127.0.0.1:50051"},
        {"master": "127.0.0.1:70000"},
        {"namespace": "a/b"},
        {"metadata": "P2PHANDSHAKE"},
    ],
)
def test_what_cannot_be_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MooncakeOptions(**wrong)


@pytest.mark.parametrize(("master", "address"), [("10.0.0.1:1", ("10.0.0.1", 1)), ("[::1]:5", ("::1", 5))])
def test_address_of_the_master(master: str, address: tuple[str, int]) -> None:
    assert MooncakeOptions(master=master).master_address == address


def test_auto_is_rdma_where_there_is_a_device(tmp_path: Path) -> None:
    options = MooncakeOptions()
    assert options.protocol(tmp_path / "none") == "tcp"
    assert options.protocol(tmp_path) == "tcp"
    (tmp_path / "mlx5_0").mkdir()
    assert options.protocol(tmp_path) == "rdma"
    assert MooncakeOptions(proto="tcp").protocol(tmp_path) == "tcp"


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), "`pip install mooncake-transfer-engine`"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "libibverbs1 libnuma1 libcurl4"),
    ],
)
def test_a_library_that_is_not_there_says_what_to_do(
    error: ImportError, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> ModuleType:
        if name.partition(".")[0] == "mooncake":
            raise error
        return stock(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=fix):
        load_library()


def test_importing_the_path_does_not_import_the_library() -> None:
    import subprocess

    script = "import sys, vllm_omni_sched.connectors.mooncake; assert 'mooncake' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
