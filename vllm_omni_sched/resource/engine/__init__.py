"""Policies that the core of one engine asks: what a step encodes and prefills, and what stays in memory."""
