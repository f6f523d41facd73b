"""Spare programs of the test suite a process for each class of models that vLLM meets."""

from __future__ import annotations


def look_at_models_here() -> None:
    """Let vLLM look at a model's class in this process.

    It would start another one, which imports vLLM for ten seconds, so that this one does not initialise CUDA. What it
    finds it keeps in a folder of the user, for one version of vLLM at a time.
    """
    from vllm.model_executor.models import registry

    assert callable(registry._run_in_subprocess)
    registry._run_in_subprocess = lambda look: look()
