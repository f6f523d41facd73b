"""What `benchmarks.tiers` counts, and what it makes of it."""

import io
import json

from rich.console import Console

from benchmarks.tiers import BLOCKING, FAILING, TIERS, VARIANTS, __main__


def test_nothing_is_refused_but_without_tiers_and_without_waiting(tmp_path):
    """Put 16 MB of messages into an arena of 4 MB; of this real run only what does not depend on time is checked."""
    quick = ["--arena-mib", "4", "--message-mib", "0.25", "--pace-ms", "0.1", "--starts-after-ms", "50"]
    __main__.main(["--rounds", "2", *quick, "--disk", str(tmp_path), "--out", str(tmp_path)])
    found = json.loads((tmp_path / "tiers.json").read_text())
    of = {(one["variant"], one["measure"]): one for one in found["results"]}
    assert {variant for variant, _ in of} == set(VARIANTS)
    assert of[FAILING, "refused"]["least"] > 0
    assert [of[variant, "refused"]["most"] for variant in (BLOCKING, TIERS)] == [0, 0]
    assert of[FAILING, "bytes on disk after the burst"]["most"] == of[BLOCKING, "moved down"]["most"] == 0
    assert of[TIERS, "bytes on disk after the burst"]["least"] > 0
    assert "blocking_over_it" in of[TIERS, "burst"]
    assert "blocking_over_it" not in of[FAILING, "burst"]


def test_blocking_over_it_is_of_the_same_round():
    rounds = {FAILING: [1, 1], BLOCKING: [8, 6], TIERS: [2, 3]}
    samples = {variant: [{"burst": float(one), "refused": 0.0} for one in own] for variant, own in rounds.items()}
    records = __main__.record(samples)
    of = {(one["variant"], one["measure"]): one for one in records}
    assert of[TIERS, "burst"]["blocking_over_it"] == 3.0
    assert "blocking_over_it" not in of[TIERS, "refused"]
    console = Console(file=io.StringIO(), width=120)
    console.print(__main__.table(records))
    assert "(×3)" in console.file.getvalue()
