"""The cache of compressed buffers: bounded, least recently used first, read-only."""

import threading

import numpy as np
import pytest

from vllm_omni_sched.connectors.compression.compressor import CacheCounts, CompressionCache, content_digest


def key(name):
    return content_digest(np.frombuffer(name.encode(), np.uint8)), "uint8", (1,), "ids"


def data(size, fill=0):
    return np.full(size, fill, np.uint8)


def test_hits_and_misses():
    cache = CompressionCache(100)
    assert cache.get(key("a")) is None
    cache.put(key("a"), data(10, 7))
    for _ in range(3):
        assert (cache.get(key("a")) == 7).all()
    assert cache.counts() == CacheCounts(hits=3, misses=1, num_entries=1, num_bytes=10)


def test_the_least_recently_used_goes_and_the_bound_holds():
    cache = CompressionCache(30)
    for name in "abc":
        cache.put(key(name), data(10))
    cache.get(key("a"))
    cache.put(key("d"), data(15))
    assert [name for name in "abcd" if cache.get(key(name)) is not None] == ["a", "d"]
    assert cache.counts().num_bytes == 25
    cache.put(key("e"), data(31))
    assert cache.get(key("e")) is None
    assert cache.counts().num_entries == 2


def test_putting_again_replaces():
    cache = CompressionCache(30)
    cache.put(key("a"), data(10, 1))
    cache.put(key("a"), data(20, 2))
    assert cache.counts().num_bytes == 20
    assert cache.get(key("a"))[0] == 2


def test_nothing_can_be_changed_in_it():
    cache = CompressionCache(30)
    cache.put(key("a"), data(10))
    with pytest.raises(ValueError, match="read-only"):
        cache.get(key("a"))[0] = 1


def test_keys_differ_by_content_type_shape_and_codec():
    cache = CompressionCache(1000)
    digest, dtype, shape, codec = key("a")
    keys = [(digest, dtype, shape, codec), (digest, "int8", shape, codec), (digest, dtype, (1, 1), codec)]
    keys += [(digest, dtype, shape, "flac"), key("b"), (content_digest(data(0), "a"), dtype, shape, codec)]
    for number, one in enumerate(keys):
        cache.put(one, data(1, number))
    assert [int(cache.get(one)[0]) for one in keys] == list(range(len(keys)))


def test_a_negative_bound():
    with pytest.raises(ValueError, match="max_bytes"):
        CompressionCache(-1)


def test_several_threads():
    cache = CompressionCache(64)

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(300):
            number = int(rng.integers(0, 12))
            found = cache.get(key(str(number)))
            assert found is None or (found == number).all()
            cache.put(key(str(number)), data(int(rng.integers(1, 12)), number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = cache.counts()
    assert counts.hits + counts.misses == 1200
    assert 0 < counts.num_bytes <= 64
    assert counts.num_bytes == sum(one.nbytes for one in cache._entries.values())
