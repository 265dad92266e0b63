"""The cache benchmark: its own arithmetic, and the shapes of both caches as op counts (never seconds).

The sizes are an eighth of the quick suite's, so that the gate runs with the other tests; the exponents are the same.
"""

import json

import numpy as np
import pytest

from sgl_jax.tools.bench import cache as bench_cache
from sgl_jax.tools.bench import main
from sgl_jax.tools.bench.cases import CASES
from sgl_jax.tools.bench.measure import measure_case
from sgl_jax.tools.bench.opcount import count_calls, peak_bytes
from sgl_jax.tools.bench.report import comparable, gate, ratio_rows, render
from sgl_jax.tools.bench.stats import exponent, percentile
from sgl_jax.tools.bench.workloads import BY_NAME, trace, trace_requests


# ------------------------------------------------------------------------------------------------------------ arithmetic
def test_exponent_of_flat_linear_and_square_costs():
    sizes = [100, 1000, 10_000]
    assert exponent(sizes, [7, 7, 7]) == 0.0
    assert exponent(sizes, sizes) == pytest.approx(1.0)
    assert exponent(sizes, [s * s for s in sizes]) == pytest.approx(2.0)
    assert exponent([5, 5, 5], [1, 2, 3]) == 0.0 and percentile([3, 1, 2], 0.99) == 3


def test_calls_and_peak_bytes_are_counted():
    calls, numpy_calls = count_calls(lambda: [len("a") for _ in range(5)])
    assert 5 <= calls <= 7 and numpy_calls == 0
    array = np.arange(10)
    assert count_calls(lambda: array.sum())[1] >= 1
    assert 1_000_000 <= peak_bytes(lambda: bytearray(1_000_000)) < 1_100_000


def rows(name, calls, size=(10, 100, 1000), **extra):
    base = {"cpu_us": 1.0, "p99_us": 1.0, "numpy_calls": 2.0, "peak_bytes": 10.0, "wrong": []}
    return [{"case": name, "size": s, "calls": c} | base | extra for s, c in zip(size, calls)]


def test_a_growing_count_a_wrong_result_and_an_error_fail_the_gate():
    (case,) = [c for c in CASES if c.name == "G9.evict_1"]
    assert gate([case], rows(case.name, [50, 50, 51])) == []
    assert "exponent 1.00 > 0.15" in gate([case], rows(case.name, [10, 100, 1000]))[0]
    copies = [{**r, "numpy_calls": 2.0 * r["size"]} for r in rows(case.name, [50, 50, 50])]
    assert "numpy_calls grow with exponent 1.00" in gate([case], copies)[0]
    assert "unbalanced" in gate([case], rows(case.name, [5, 5, 5], wrong=["unbalanced"]))[0]
    assert gate([case], [{"case": case.name, "size": 10, "error": "ValueError: x"}]) == [
        "G9.evict_1 at 10: ValueError: x"
    ]


def test_no_ratio_where_the_calibration_differs():
    fast, slow = {"calibration": {"pack": 1.0}}, {"calibration": {"pack": 1.3}}
    mine, theirs = rows("G9.evict_1", [5, 5, 5]), rows("G9.evict_1", [5, 5, 5], cpu_us=3.0)
    assert comparable([fast], [fast]) and not comparable([fast], [slow])
    text = "\n".join(ratio_rows([([fast, *mine], [fast, *theirs])] * 3))
    assert "3.00x [3.00..3.00]" in text
    assert "no ratio" in "\n".join(ratio_rows([([fast, *mine], [slow, *theirs])]))


def test_the_table_shows_times_counts_exponents_and_aims():
    figures = {
        "case": "G17.ledger_1m",
        "size": 8,
        "figures": {"snapshot_ms_page128": 4.0, "snapshot_ms_page64": 9.0},
    }
    (case,) = [c for c in CASES if c.name == "G9.evict_1"]
    text = render("unified", {"cpus": 2}, [case], [*rows(case.name, [50, 50, 50]), figures])
    assert "G9.evict_1" in text and "(aim <= 5: met)" in text and "(aim <= 5: missed)" in text


# --------------------------------------------------------------------------------------------------------------- shapes
@pytest.mark.parametrize("kind", ["unified", "legacy"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_costs_follow_what_is_touched(kind, case):
    """Flat in pool and tree, at most linear in tokens; every world balanced at the end (G1–G12, D78, D83)."""
    sizes = (
        case.quick
        if case.unit == "rows"
        else [max(size // 8, 100 * i) for i, size in enumerate(case.quick, 1)]
    )
    sizes = (
        [max(size, 32_768 << (2 * i)) for i, size in enumerate(sizes)]
        if case.unit == "pool tokens"
        else sizes
    )
    samples = [measure_case(case, kind, size, counts_only=True) for size in sizes]
    assert gate([case], [sample.to_dict() for sample in samples]) == []


@pytest.mark.parametrize("kind", ["unified", "legacy"])
def test_workloads_end_balanced(kind):
    figures, wrong = BY_NAME["G13.chat"].run(kind, 1)
    assert wrong == [] and 0.8 < figures["hit_rate"] < 0.95
    figures, wrong = BY_NAME["G17.ledger_1m"].run(kind, 1 << 15)
    assert wrong == [] and set(figures) == {"snapshot_ms_page128", "snapshot_ms_page64", "snapshot_ms_page1"}


def test_a_trace_line_is_a_prompt_of_whole_blocks(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [{"input_length": 700, "output_length": 3, "hash_ids": [0, 7]}] * 2
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompt, output = next(trace_requests(file, 1))
    assert (len(prompt), output, prompt[0], prompt[512]) == (700, 3, 1, 7 * 512 + 1)
    figures, wrong = trace("unified", file, 2)
    assert wrong == [] and figures["hit_rate"] == pytest.approx(640 / 1400)


# -------------------------------------------------------------------------------------------------------------- command
def test_the_command_measures_two_trees_in_processes_and_writes_json(tmp_path, capsys):
    out = tmp_path / "bench.json"
    argv = ["cache", "--case", "G3", "--cache", "legacy", "--json", str(out)]
    assert main([*argv, "--tree", str(bench_cache.OURS), "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    assert "all shape gates and correctness checks hold" in text and "other tree / this tree" in text
    ((mine, theirs),) = json.loads(out.read_text())["rounds"]
    for results in (mine, theirs):
        assert [r["size"] for r in results if r.get("case") == "G3.alloc_decode"] == [16, 64, 256]


def test_an_unknown_case_is_named(capsys):
    assert main(["cache", "--case", "G99"]) == 2
    assert "G9.evict_1" in capsys.readouterr().err


def test_usage(capsys):
    assert main([]) == 2 and main(["--help"]) == 0
    assert "no-sharing" in capsys.readouterr().out
