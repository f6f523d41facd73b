"""Build a cluster that can run from a scenario."""
