"""Arrangements of the items of a prompt, by name; `tests/engine/harness/gather.py` makes items in each."""

ARRANGEMENTS = ("in order", "nested", "same span", "unsorted", "unsorted and nested")
