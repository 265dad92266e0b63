"""Gates, tables and ratios over the results of measuring processes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sgl_jax.tools.bench.cases import Case
from sgl_jax.tools.bench.stats import exponent, ratio_text
from sgl_jax.tools.bench.workloads import BY_NAME as WORKLOADS

Result = Mapping[str, Any]
_CALIBRATION_TOLERANCE = 0.25


def rows_of(case: Case, results: Sequence[Result]) -> list[Result]:
    """The measured sizes of one case, smallest first; failed ones are left out."""
    found = [r for r in results if r.get("case") == case.name and "error" not in r]
    return sorted(found, key=lambda r: int(r["size"]))


def shape(rows: Sequence[Result], field: str) -> float:
    """Exponent of one field over the sizes."""
    return exponent([int(r["size"]) for r in rows], [float(r[field]) for r in rows])


def gate(cases: Sequence[Case], results: Sequence[Result]) -> list[str]:
    """Broken shapes and wrong results, one sentence each. Counts only: a slow machine fails nothing."""
    failures = [f"{r['case']} at {r['size']}: {r['error']}" for r in results if "error" in r]
    failures += [f"{r['case']} at {r['size']}: {text}" for r in results for text in r.get("wrong", [])]
    for case in cases:
        rows = rows_of(case, results)
        if len(rows) < 3:
            continue
        limits = (("calls", case.calls), ("numpy_calls", case.calls), ("peak_bytes", case.bytes))
        for field, limit in limits:
            got = shape(rows, field)
            if got > limit:
                numbers = ", ".join(f"{r['size']}: {r[field]:.0f}" for r in rows)
                failures.append(f"{case.name}: {field} grow with exponent {got:.2f} > {limit} ({numbers})")
    return failures


def render(
    cache: str, environment: Mapping[str, Any], cases: Sequence[Case], results: Sequence[Result]
) -> str:
    """The table people read: times, counts and exponents per case, then the figures of the workloads."""
    head = " ".join(f"{key}={value}" for key, value in environment.items())
    kernels = _calibration(results)
    lines = [
        f"cache={cache} {head}",
        "calibration (us): " + ", ".join(f"{name} {value:.1f}" for name, value in kernels.items()),
        f"{'case':<22} {'sizes':>26} {'CPU us':>24} {'p99 us':>9} {'exp':>6} {'calls':>7} {'exp':>6} {'kB':>8} {'exp':>6}",
    ]
    for case in cases:
        rows = rows_of(case, results)
        if not rows:
            continue
        last = rows[-1]
        times = " ".join(f"{r['cpu_us']:.0f}" for r in rows)
        lines.append(
            f"{case.name:<22} {' '.join(str(r['size']) for r in rows):>26} "
            f"{times:>24} {last['p99_us']:>9.0f} {shape(rows, 'cpu_us'):>6.2f} "
            f"{last['calls']:>7.0f} {shape(rows, 'calls'):>6.2f} {last['peak_bytes'] / 1000:>8.1f} "
            f"{shape(rows, 'peak_bytes'):>6.2f}"
        )
    lines += _figures(results)
    return "\n".join(lines)


def _figures(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        aims = WORKLOADS[result["case"]].aims if result.get("case") in WORKLOADS else {}
        for name, value in result.get("figures", {}).items():
            aim = (
                f"  (aim <= {aims[name]:g}: {'met' if value <= aims[name] else 'missed'})"
                if name in aims
                else ""
            )
            yield f"{result['case']:<22} {name:<24} {value:>14,.3f}{aim}"


def _cpu(results: Sequence[Result]) -> dict[tuple[str, int], float]:
    return {
        (r["case"], int(r["size"])): float(r["cpu_us"])
        for r in results
        if r.get("cpu_us") and not r.get("wrong")
    }


def _calibration(results: Sequence[Result]) -> dict[str, float]:
    found: dict[str, float] = next((r["calibration"] for r in results if "calibration" in r), {})
    return found


def comparable(mine: Sequence[Result], theirs: Sequence[Result]) -> bool:
    """Both processes ran equally fast: every calibration kernel within 25 %."""
    a, b = _calibration(mine), _calibration(theirs)
    return all(max(a[n], b[n]) <= (1 + _CALIBRATION_TOLERANCE) * min(a[n], b[n]) for n in a if n in b)


def ratio_rows(rounds: Sequence[tuple[Sequence[Result], Sequence[Result]]]) -> Iterator[str]:
    """How many times faster this tree is, per case and size: the median over comparable rounds, with the range."""
    kept = [(_cpu(mine), _cpu(theirs)) for mine, theirs in rounds if comparable(mine, theirs)]
    yield f"other tree / this tree, CPU time, {len(kept)} of {len(rounds)} rounds comparable"
    if not kept:
        yield "no ratio: the calibration kernels differed by more than 25 % in every round"
        return
    for key in kept[0][0]:
        ratios = [theirs[key] / mine[key] for mine, theirs in kept if key in mine and key in theirs]
        if ratios:
            yield f"{key[0]:<22} {key[1]:>9} {ratio_text(ratios):>24}"
        else:
            yield f"{key[0]:<22} {key[1]:>9} {'not measured there':>24}"
    hits = [_hit_rates(mine, theirs) for mine, theirs in rounds]
    worse = [statistics.median(column) for column in zip(*hits)]
    if worse:
        yield f"hit rate, ours minus theirs, points: {', '.join(f'{value * 100:+.2f}' for value in worse)}"


def _hit_rates(mine: Sequence[Result], theirs: Sequence[Result]) -> list[float]:
    other = {r["case"]: r["figures"]["hit_rate"] for r in theirs if "hit_rate" in r.get("figures", {})}
    return [
        r["figures"]["hit_rate"] - other[r["case"]]
        for r in mine
        if "hit_rate" in r.get("figures", {}) and r["case"] in other
    ]
