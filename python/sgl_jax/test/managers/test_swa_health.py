"""Health of the window pool in numbers: tombstoned and healed tokens, FULL hits that the window cut short, lag and locks."""

from __future__ import annotations

import pytest

from sgl_jax.srt.managers.prometheus_metrics import COUNTERS, GAUGES
from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.test.managers.world import CACHES, World, make_world, prompt


def counters(world: World) -> dict[str, int]:
    return {
        name: sum(values) for name, values in world.scheduler.heartbeat().stats["counters"].items() if values
    }


def full_hit(world: World, tokens: list[int]) -> int:
    key = RadixKey(tokens[:-1], None, 0)
    return len(
        world.scheduler.memory.cache.match_prefix(MatchPrefixParams(key, full_only=True)).device_indices
    )


def with_lost_windows(cache: str, page: int, **setup) -> World:
    """A long prompt and its continuation are cached; then all windows but the last are evicted (legacy nodes are not cut)."""
    world = make_world(cache=cache, page=page, window=4 * page, chunk=None, **setup)
    world.submit("first", prompt(20 * page + 1), 1)
    world.run()
    world.submit("longer", prompt(20 * page) + [900 + i for i in range(12 * page)], 1)
    world.run()
    lost = 28 * page if cache == "unified" else 20 * page
    world.scheduler.memory.cache.evict(EvictParams(swa_num_tokens=lost, dp_rank=0))
    return world


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("cache", ["unified", "legacy"])
def test_tombstones_and_heals_count_tokens(cache, page):
    """What was tombstoned and not healed is what FULL holds beyond SWA; a tombstone of 20 pages is not one."""
    world = with_lost_windows(cache, page, full_pages=200, swa_pages=200)
    lost = counters(world)
    assert lost["tombstoned_tokens_total"] >= 20 * page > lost["tombstone_created_total"] > 0
    assert lost["healed_tokens_total"] == 0 and lost["swa_evicted_tokens_total"] >= 20 * page
    world.submit("back", prompt(20 * page + 1), 1)
    world.run()
    healed = counters(world)
    assert healed["healed_tokens_total"] >= page
    tree = world.control("ledger").data["ranks"][0]
    assert (
        healed["tombstoned_tokens_total"] - healed["healed_tokens_total"]
        == tree["full_tree_evictable"] - tree["swa_tree_evictable"]
    )


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("cache", ["unified", "legacy"])
def test_a_full_hit_that_the_window_cut_short_counts_once(cache, page):
    """The tokens between the FULL hit and the accepted one, at the first admission only, however often it was looked for."""
    world = with_lost_windows(
        cache, page, full_pages=200, swa_pages=200, seats=1, policy="lpm", overlap=False
    )
    before = counters(world)["full_hit_swa_short_tokens_total"]
    wanted = prompt(16 * page) + [700 + i for i in range(5)]
    reach = full_hit(world, wanted)
    assert reach == 16 * page
    world.submit("busy", prompt(5, first=500), 9)
    world.step()
    world.submit("short", wanted, 6)
    world.submit("other", prompt(5, first=400), 1)
    world.step(4)
    assert (
        counters(world)["full_hit_swa_short_tokens_total"] == before
    )  # matched again and again, not admitted
    while world.req("short").admitted_at is None:
        world.step()
    cut = reach - world.req("short").cached_tokens
    assert cut > 0 and counters(world)["full_hit_swa_short_tokens_total"] == before + cut
    world.step(2)
    world.control("pause", mode="retract")
    world.control("continue")
    world.run()
    assert counters(world)["full_hit_swa_short_tokens_total"] == before + cut
    assert world.outputs["short"] == world.expected("short", 6)


def test_a_hit_that_the_window_allows_is_not_short():
    world = make_world(full_pages=200, swa_pages=200)
    for rid in ("a", "b"):
        world.submit(rid, prompt(30), 3)
        world.run()
    assert world.ends["b"][0].cached_tokens == 29
    assert counters(world)["full_hit_swa_short_tokens_total"] == 0


@pytest.mark.parametrize("cache", ["plain", "plain_radix", "plain_chunk"])
def test_models_with_one_pool_count_their_evictions(cache):
    world = make_world(cache=cache, page=4, full_pages=20, dp=2)
    for i in range(8):
        world.submit(f"r{i}", prompt(24, first=3 + 40 * i), 3, dp_rank=0)
        world.run()
    evicted = world.scheduler.heartbeat().stats["counters"]["evicted_tokens_total"]
    assert evicted[1] == 0 and (evicted[0] > 0) == (cache != "plain_chunk") and evicted[0] % 4 == 0
    assert not any("swa" in name or "tomb" in name for name in world.scheduler.heartbeat().stats["counters"])
    if cache != "plain_chunk":
        held = world.scheduler.memory.evictable(0).full
        assert evicted[0] == 8 * 24 - held


@pytest.mark.parametrize("cache", CACHES)
def test_lag_and_locks_are_gauges(cache):
    """Locks: the windows that running requests hold in the tree. Lag: what the next reclaim gives back; both 0 when idle."""
    world = make_world(cache=cache, page=4, window=8, chunk=64, full_pages=200, swa_pages=200, overlap=False)
    world.submit("a", prompt(40), 60)
    seen = []
    while world.scheduler.step():
        gauges = world.scheduler.stats.rank_gauges(0)
        assert gauges["swa_lock_held_tokens"] == world.scheduler.memory.protected(0).swa
        seen.append((gauges["swa_lock_held_tokens"], gauges["reclaim_lag_tokens"]))
    assert max(lag for _, lag in seen) >= 4 and seen[-1] == (0, 0)
    assert (max(held for held, _ in seen) > 0) == (cache != "chunk")


def test_every_number_of_a_heartbeat_has_its_help_text():
    """No metric goes out as 'Scheduler counter'; the per-rank gauges likewise."""
    for cache in ("unified", "plain_radix"):
        stats = make_world(cache=cache).scheduler.heartbeat().stats
        names = {name if name.endswith("_total") else name + "_total" for name in stats["counters"]}
        assert names - set(COUNTERS) == set()
        assert set(stats["ranks"][0]) - set(GAUGES) == set()
