"""Policies that the core of a pipeline asks: which request a stage starts next, and on which replica."""
