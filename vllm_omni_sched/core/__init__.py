"""State machines that make every scheduling decision; drivers for vLLM, vLLM-Omni and the simulator carry them out."""
