"""Devices of the stages: where they start, and replicas that move while requests run."""
