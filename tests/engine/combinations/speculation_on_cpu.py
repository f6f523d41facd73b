"""Speculation on the CPU: vLLM 0.30 has kernels for it without Triton, and puts some of them where it no longer looks.

vLLM replaces the Triton kernels of a module by name, but calls them through an object of the module that has kept the
Triton kernel. Here that object gets the same replacement. Later versions do so themselves.
"""

from __future__ import annotations

from importlib import import_module

KERNELS = {
    "vllm.v1.sample.rejection_sampler": {"_rejection_greedy_sample": "rejection_greedy_sample_kernel"},
    "vllm.v1.spec_decode.utils": {"_eagle_step_slot_mapping_metadata": "eagle_step_slot_mapping_metadata_kernel"},
}


def speculate_on_cpu() -> None:
    """Let the engines of this process verify and make drafts without Triton."""
    replacements = import_module("vllm.utils.cpu_triton_utils")
    for module, names in KERNELS.items():
        for caller, kernel in names.items():
            if hasattr(replacements, kernel):
                getattr(import_module(module), caller).kernel = getattr(replacements, kernel)
