"""Decide how to recover a replica that died, and its requests."""
