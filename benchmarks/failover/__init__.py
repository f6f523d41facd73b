"""Measure how soon a replica serves again after a fault, whether all requests are answered, and what preload gains."""

from __future__ import annotations
