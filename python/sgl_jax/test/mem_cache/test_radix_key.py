"""RadixKey against a list model: slicing, comparing, namespaces, growth, bigrams, compaction."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey, TokenBuffer, get_child_key, packed_child_key
from sgl_jax.test.counting import count_calls

INT32 = st.integers(-(2**31), 2**31 - 1)
TOKENS = st.lists(st.integers(0, 3), max_size=40)


def examples(count: int) -> settings:
    """So many, however slow the machine is."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def common(a, b) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@pytest.mark.parametrize(
    "source",
    [
        [3, 1, 2],
        (3, 1, 2),
        np.array([3, 1, 2], np.int32),
        np.array([3, 1, 2], np.int64),
        np.array([3, 9, 1, 9, 2], np.int32)[::2],
    ],
)
def test_any_sequence_of_ids(source):
    key = RadixKey(source, "extra", 1)
    assert len(key) == 3 and list(key) == key.token_ids == [3, 1, 2]
    assert (key.extra_key, key.dp_rank) == ("extra", 1)


@pytest.mark.parametrize("bad", [[2**31], [-(2**31) - 1]])
def test_ids_outside_int32_are_refused(bad):
    with pytest.raises(OverflowError):
        RadixKey(bad)
    with pytest.raises(OverflowError):
        TokenBuffer([1]).extend(bad)
    for dtype in (np.int64, object):
        with pytest.raises(OverflowError):
            RadixKey(np.array(bad, dtype))
        with pytest.raises(OverflowError):
            TokenBuffer().extend(np.array(bad, dtype))


def test_a_key_does_not_follow_later_changes_of_its_source():
    source = np.array([1, 2, 3], np.int32)
    key = RadixKey(source)
    source[:] = 9
    assert list(key) == [1, 2, 3]


@given(st.lists(INT32, max_size=30), st.data())
@examples(150)
def test_slices_behave_like_list_slices(ids, data):
    key = RadixKey(ids, "x", 0)
    bound = st.one_of(st.none(), st.integers(-35, 35))
    sl = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, -1, -3])))
    part = key[sl]
    assert list(part) == ids[sl] and len(part) == len(ids[sl]) and (part.extra_key, part.dp_rank) == ("x", 0)
    again = part[1:]
    assert list(again) == ids[sl][1:]
    if ids:
        i = data.draw(st.integers(-len(ids), len(ids) - 1))
        one = key[i]
        assert isinstance(one, RadixKey) and list(one) == [ids[i]] and one.extra_key == "x"


@pytest.mark.parametrize("index", [3, -4, 100])
def test_an_index_out_of_range_raises(index):
    with pytest.raises(IndexError, match="out of range for length 3"):
        RadixKey([1, 2, 3])[index]


@given(TOKENS, TOKENS, st.integers(0, 10), st.integers(0, 10))
@examples(300)
def test_match_len_and_startswith_at_any_offset(a, b, i, j):
    x, y = RadixKey(a)[i:], RadixKey(b)[j:]
    expected = common(a[i:], b[j:])
    assert x.match_len(y) == y.match_len(x) == expected
    assert x.startswith(y) is (a[i : i + len(b[j:])] == b[j:])
    assert x.startswith(y.compact()) is x.startswith(y)
    assert (x == y) is (a[i:] == b[j:])
    if x == y:
        assert hash(x) == hash(y)


@given(TOKENS, st.integers(0, 40), st.integers(0, 40))
@examples(150)
def test_a_prefix_is_found_and_one_changed_id_is_located(ids, cut, at):
    key = RadixKey(ids)
    assert key.startswith(key[:cut]) and key.match_len(key[:cut]) == min(cut, len(ids))
    if ids:
        at %= len(ids)
        changed = list(ids)
        changed[at] += 100
        assert key.match_len(RadixKey(changed)) == at
        assert not key.startswith(RadixKey(changed)[: at + 1])


def test_matching_ignores_namespaces_and_equality_does_not():
    a, b, c = RadixKey([1, 2]), RadixKey([1, 2], "lora"), RadixKey([1, 2], None, 1)
    assert a.match_len(b) == a.match_len(c) == 2
    assert len({a, b, c, RadixKey([1, 2])}) == 3 and a != b and a != c and a != [1, 2]


# -- growing buffers ------------------------------------------------------------------------------------------------------


def test_keys_of_a_growing_buffer_stay_what_they_were():
    buffer = TokenBuffer([1, 2, 3])
    early = buffer.key(3, "x", 1)
    part = early[1:]
    buffer.extend([4] * 5000)
    buffer.extend(np.array([5], np.int64))
    assert len(buffer) == 5004 and list(early) == [1, 2, 3] and list(part) == [2, 3]
    assert early == RadixKey([1, 2, 3], "x", 1) and hash(early) == hash(RadixKey([1, 2, 3], "x", 1))
    late = buffer.key(5004)
    assert late.match_len(early) == 3 and late.startswith(early) and list(late[5003]) == [5]
    assert late.startswith(RadixKey([1, 2, 3])) and not early.startswith(late)
    assert RadixKey([1, 2, 3, 4]).startswith(early) and RadixKey([1, 2, 3]).match_len(late) == 3
    buffer.extend([6])  # no exported view is left that would forbid growing
    with pytest.raises(ValueError, match="key length 6000 exceeds the 5005"):
        buffer.key(6000)
    assert list(TokenBuffer().key(0)) == []


