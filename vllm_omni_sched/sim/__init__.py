"""Simulate the policies on a modelled cluster with discrete events."""
