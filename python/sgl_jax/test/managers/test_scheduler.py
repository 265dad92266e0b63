"""The whole scheduler over a numpy device: batching, chunks, overlap, ranks, logprobs, policies, refusals."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

from sgl_jax.srt.managers.io_struct import ControlReq, GenerateReq, SamplingParams, ShutdownReq
from sgl_jax.srt.managers.request import WaitReason
from sgl_jax.srt.managers.scheduler import SchedulerOptions
from sgl_jax.srt.mem_cache.errors import LedgerViolationError, UnmappedSlotError
from sgl_jax.test.managers.world import CACHES, VOCAB, World, make_world, prompt

ALL_CACHES = (*CACHES, "plain", "plain_radix", "plain_chunk")


def record_steps(world: World) -> list[tuple[str, list[int], list[int]]]:
    """(mode, rows per rank, tokens per rank) of every launch from now on."""
    steps = []
    launch = world.worker.launch

    def watch(step):
        steps.append(
            (step.mode.name, [r.batch_size for r in step.ranks], [len(r.input_ids) for r in step.ranks])
        )
        return launch(step)

    world.worker.launch = watch
    return steps


# ----------------------------------------------------------------------------------------------------------------- equality
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("cache", ALL_CACHES)
def test_outputs_do_not_depend_on_batching_chunks_overlap_or_reuse(cache, page):
    """Every configuration generates what the device generates for each request alone."""
    prompts = [prompt(5 + 9 * i) for i in range(5)] + [prompt(16), prompt(16), prompt(32)]
    for overlap in (True, False):
        for chunk in (8, None):
            world = make_world(
                cache=cache, page=page, overlap=overlap, chunk=chunk, swa_pages=64, full_pages=128
            )
            for i, tokens in enumerate(prompts):
                world.submit(f"r{i}", tokens, 9, stream=i % 2 == 0)
            world.run()
            for i in range(len(prompts)):
                assert world.outputs[f"r{i}"] == world.expected(f"r{i}", 9)
            world.check_balanced()


@pytest.mark.parametrize("page", [1, 4])
def test_overlap_changes_nothing_but_the_depth(page):
    """Same steps, same hits, same ends; with overlap a step is processed after the next one was launched."""
    logs = []
    for overlap in (True, False):
        world = make_world(page=page, overlap=overlap, eos=frozenset(range(3, 60)))
        steps = record_steps(world)
        world.submit("a", prompt(20), 30)
        assert world.scheduler.step() and len(world.scheduler.pipeline) == (1 if overlap else 0)
        world.run()
        logs.append((world.outputs, [out.finish for out in world.ends["a"]]))
        assert steps[0] == ("EXTEND", [1], [8])
        world.submit("b", [*prompt(20), *world.outputs["a"]], 3)
        world.run()
        logs[-1] += (world.ends["b"][0].cached_tokens,)
    assert logs[0] == logs[1]


def test_tokens_that_outran_the_end_are_dropped():
    """A stop is seen one step late under overlap: the extra token is launched, never reported, its slot returned."""
    world = make_world(overlap=True, page=1)
    world.submit("probe", prompt(6), 4)
    world.run()
    stop = world.outputs["probe"][2]
    world.control("flush_cache")
    steps = record_steps(world)
    world.submit("a", prompt(6), 50, stop_token_ids=[stop])
    world.run()
    assert world.outputs["a"] == world.outputs["probe"][:3]
    assert world.ends["a"][0].finish.matched == stop
    assert [mode for mode, *_ in steps] == ["EXTEND", "DECODE", "DECODE", "DECODE"]
    world.check_balanced()


# ----------------------------------------------------------------------------------------------------------------- batching
def test_requests_join_and_leave_a_running_batch():
    world = make_world(overlap=False)
    steps = record_steps(world)
    world.submit("a", prompt(4), 6)
    world.step(2)
    world.submit("b", prompt(5), 2)
    world.run()
    assert steps == [
        ("EXTEND", [1], [4]),
        ("DECODE", [1], [1]),
        ("EXTEND", [1], [1]),  # four of b's five tokens are a's prompt
        ("DECODE", [2], [2]),
        ("DECODE", [1], [1]),
        ("DECODE", [1], [1]),
        ("DECODE", [1], [1]),
    ]


def test_prompts_share_a_step_up_to_the_chunk_budget():
    world = make_world(overlap=False, chunk=8)
    steps = record_steps(world)
    world.submit("a", prompt(3), 1)
    world.submit("b", prompt(12, first=100), 1)
    world.submit("c", prompt(4, first=300), 1)
    world.run()
    assert [(mode, rows, tokens) for mode, rows, tokens in steps] == [
        ("EXTEND", [2], [8]),  # a whole, five tokens of b
        ("EXTEND", [2], [8]),  # the rest of b, then one token of c
        ("EXTEND", [1], [3]),
    ]


def test_seats_bound_the_batch_and_say_so():
    world = make_world(seats=2, overlap=False)
    for i in range(3):
        world.submit(f"r{i}", prompt(4, first=3 + 50 * i), 4)
    world.step(2)
    assert world.req("r2").wait_reason is WaitReason.NO_SEAT
    shown = {entry["rid"]: entry for entry in world.control("internal_state").data["requests"]}
    assert shown["r2"]["wait_reason"] == "max_running_requests reached"
    assert shown["r0"]["state"] == "decode"
    world.run()


@pytest.mark.parametrize("overlap", [True, False])
def test_penalties_wait_for_the_history(overlap):
    """A step with penalties is built from complete histories; the others stay overlapped."""
    world = make_world(overlap=overlap)
    histories = []
    launch = world.worker.launch

    def watch(step):
        penalties = step.ranks[0].sampling.penalties
        if penalties is not None:
            histories.append([int((row >= 0).sum()) for row in penalties.output_ids])
        return launch(step)

    world.worker.launch = watch
    world.submit("a", prompt(4), 5, frequency_penalty=0.5)
    world.run()
    assert histories == [[0], [1], [2], [3], [4]]
    assert world.outputs["a"] == world.expected("a", 5)


def test_min_new_tokens_forbids_ends_and_bias_reaches_the_step():
    world = make_world(eos=frozenset({2}), overlap=True)
    seen = []
    launch = world.worker.launch

    def watch(step):
        sampling = step.ranks[0].sampling
        seen.append(
            None
            if sampling.bias_ids is None
            else dict(zip(sampling.bias_ids[0].tolist(), sampling.bias_values[0].tolist()))
        )
        return launch(step)

    world.worker.launch = watch
    world.submit("a", prompt(4), 4, min_new_tokens=2, stop_token_ids=[9], logit_bias={5: 1.5})
    world.run()
    ends = {5: 1.5, 2: float("-inf"), 9: float("-inf")}
    assert seen == [ends, ends, {5: 1.5}, {5: 1.5}]


def test_seeds_are_drawn_once_per_request_and_repeat_with_the_server_seed():
    seeds = []
    for _ in range(2):
        world = make_world()
        world.submit("a", prompt(4), 3)
        world.submit("b", prompt(4), 3, seed=7)
        seeds.append((world.req("a").seed, world.req("b").seed))
        world.run()
    assert seeds[0] == seeds[1] and seeds[0][1] == 7


# ----------------------------------------------------------------------------------------------------------------- logprobs
@pytest.mark.parametrize("chunk", [4, None])
@pytest.mark.parametrize("start", [-1, 0, 1, 5])
def test_logprobs_of_prompt_and_output(start, chunk):
    """Prompt logprobs from ``start`` on, once, with the first output; a warm prefix is matched only up to there."""
    world = make_world(chunk=chunk, overlap=True)
    world.submit("warm", prompt(10), 1)
    world.run()
    world.submit(
        "a", prompt(10), 3, stream=True, return_logprob=True, logprob_start_len=start, top_logprobs_num=2
    )
    world.run()
    outs = [out for out in world.outs if out.rid == "a"]
    assert [len(out.logprobs) for out in outs] == [1, 1, 1]
    assert all(len(out.top_logprobs[0]) == 2 for out in outs)
    if start < 0:
        assert all(out.input_logprobs is None for out in outs)
        return
    values = outs[0].input_logprobs
    assert len(values) == 10 - start and len(outs[0].input_top_logprobs) == 10 - start
    assert (values[0] is None) == (start == 0) and all(value == -1.0 for value in values[1:])
    assert outs[1].input_logprobs is None
    assert outs[0].cached_tokens <= max(0, start - 1)


def test_a_retraction_does_not_repeat_prompt_logprobs():
    world = make_world(chunk=4, window=64, full_pages=200, swa_pages=400)
    world.submit("a", prompt(10), 6, stream=True, return_logprob=True, logprob_start_len=0)
    world.step(2)
    world.control("pause", mode="retract")
    world.control("continue")
    world.step(6)
    world.control("pause", mode="retract")
    world.control("continue")
    world.run()
    outs = [out for out in world.outs if out.rid == "a"]
    sent = [out.input_logprobs for out in outs if out.input_logprobs is not None]
    assert [len(values) for values in sent] == [10]
    assert sum(len(out.logprobs) for out in outs) == 6
    assert world.outputs["a"] == world.expected("a", 6)


# --------------------------------------------------------------------------------------------------------------------- ends
class Letters:
    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(f"<{token}>" for token in token_ids)


@pytest.mark.parametrize("overlap", [True, False])
def test_stop_string_ends_the_request(overlap):
    world = make_world(overlap=overlap, tokenizer=Letters())
    third = world.expected("a", 3)[2] if world.prompts else None
    world.prompts["a"] = prompt(6)
    third = world.expected("a", 3)[2]
    world.submit("a", prompt(6), 50, stop=[f"<{third}>"])
    world.run()
    assert world.outputs["a"] == world.expected("a", 3)
    assert world.ends["a"][0].finish.matched == f"<{third}>"
    world.check_balanced()


@pytest.mark.parametrize(
    ("tokens", "sampling", "says"),
    [
        ([], {}, "input_ids is empty"),
        ([3, VOCAB], {}, f"holds {VOCAB}; valid token ids are 0..{VOCAB - 1}"),
        ([3, -1], {}, "holds -1"),
        (prompt(600), {}, "--context-length"),
        ([3], {"stop": ["x"]}, "--skip-tokenizer-init"),
    ],
)
def test_bad_requests_are_refused_with_value_and_limit(tokens, sampling, says):
    world = make_world()
    world.submit("a", tokens, 3, **sampling)
    (end,) = world.ends["a"]
    assert end.finish.type == "abort" and end.finish.status == 400 and says in end.finish.message
    world.submit("b", prompt(4), 3)
    world.run()
    assert world.outputs["b"] == world.expected("b", 3)


def test_a_rid_in_use_is_refused():
    world = make_world()
    world.submit("a", prompt(4), 5)
    world.submit("a", prompt(5), 5)
    assert "in use" in world.ends["a"][0].finish.message


# ---------------------------------------------------------------------------------------------------------------------- DP
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("page", [1, 4])
def test_ranks_are_isolated(cache, page):
    """The same prompt on both ranks: equal local slots, separate pools; a flush of idle ranks finds each balanced."""
    world = make_world(cache=cache, page=page, dp=2)
    for rank in (0, 1):
        world.submit(f"r{rank}", prompt(20), 6, dp_rank=rank)
    world.step(4)
    rows = [world.scheduler.memory.rows.read(world.req(f"r{rank}").req_pool_idx, 16) for rank in (0, 1)]
    assert np.array_equal(rows[0], rows[1])
    world.abort("r0")
    world.run()
    assert world.outputs["r1"] == world.expected("r1", 6)
    world.check_balanced()


def test_round_robin_and_least_load():
    world = make_world(dp=2, dp_policy="round_robin")
    for i in range(4):
        world.submit(f"r{i}", prompt(4), 2)
    assert [world.req(f"r{i}").dp_rank for i in range(4)] == [0, 1, 0, 1]
    world = make_world(dp=2, dp_policy="min_running_queue")
    world.submit("wish", prompt(4), 2, dp_rank=0)
    for i in range(3):
        world.submit(f"r{i}", prompt(4), 2)
    assert [world.req(f"r{i}").dp_rank for i in range(3)] == [1, 0, 1]


def test_cache_aware_follows_the_prefix_until_the_load_differs_too_much():
    world = make_world(dp=2, seats=4)
    world.submit("seed", prompt(20), 2, dp_rank=1)
    world.run()
    for i in range(12):
        world.submit(f"r{i}", prompt(20), 2)
    ranks = [world.req(f"r{i}").dp_rank for i in range(12)]
    assert ranks[:9] == [1] * 9 and 0 in ranks[9:]
    world.run()
    assert world.ends["r0"][0].cached_tokens > 0


# ----------------------------------------------------------------------------------------------------------------- policies
def test_lpm_prefers_the_longest_cached_prefix():
    world = make_world(policy="lpm", seats=1, overlap=False)
    world.submit("seed", prompt(24), 1)
    world.run()
    world.submit("cold", prompt(10, first=400), 1)
    world.submit("warm", prompt(30), 1)
    world.submit("half", prompt(12), 1)
    world.run()
    order = [out.rid for out in world.outs if out.finish is not None]
    assert order == ["seed", "warm", "half", "cold"]


def test_random_order_is_seeded():
    orders = []
    for _ in range(2):
        world = make_world(policy="random", seats=1)
        for i in range(8):
            world.submit(f"r{i}", prompt(4, first=3 + 50 * i), 1)
        world.run()
        orders.append([out.rid for out in world.outs if out.finish is not None])
    assert orders[0] == orders[1] != sorted(orders[0])


# ------------------------------------------------------------------------------------------------------------------ control
@pytest.mark.parametrize("overlap", [True, False])
def test_pause_in_place_keeps_memory_and_continues(overlap):
    world = make_world(overlap=overlap)
    world.submit("a", prompt(10), 12)
    world.step(4)
    assert world.control("pause", mode="in_place").ok
    world.submit("late", prompt(6, first=300), 3)
    assert not any(world.scheduler.step() for _ in range(3))
    assert world.req("late").wait_reason is WaitReason.PAUSED and world.req("a").seat >= 0
    assert not world.control("flush_cache").ok
    world.control("continue")
    world.run()
    assert world.outputs["a"] == world.expected("a", 12)
    assert world.outputs["late"] == world.expected("late", 3)


def test_pause_abort_ends_everything_and_a_bad_mode_is_refused():
    world = make_world()
    for i in range(4):
        world.submit(f"r{i}", prompt(20, first=3 + 60 * i), 12)
    world.step(3)
    assert not world.control("pause", mode="nonsense").ok
    assert world.control("pause", mode="abort").ok
    assert all(world.finish_type(f"r{i}") == "abort" for i in range(4))
    world.control("continue")
    world.run()
    world.check_balanced()


def test_abort_answers_whether_it_found_something():
    world = make_world()
    world.submit("a", prompt(4), 30)
    world.step(2)
    world.abort("nobody", req_id="q1")
    assert world.replies[-1].ok and world.replies[-1].data["found"] is False
    world.abort("a", req_id="q2")
    assert world.replies[-1].data == {"found": True, "aborted": ["a"]}
    world.run()


def test_shutdown_drains_or_aborts():
    for drain in (True, False):
        world = make_world()
        world.submit("a", prompt(4), 6)
        world.step(2)
        world.scheduler.handle(ShutdownReq(drain=drain))
        world.submit("late", prompt(4), 2)
        assert world.ends["late"][0].finish.status == 503
        world.run()
        assert world.scheduler.finished
        assert world.finish_type("a") == ("length" if drain else "abort")


@pytest.mark.parametrize("cache", CACHES)
def test_ledger_view_is_read_only_and_sound_at_any_time(cache):
    world = make_world(cache=cache, page=4, dp=2)
    for i in range(5):
        world.submit(f"r{i}", prompt(20, first=3 + 60 * i), 12)
    for _ in range(12):
        world.step()
        data = world.control("ledger").data
        assert data["violations"] == [] and data["route"] == cache
        assert [snapshot["dp_rank"] for snapshot in data["ranks"]] == [0, 1]
        assert len(data["ranks"][0]) == 31
    world.run()
    assert world.control("ledger").data["idle"] is True


def test_ledger_of_a_plain_model_is_not_available():
    reply = make_world(cache="plain").control("ledger")
    assert not reply.ok and reply.data["status"] == 501


def test_load_and_state_views():
    world = make_world(dp=2)
    world.submit("a", prompt(4), 30, dp_rank=1)
    world.step(2)
    ranks = world.control("load").data["ranks"]
    assert [rank["num_running_reqs"] for rank in ranks] == [0, 1]
    state = world.control("internal_state").data
    assert state["paused"] is False and state["ranks"][1]["num_used_tokens"] > 0
    world.run()


# ------------------------------------------------------------------------------------------------------------- loud failures
def test_an_idle_violation_writes_a_bundle_and_raises(tmp_path):
    world = make_world(crash_dir=str(tmp_path))
    world.submit("a", prompt(6), 3)
    world.step(2)
    world.scheduler.memory.allocator.full_attn_allocator.alloc(3, dp_rank=0)  # a leak
    with pytest.raises(
        LedgerViolationError, match=r"crash bundle in(.|\n)*\[dp=0\]\[full\] balance_mismatch: .*3 leaked"
    ):
        world.run()
    (bundle,) = tmp_path.iterdir()
    assert {path.name for path in bundle.iterdir()} == {
        "ledger.json",
        "tree.txt",
        "operations.jsonl",
        "args.json",
    }
    assert "alloc_extend" in (bundle / "operations.jsonl").read_text()
    assert (bundle / "tree.txt").read_text().startswith("root, ")


@pytest.mark.parametrize("cache", ["unified", "plain"])
def test_what_only_the_counters_see_leaves_a_bundle_too(cache, tmp_path):
    world = make_world(cache=cache, crash_dir=str(tmp_path))
    world.submit("a", prompt(6), 3)
    world.step(2)
    world.scheduler.memory.rows.free_slots.pop()  # a row nobody holds
    with pytest.raises(LedgerViolationError, match="held_rows: 1 of 8 request rows are held while idle"):
        world.run()
    assert len(list(tmp_path.iterdir())) == 1


def test_faults_that_cancel_out_in_the_sums_fail_the_idle_edge(tmp_path):
    """D08, DECISIONS 14: one page leaked and one that the tree owns freed: every sum holds, the idle check does not."""
    world = make_world(page=4, crash_dir=str(tmp_path))
    world.submit("a", prompt(12), 2)
    world.run()
    pool = world.scheduler.memory.allocator.full_attn_allocator
    owned = next(iter(world.scheduler.memory.cache.iter_nodes(0))).full_data.value[:4]
    pool.alloc(4, dp_rank=0)
    pool.free(owned, dp_rank=0)
    world.scheduler.idle.check_memory()
    with pytest.raises(LedgerViolationError, match="free_and_owned") as caught:
        world.scheduler.idle.on_idle()
    assert {v.kind for v in caught.value.violations} >= {"free_and_owned", "leaked"}


def test_an_unmapped_slot_inside_the_window_names_request_and_position():
    """D19: the page list of the next step refuses a hole inside the window; outside it nothing is translated."""
    world = make_world(window=6, overlap=False)
    world.submit("victim", prompt(10), 20)
    world.step(5)
    memory = world.scheduler.memory
    length = world.scheduler.roster.live_requests(0)[0].kv_allocated_len
    row = memory.rows.read(world.req("victim").req_pool_idx, length)
    memory.allocator.full_to_swa_index_mapping[row[2]] = 0  # long out of the window
    world.step()
    memory.allocator.full_to_swa_index_mapping[row[length - 2]] = 0
    with pytest.raises(UnmappedSlotError, match=rf"request victim \(rank 0\): position {length - 2} "):
        world.step()


def test_a_stuck_scheduler_does_not_look_idle():
    world = make_world(overlap=False)
    world.submit("a", prompt(4), 5)
    world.step()
    world.scheduler.roster.seats[0].decoding[:] = False
    with pytest.raises(RuntimeError, match="stuck"):
        world.run()


# ---------------------------------------------------------------------------------------------------------------------- logs
def test_log_lines(caplog):
    """The lines people grep, word for word; lists where there are several ranks."""
    with caplog.at_level(logging.INFO, logger="sgl_jax.srt.managers.stats"):
        world = make_world()
        world.submit("a", prompt(6), 60)
        world.step(1)
        world.now += 1.0
        world.run()
    lines = [record.message for record in caplog.records]
    assert lines[0] == (
        "Prefill batch. #new-seq: 1, #new-token: 6, #cached-token: 0, full token usage: 0.09, swa token usage: 0.12, "
        "#running-req: 1, #queue-req: 0, cache hit rate: 0.00%"
    )
    assert lines[1].startswith(
        "Decode batch. #running-req: 1, #full token: 46, full token usage: 0.72, #swa token: "
    )
    assert "gen throughput (token/s): " in lines[1] and lines[1].endswith(", #queue-req: 0")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="sgl_jax.srt.managers.stats"):
        world = make_world(cache="plain", dp=2)
        world.submit("a", prompt(6), 30, dp_rank=1)
        world.run()
        world.submit("b", prompt(6), 30, dp_rank=1)  # finds all but its last token
        world.run()
    assert "#cached-token: [0, 5], " in caplog.text
    assert "#queue-req: [0, 0], cache hit rate: [0.00%, 41.67%]" in caplog.text
    assert (
        "#new-seq: [0, 1], #new-token: [0, 6], #cached-token: [0, 0], token usage: [0.00, 0.09]"
        in caplog.text
    )
    assert "#token: [0, 17], token usage: [0.00, 0.27]" in caplog.text


def test_ready_tells_the_limits():
    info = make_world(page=4, dp=2, full_pages=32, swa_pages=20).scheduler.ready().info
    assert info["max_total_num_tokens"] == 256 and info["swa_max_total_num_tokens"] == 160
    assert info["capacities"] == [{"dp_rank": r, "full": 128, "swa": 80} for r in (0, 1)]
    assert info["max_req_input_len"] == 128 - 4 - 1 and info["max_running_requests"] == 16


def test_streaming_reports_every_token_and_others_only_ends():
    world = make_world()
    world.submit("s", prompt(4), 5, stream=True)
    world.submit("q", prompt(4), 5)
    world.run()
    assert [len(out.token_ids) for out in world.outs if out.rid == "s"] == [1] * 5
    assert [len(out.token_ids) for out in world.outs if out.rid == "q"] == [1, 4]
    assert [out.completion_tokens for out in world.outs if out.rid == "s"] == [1, 2, 3, 4, 5]


def test_control_messages_never_raise_on_bad_arguments():
    world = make_world()
    for args in ({"timeout": "x"}, {"timeout": -1}, {"timeout": True}):
        world.scheduler.handle(ControlReq(kind="flush_cache", req_id="q", args=args))
        assert not world.replies[-1].ok


def test_deadlines_do_not_follow_the_wall_clock():
    """Somebody sets the time while a flush waits: it must neither give up at once nor wait for hours."""
    assert SchedulerOptions().clock is time.monotonic


def test_zero_new_tokens_only_computes_the_prompt():
    world = make_world()
    sampling = SamplingParams(max_new_tokens=0, temperature=0.0)
    world.scheduler.handle(GenerateReq(rid="a", input_ids=prompt(10), sampling=sampling))
    world.run()
    assert world.finish_type("a") == "length" and world.outputs["a"] == []
    world.check_balanced()
