"""Whether two runs answered the same."""

from __future__ import annotations

from typing import Any

# Tokens are compared exactly. A hidden state depends in its last bits on what else was in the batch, which is a matter
# of timing.
TOLERANCE = 1e-4


def first_difference(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """Between answers by request, as `asking.answer_to` gives them; None if there is none."""
    if expected.keys() != found.keys():
        return f"answered were {sorted(expected)} and {sorted(found)}"
    for request, answer in expected.items():
        if difference := _difference(answer, found[request]):
            return f"{request!r}: {difference}"
    return None


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    if expected["text"] != found["text"]:
        return f"text {expected['text']} and {found['text']}"
    sound, other = expected.get("sound", []), found.get("sound", [])
    if len(sound) != len(other):
        return f"{len(sound)} and {len(other)} samples"
    for number, (sample, other_sample) in enumerate(zip(sound, other, strict=True)):
        if abs(sample - other_sample) > TOLERANCE:
            return f"sample {number} is {sample} and {other_sample}"
    return None
