"""Start pipelines of vLLM-Omni in processes of their own, and bring back what they answered."""
