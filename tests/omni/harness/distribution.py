"""Entry points without an installation: a distribution that is metadata only, found on PYTHONPATH by every process."""

from __future__ import annotations

from pathlib import Path

PLUGINS = {
    "vllm_omni.platform_plugins": {"omni_on_cpu": "tests.omni.cpu.platform:qualified_name"},
    "vllm.general_plugins": {"omni_on_cpu_pipelines": "tests.omni.cpu.register:register"},
}


def write_distribution(folder: Path) -> Path:
    """Returns the folder, which is to be on PYTHONPATH."""
    dist_info = folder / "vllm_omni_on_cpu-0.dist-info"
    dist_info.mkdir(parents=True, exist_ok=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni-on-cpu\nVersion: 0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {function}\n" for name, function in plugins.items())
        for group, plugins in PLUGINS.items()
    ]
    (dist_info / "entry_points.txt").write_text("\n".join(groups))
    return folder
