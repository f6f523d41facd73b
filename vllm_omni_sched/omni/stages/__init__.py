"""Schedule the stages of a vLLM-Omni pipeline: our policies behind its orchestrator and its stage pools."""
