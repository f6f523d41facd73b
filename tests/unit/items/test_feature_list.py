"""FeatureList as a table of its rules, by example; tests/properties has the general case."""

import pickle
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from vllm_omni_sched.items import FeatureList, SpillFile


@dataclass(frozen=True)
class Item:
    data: str | None
    mm_position: SimpleNamespace


def item(offset: int, length: int = 1) -> Item:
    return Item(f"data{offset}", SimpleNamespace(offset=offset, length=length))


def strip(feature: Item) -> Item:
    return replace(feature, data=None)


def held(features: list[Item]) -> list[int]:
    return [i for i, feature in enumerate(features) if feature.data is not None]


def test_only_what_changed_is_touched():
    features = FeatureList(item(i) for i in range(10_000))
    features.as_sent(9_999, strip)
    before = features.items_touched
    features.append(item(10_000))
    assert held(features.as_sent(10_000, strip)) == [10_000]
    assert features.items_touched - before == 1


def test_released_data_leaves_memory_and_comes_back():
    features, spill = FeatureList(item(i) for i in range(100)), SpillFile(None, 1 << 20)
    features.as_sent(90, strip)
    assert features.release_committed(64, spill, strip) == 90
    assert held(features) == list(range(90, 100))
    assert features.with_data(3).data == "data3"
    assert features[3].data is None
    assert [f.data for f in features.as_sent(0, strip)] == [f"data{i}" for i in range(100)]
    assert held(features) == list(range(100))
    features.close()


def test_fewer_than_a_batch_stay():
    features = FeatureList(item(i) for i in range(100))
    features.as_sent(63, strip)
    assert features.release_committed(64, SpillFile(None, 1 << 20), strip) == 0


def test_a_full_spill_file_keeps_data_in_memory():
    features = FeatureList(item(i) for i in range(100))
    features.as_sent(100, strip)
    assert features.release_committed(64, SpillFile(None, 16), strip) == 0
    assert held(features) == list(range(100))


def test_a_spill_file_that_cannot_be_made_says_so_and_loses_nothing(tmp_path):
    features = FeatureList(item(i) for i in range(100))
    features.as_sent(100, strip)
    with pytest.raises(OSError, match="No such file"):
        features.release_committed(64, SpillFile(str(tmp_path / "gone"), 1 << 20), strip)
    assert held(features) == list(range(100))


def test_another_process_gets_a_plain_list():
    features = FeatureList([item(0), item(1)])
    copy = pickle.loads(pickle.dumps(features))
    assert type(copy) is list
    assert [f.data for f in copy] == ["data0", "data1"]
