"""From a scenario to a cluster that can run."""
