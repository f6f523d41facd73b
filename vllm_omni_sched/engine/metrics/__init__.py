"""The way of the scheduler's metrics from the engine-core process to vLLM's own ``/metrics``."""