@given(st.lists(TOKENS, max_size=6))
@examples(60)
def test_a_buffer_equals_the_concatenated_list(parts):
    buffer, flat = TokenBuffer(), []
    keys = []
    for part in parts:
        buffer.extend(part)
        flat += part
        keys.append((buffer.key(len(flat)), list(flat)))
    for key, expected in keys:
        assert list(key) == expected and key == RadixKey(expected)


def test_a_buffer_key_may_be_made_of_a_shorter_prefix():
    buffer = TokenBuffer([1, 2, 3, 4])
    key = buffer.key(2)
    assert key == RadixKey([1, 2]) and key.compact() == key and not key.startswith(buffer.key(3))


# -- compaction -----------------------------------------------------------------------------------------------------------


def test_compact_holds_its_own_bytes_only():
    """D81: a node's key must not keep the request's 100k tokens alive."""
    buffer = TokenBuffer(list(range(100_000)))
    key = buffer.key(100_000)[500:628].compact()
    assert len(key._buf) == 128 * 4 and isinstance(key._buf, bytes) and list(key) == list(range(500, 628))
    again = key.compact()
    assert again._buf is key._buf and again == key
    sliced = RadixKey(list(range(1000)))[10:20].compact()
    assert len(sliced._buf) == 40


def test_slicing_copies_nothing():
    key = RadixKey(list(range(1000)))
    assert key[100:200][50:]._buf is key._buf and key[7]._buf is key._buf


# -- bigrams --------------------------------------------------------------------------------------------------------------


@given(TOKENS, TOKENS, st.integers(0, 5))
@examples(150)
def test_bigram_keys_count_positions(a, b, i):
    x, y = list(itertools.pairwise(a)), list(itertools.pairwise(b))
    kx, ky = RadixKey(x), RadixKey(y)
    assert list(kx) == x and len(kx) == len(x) and list(kx[i:]) == x[i:]
    assert kx.match_len(ky) == common(x, y)
    assert kx[i:].match_len(ky[i:]) == common(x[i:], y[i:])
    assert kx.startswith(kx[:i])


def test_bigrams_and_single_ids_never_match():
    single, double = RadixKey([1, 2, 1, 2]), RadixKey([(1, 2), (1, 2)])
    assert single.match_len(double) == 0 and not single.startswith(double) and single != double
    assert double.compact() == double and list(double[1]) == [(1, 2)]


def test_an_empty_key_is_a_prefix_of_every_key_and_equal_to_every_empty_key():
    empty = RadixKey([])
    for key in (RadixKey([1, 2]), RadixKey([(1, 2)]), empty, RadixKey([(1, 2)])[:0]):
        assert key.startswith(empty) and key.match_len(empty) == empty.match_len(key) == 0
        assert key[:0] == empty and hash(key[:0]) == hash(empty) and list(key[:0]) == []


# -- child keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra,rank,page,expected",
    [
        (None, None, 1, 7),
        (None, None, 2, (7, 8)),
        ("a", None, 1, ("a", 7)),
        ("a", None, 2, ("a", (7, 8))),
        (None, 0, 1, (0, 7)),
        (None, 1, 3, (1, (7, 8, 9))),
        ("a", 1, 1, (("a", 1), 7)),
        ("a", 0, 2, (("a", 0), (7, 8))),
        (None, None, 8, (7, 8, 9)),
    ],
)
def test_child_keys_of_the_seam(extra, rank, page, expected):
    assert get_child_key(RadixKey([7, 8, 9], extra, rank), page) == expected
    assert get_child_key(RadixKey([6, 7, 8, 9], extra, rank)[1:], page) == expected


def test_child_keys_of_bigrams():
    key = RadixKey([(1, 2), (2, 3)])
    assert get_child_key(key) == (1, 2) and get_child_key(key, 2) == ((1, 2), (2, 3))


@given(TOKENS, TOKENS, st.sampled_from([1, 2, 4]))
@examples(200)
def test_packed_child_keys_agree_with_the_seam(a, b, page):
    """Equal exactly when the first pages and the namespaces are equal."""
    spaces = [(None, None), ("x", None), (None, 0), (None, 1), ("x", 1), ("1", None)]
    keys = [RadixKey(ids, *space) for ids in (a, b) if ids for space in spaces]
    for x in keys:
        for y in keys:
            assert (packed_child_key(x, page) == packed_child_key(y, page)) is (
                get_child_key(x, page) == get_child_key(y, page)
            )


def test_page_bytes_is_one_slice():
    key = RadixKey([9, 1, 2, 3])[1:]
    assert key.page_bytes(2) == np.array([1, 2], "<i4").tobytes()
    assert key.page_bytes(8) == np.array([1, 2, 3], "<i4").tobytes()
    assert RadixKey([]).page_bytes(4) == b""


def test_repr_previews_ten_ids():
    assert repr(RadixKey([1, 2], "a", 0)) == "RadixKey(extra_key='a', dp_rank=0, token_ids=[1, 2])"
    assert repr(RadixKey(range(12))).endswith("token_ids=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...])")


# -- costs ----------------------------------------------------------------------------------------------------------------


def test_matching_makes_few_calls_whatever_the_length():
    """G5-G7: no Python per token."""
    seen = set()
    for n in (64, 65536):
        ids = np.arange(n, dtype=np.int32)
        other = ids.copy()
        other[-1] = -1
        x, y = RadixKey(ids), RadixKey(other)
        seen.add(
            (
                count_calls(lambda x=x, y=y: x.match_len(y)),
                count_calls(lambda x=x: x.startswith(x[:32].compact())),
            )
        )
    assert len(seen) == 1 and max(max(s) for s in seen) < 25
