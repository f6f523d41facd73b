"""Do two runs of a scenario say the same?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LOGPROB_TOLERANCE = 1e-4
"""Other requests in a step change the order in which a matrix product is summed up (seen: 3e-6); a wrong item, 1e-1."""


def first_difference(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """Compare two runs' answers, `{request id: Heard as a dictionary}`. None: the same tokens, and as probable."""
    if missing := expected.keys() ^ got.keys():
        return f"not in both runs: {sorted(missing)}"
    for id_, one in expected.items():
        if found := _difference_of_answers(one, got[id_]):
            return f"{id_}: {found}"
    return None


def _difference_of_answers(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    if one["finish_reason"] != other["finish_reason"]:
        return f"finished by {one['finish_reason']!r}, and by {other['finish_reason']!r}"
    for i, (token, other_token) in enumerate(zip(one["tokens"], other["tokens"], strict=False)):
        if token != other_token:
            return f"token {i} of {len(one['tokens'])} is {token}, and {other_token}"
    if len(one["tokens"]) != len(other["tokens"]):
        return f"{len(one['tokens'])} tokens, and {len(other['tokens'])}"
    for i, (logprob, other_logprob) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
        if abs(logprob - other_logprob) > LOGPROB_TOLERANCE:
            return f"log probability of token {i} is {logprob}, and {other_logprob}"
    return None


def first_different_step(expected: list[str], got: list[str]) -> str | None:
    """Compare decisions, as `Observer.steps` tells them."""
    for i, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return f"step {i}:\n  stock: {one}\n  ours:  {other}"
    if len(expected) != len(got):
        return f"{len(expected)} steps, and {len(got)}"
    return None
