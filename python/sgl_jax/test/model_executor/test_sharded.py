"""Four virtual CPU devices, in a process of their own: TP4 (KV heads replicated) and DP2 x TP2 give one device's tokens."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

_SCRIPT = """
import json, sys
import numpy as np
from pathlib import Path
from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.model_executor.mesh import make_mesh
from sgl_jax.srt.model_executor.model_functions import functional
from sgl_jax.srt.model_executor.padding import PageGeometry, build_padding_table
from sgl_jax.srt.model_executor.runner import ModelRunner
from sgl_jax.srt.models.registry import load_model
from sgl_jax.test.model_executor.driver import Driver, make_pool
import sgl_jax.test as package

refs = Path(package.__file__).parent / "fixtures" / "refs" / "gemma4-tiny"
data = np.load(refs / "expected.npz")
prompts = data["greedy_prompts"].tolist()
want = data["greedy_tokens"][:, :16].tolist()
tp, dp = int(sys.argv[1]), int(sys.argv[2])
mesh = make_mesh(tp, dp, device="cpu")
config = ModelConfig.from_path(refs)
functions, params = functional(load_model(config, mesh))
table = build_padding_table(4, 64, token_paddings=[64], bs_paddings=[4])
run = ModelRunner(functions, params, make_pool(config, mesh, 16, 32, 32), mesh, table, PageGeometry(16, 256, 32, 32, 32))
split = [prompts] if dp == 1 else [prompts[:1], prompts[1:]]
got = Driver(run.launch, 16, 32, 32, 32, dp_size=dp).generate(split, 16, chunk=20, overlap=True)
if dp == 2:  # an idle rank
    idle = Driver(run.launch, 16, 32, 32, 32, dp_size=dp, seed=1).generate([[], prompts[:2]], 8, chunk=20)
    assert idle == [[], [t[:8] for t in want[:2]]], idle
print(json.dumps({"mesh": dict(mesh.shape), "equal": [t for rank in got for t in rank] == want,
                  "compiled": run._forward._cache_size()}))
"""


@pytest.mark.parametrize(
    ("tp", "dp", "mesh"), [(4, 1, {"data": 1, "tensor": 4}), (4, 2, {"data": 2, "tensor": 2})]
)
def test_virtual_devices_give_the_same_tokens(tp, dp, mesh):
    """The mesh asks JAX for its CPU devices itself: no XLA_FLAGS needed."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_SCRIPT), str(tp), str(dp)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == {"mesh": mesh, "equal": True, "compiled": 2}
