"""The measuring process: runs cases on the tree under ``--root`` and prints one JSON line per result.

Started as a script, so that it can measure another tree with the same seam: that tree's ``sgl_jax`` is imported, and only
this package of the tools is ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1]


def use_tree(root: str) -> None:
    """Import ``sgl_jax`` from ``root``, and ``sgl_jax.tools.bench`` from here."""
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
    sys.path.insert(0, root)
    import sgl_jax

    tools = types.ModuleType("sgl_jax.tools")
    tools.__path__ = [str(TOOLS)]
    sys.modules["sgl_jax.tools"] = tools
    sgl_jax.tools = tools  # type: ignore[attr-defined]


def main() -> int:
    """Arguments: ``--root DIR --cache KIND [--trace FILE --trace-limit N] NAME:SIZE …``; a failed case is a line with "error"."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--trace")
    parser.add_argument("--trace-limit", type=int, default=1000)
    parser.add_argument("jobs", nargs="+")
    options = parser.parse_args()
    use_tree(options.root)
    from sgl_jax.tools.bench.measure import calibrate, measure
    from sgl_jax.tools.bench.workloads import BY_NAME, trace

    print(json.dumps({"calibration": calibrate()}), flush=True)
    for job in options.jobs:
        name, _, size = job.rpartition(":")
        line: dict[str, object] = {"case": name, "size": int(size)}
        try:
            if name == "G14.trace":
                figures, wrong = trace(options.cache, Path(options.trace), options.trace_limit)
                line |= {"figures": figures, "wrong": wrong}
            elif name in BY_NAME:
                figures, wrong = BY_NAME[name].run(options.cache, int(size))
                line |= {"figures": figures, "wrong": wrong}
            else:
                line |= measure(name, options.cache, int(size)).to_dict()
        except Exception as error:  # another tree may lack a name: the row says so, the others go on
            line["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
