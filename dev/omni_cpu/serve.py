"""`python -m dev.omni_cpu.serve serve MODEL --omni …`: vLLM-Omni's command `vllm`, for the pipelines of this folder.

It needs the variables of `distribution.environment`.
"""

from __future__ import annotations

from dev.omni_cpu import forkserver
from dev.omni_cpu.without_torchaudio import stand_in_for_torchaudio


def main() -> None:
    forkserver.start()
    stand_in_for_torchaudio()
    import vllm_omni.entrypoints.async_omni  # noqa: F401  while the fork server imports it, too
    from vllm_omni.entrypoints.cli.main import main as vllm
    from vllm_omni.plugins import load_omni_general_plugins

    forkserver.use_for_stages()
    load_omni_general_plugins()  # the command looks for the pipeline before it loads the plugin that registers it
    vllm()


if __name__ == "__main__":
    main()
