"""The stages of a vLLM-Omni pipeline, scheduled: our policies behind its orchestrator and its stage pools."""
