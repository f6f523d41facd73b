"""What one step costs as a request gathers items: real scheduler classes of several vLLM versions, and ours."""
