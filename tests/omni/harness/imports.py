"""Imports all that a front end of vLLM-Omni and its stages begin with, in the server that they are forked from.

The plugins of these programs have to be named when it is imported: vLLM chooses its platform then.
"""

from __future__ import annotations

from dev.omni_cpu.without_torchaudio import stand_in_for_torchaudio

stand_in_for_torchaudio()

from importlib import import_module  # noqa: E402  before vLLM-Omni is imported

from dev.omni_cpu.forkserver import LAST, PRELOAD  # noqa: E402

for _module in (
    "vllm_omni.entrypoints.async_omni",
    "vllm_omni.entrypoints.cli.main",
    "vllm_omni.entrypoints.cli.serve",
    "vllm_omni.engine.stage_runtime",
    "vllm_omni.engine.membership_controller",
    *PRELOAD,
    "tests.omni.harness.connectors",
    LAST,
):
    import_module(_module)
