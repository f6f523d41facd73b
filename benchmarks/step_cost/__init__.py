"""What one step of the scheduler costs as a request gathers items: real scheduler classes of several vLLM versions, and ours."""
