import pytest

from vllm_omni_sched.connectors.arena.extents import Extents
from vllm_omni_sched.connectors.edge import Edge, name_of
from vllm_omni_sched.connectors.mooncake.store import LINK_BYTES, Names, link_key, make_link, own_key, read_link


def test_every_message_has_keys_of_its_own() -> None:
    names = Names("a")
    keys = [names.plain(name_of(edge, key)) for edge in (Edge("0", "1"), Edge("1", "0")) for key in ("k", "k/link", "")]
    keys += [
        link_key(keys[0]),
        own_key(keys[0], 1),
        own_key(keys[0], 2),
        names.beacon(1, 1),
        names.beacon(1, 2),
        names.beacon(2, 1),
    ]
    keys.append(Names("b").plain(name_of(Edge("0", "1"), "k")))
    assert len(set(keys)) == len(keys)
    assert all(len(key) < 128 and key.isascii() for key in keys)


@pytest.mark.parametrize("generation", [0, 1, 2**64 - 1])
def test_a_link_leads_where_it_was_made_for(generation: int) -> None:
    link = make_link(generation)
    assert len(link) == LINK_BYTES
    assert read_link(link) == generation


def test_a_link_that_is_half_written_leads_nowhere() -> None:
    old, new = make_link(1), make_link(2**40)
    for cut in range(1, LINK_BYTES):
        mixed = new[:cut] + old[cut:]
        assert mixed in (old, new) or read_link(mixed) is None
    assert read_link(old[:-1]) is None


def test_what_is_trimmed_can_be_given_out_again() -> None:
    extents = Extents(64, 640)
    assert extents.allocate(640) == 0
    extents.trim(0, 100)
    assert (extents.used_bytes, extents.largest_free_bytes) == (128, 512)
    assert extents.allocate(512) == 128
    extents.trim(0, 128)
    assert extents.free(0) == 128
    assert extents.free(128) == 512
    assert (extents.used_bytes, extents.largest_free_bytes) == (0, 640)
