"""Entry points without an installation: a distribution that is metadata only, found on PYTHONPATH by every process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLATFORM, GENERAL = "vllm_omni.platform_plugins", "vllm.general_plugins"

OUR_PLUGIN = "omni_sched"
VLLM_OMNI_PLUGIN = "vllm_omni_register_models"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_HOST_IP": "127.0.0.1",
    # one thread a stage: they share the machine, and sums are added up in one order
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # a payload that is lost fails its request instead of parking it for ten minutes; a stage that died is back before
    "VLLM_OMNI_INPUT_WAIT_TIMEOUT_S": "100",
}


def environment(folder: Path, plugins: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of processes that run pipelines.

    Args:
        folder: the distribution is written to it.
        plugins: what else every process is to load, `module:function` by name.
    """
    groups = {
        PLATFORM: {"omni_on_cpu": "dev.omni_cpu.platform:qualified_name"},
        GENERAL: {"omni_on_cpu_pipelines": "dev.omni_cpu.register:register", **plugins},
    }
    names = [*(name for group in groups.values() for name in group), OUR_PLUGIN, VLLM_OMNI_PLUGIN]
    paths = [ROOT, _write_distribution(folder, groups), *filter(None, [os.environ.get("PYTHONPATH")])]
    return ENVIRONMENT | {"VLLM_PLUGINS": ",".join(names), "PYTHONPATH": os.pathsep.join(map(str, paths))}


def _write_distribution(folder: Path, groups: Mapping[str, Mapping[str, str]]) -> Path:
    dist_info = folder / "vllm_omni_on_cpu-0.dist-info"
    dist_info.mkdir(parents=True, exist_ok=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni-on-cpu\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {function}\n" for name, function in plugins.items())
        for group, plugins in groups.items()
    ]
    (dist_info / "entry_points.txt").write_text("\n".join(lines))
    return folder
