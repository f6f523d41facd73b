"""How fast the simulator is from 10 to 10,000 GPUs, and what the policies cost in it."""
