"""The candidate index: oldest first under arbitrary ages, additions, removals and re-filing."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sgl_jax.srt.mem_cache.radix_tree.lru import LruIndex, get_and_increase_time_counter


@dataclass(eq=False)
class Item:
    id: int
    age: float
    end: int | None = None


def index(*items: Item) -> LruIndex:
    made = LruIndex(lambda item: item.age)
    for item in items:
        made.add(item)
    return made


def test_ticks_increase() -> None:
    assert get_and_increase_time_counter() < get_and_increase_time_counter()


def test_oldest_first_whatever_the_order_of_arrival() -> None:
    a, b, c = Item(1, 3.0), Item(2, 1.0), Item(3, 2.0)
    lru = index(a, b, c)
    assert len(lru) == 3 and set(lru) == {a, b, c}
    taken = []
    while (item := lru.oldest()) is not None:
        taken.append(item.id)
        lru.discard(item)
    assert taken == [2, 3, 1] and a not in lru


def test_equal_ages_leave_the_far_end_first() -> None:
    lru = index(Item(1, 5.0, end=8), Item(2, 5.0, end=4))
    assert lru.oldest().id == 2


def test_adding_twice_and_discarding_a_stranger_change_nothing() -> None:
    a = Item(1, 1.0)
    lru = index(a, a)
    lru.discard(Item(9, 1.0))
    lru.refile(Item(9, 1.0))
    assert len(lru) == 1 and list(lru) == [a]


def test_refiling_moves_in_both_directions() -> None:
    a, b, c = Item(1, 1.0), Item(2, 2.0), Item(3, 3.0)
    lru = index(a, b, c)
    a.age = 9.0
    lru.refile(a)
    assert lru.oldest() is b
    c.age = 0.5
    lru.refile(c)
    assert lru.oldest() is c


def test_it_agrees_with_sorting() -> None:
    """Random traffic against a sorted list; the heap of late arrivals stays bounded by what is in it."""
    rnd = random.Random(7)
    items = [Item(i, 0.0, end=i) for i in range(40)]
    lru, members = LruIndex(lambda item: item.age), set()
    for step in range(4000):
        item = rnd.choice(items)
        action = rnd.random()
        if action < 0.4 and item not in members:
            item.age = float(step if rnd.random() < 0.6 else rnd.randrange(step + 1))
            lru.add(item)
            members.add(item)
        elif action < 0.6:
            lru.discard(item)
            members.discard(item)
        elif item in members:
            item.age = float(step if rnd.random() < 0.5 else rnd.randrange(step + 1))
            lru.refile(item)
        expected = min(members, key=lambda m: (m.age, m.end, m.id), default=None)
        assert lru.oldest() is expected
        assert set(lru) == members and len(lru) == len(members)
    assert len(lru._late) <= 2 * len(lru._late_place) + 64
