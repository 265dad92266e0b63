"""The persistent compilation cache: a second start compiles nothing anew."""

import json
import os
import subprocess
import sys
from pathlib import Path

from sgl_jax.srt.model_executor.compile_cache import cache_folder

_SCRIPT = """
import json, sys
from pathlib import Path
import jax.monitoring
hits, misses = [], []
jax.monitoring.register_event_listener(
    lambda event, **_: (hits if event.endswith("/cache_hits") else misses if event.endswith("/cache_misses") else []).append(event))
from sgl_jax.srt.model_executor.worker import ModelWorker
from sgl_jax.srt.server_args import ServerArgs
worker = ModelWorker(ServerArgs(model_path=sys.argv[1], page_size=16, max_total_tokens=512, max_running_requests=2,
    chunked_prefill_size=32, context_length=128, device="cpu"))
print(json.dumps({"folder": str(worker.cache_dir), "hits": len(hits), "misses": len(misses)}))
"""


def _start(folder: Path) -> dict:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))}
    model = Path(__file__).parents[1] / "fixtures" / "refs" / "llama-tiny"
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(model)],
        env=env | {"SGL_JAX_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_second_start_takes_everything_from_the_cache(tmp_path):
    first, second = _start(tmp_path), _start(tmp_path)
    assert first["folder"] == second["folder"] and Path(first["folder"]).parent == tmp_path
    assert first["misses"] > 0
    assert (second["hits"] > 0, second["misses"]) == (True, 0)


def test_folder_is_keyed_by_version_and_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("SGL_JAX_CACHE_DIR", str(tmp_path))
    assert cache_folder().parent == tmp_path
    assert cache_folder().name.startswith("xla-jax")
    monkeypatch.delenv("SGL_JAX_CACHE_DIR")
    assert cache_folder().parent == Path.home() / ".cache" / "sgl-jax"
