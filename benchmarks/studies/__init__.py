"""Studies of the simulator: what `vllm-omni-sched simulate` runs, and `plot`, which draws its results."""
