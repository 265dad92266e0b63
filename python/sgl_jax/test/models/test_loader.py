"""The strict loader: prefixes, other modalities, and one error that lists everything wrong."""

from __future__ import annotations

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.models.loader import canonical_name
from sgl_jax.srt.models.registry import build_model, load_model
from sgl_jax.srt.models.safetensors_file import WeightLoadError, find_tensors, read_header
from sgl_jax.test.models.paged_engine import REFS


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(
        (1, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1]
    )


@pytest.fixture
def checkpoint(tmp_path):
    """A writable copy of the Gemma 4 reference; ``write(tensors)`` replaces its weights."""
    folder = tmp_path / "model"
    shutil.copytree(REFS / "gemma4-tiny", folder)
    tensors = load_file(folder / "model.safetensors")

    def write(changed: dict[str, np.ndarray]) -> ModelConfig:
        save_file(changed, folder / "model.safetensors")
        return ModelConfig.from_path(folder)

    return folder, tensors, write


def weight(model, path: str) -> np.ndarray:
    found = {".".join(map(str, p)): v for p, v in nnx.iter_graph(model) if isinstance(v, nnx.Param)}
    return np.asarray(found[path].get_value())


def test_missing_unexpected_and_misshaped_are_listed_together(checkpoint, mesh):
    _, tensors, write = checkpoint
    del tensors["model.layers.0.layer_scalar"]
    tensors["model.layers.2.self_attn.v_proj.weight"] = np.zeros((64, 64), np.float32)  # k_eq_v: has none
    tensors["model.norm.weight"] = np.zeros(65, np.float32)
    with pytest.raises(WeightLoadError) as error:
        load_model(write(tensors), mesh)
    text = str(error.value)
    assert "1 missing:\n  model.layers.0.layer_scalar" in text
    assert "1 unexpected:\n  model.layers.2.self_attn.v_proj.weight" in text
    assert "1 mis-shaped:\n  model.norm.weight: checkpoint [65], model [64]" in text


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_conditional_generation_prefixes_and_vision_towers(checkpoint, mesh, prefix):
    _, tensors, write = checkpoint
    renamed = {prefix + name.removeprefix("model."): value for name, value in tensors.items()}
    renamed["model.vision_tower.encoder.layers.0.mlp.up_proj.weight"] = np.zeros(3, np.float32)
    renamed["model.embed_vision.embedding_projection.weight"] = np.zeros(3, np.float32)
    model = load_model(write(renamed), mesh)
    np.testing.assert_array_equal(
        weight(model, "model.layers.1.mlp.up_proj.weight"), tensors["model.layers.1.mlp.up_proj.weight"]
    )


def test_a_name_that_only_looks_like_a_tower_is_unexpected(checkpoint, mesh):
    _, tensors, write = checkpoint
    tensors["model.layers.0.vision_tower.weight"] = np.zeros(3, np.float32)
    with pytest.raises(WeightLoadError, match=r"unexpected:\n  model\.layers\.0\.vision_tower\.weight"):
        load_model(write(tensors), mesh)


def test_two_spellings_of_one_parameter(checkpoint, mesh):
    _, tensors, write = checkpoint
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"]
    with pytest.raises(WeightLoadError, match="are the same parameter"):
        load_model(write(tensors), mesh)


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_output_table_on_disk_must_be_the_embedding(checkpoint, mesh, equal):
    _, tensors, write = checkpoint
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(0 if equal else 1)
    if equal:
        load_model(write(tensors), mesh)
    else:
        with pytest.raises(WeightLoadError, match="lm_head"):
            load_model(write(tensors), mesh)


def test_bf16_file_and_bf16_compute(checkpoint, mesh):
    """Weights are bf16-representable: a BF16 file in float32 holds the same numbers."""
    folder, tensors, write = checkpoint
    config = write({k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()})
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(weight(load_model(config, mesh), name), tensors[name])
    narrow = weight(load_model(ModelConfig.from_path(folder, {"dtype": "bfloat16"}), mesh), name)
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(narrow.astype(np.float32), tensors[name])


def test_dummy_weights_follow_the_seed_and_need_no_file(checkpoint, mesh):
    """Seed 0 of the shared recipe is the reference checkpoint itself."""
    folder, tensors, _ = checkpoint
    (folder / "model.safetensors").unlink()
    config = ModelConfig.from_path(folder)
    name = "model.layers.5.self_attn.q_norm.weight"
    np.testing.assert_array_equal(weight(load_model(config, mesh, load_format="dummy"), name), tensors[name])
    other = weight(load_model(config, mesh, load_format="dummy", seed=1), name)
    assert not np.array_equal(other, tensors[name])
    with pytest.raises(WeightLoadError, match=r"holds no \*\.safetensors file"):
        load_model(config, mesh)


def test_sharded_checkpoints_follow_the_index(checkpoint, mesh):
    folder, tensors, _ = checkpoint
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({n: tensors[n] for n in own}, folder / file)
    index = {"weight_map": {n: file for file, own in parts.items() for n in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_tensors(folder).keys() == tensors.keys()
    load_model(ModelConfig.from_path(folder), mesh)
    (folder / "b.safetensors").unlink()
    with pytest.raises(WeightLoadError, match=r"not in the folder: b\.safetensors"):
        find_tensors(folder)


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": 3}', "{}", '{"weight_map": {"a": [1]}}'])
def test_a_damaged_index_is_named(checkpoint, index):
    file = checkpoint[0] / "model.safetensors.index.json"
    file.write_text(index)
    with pytest.raises(WeightLoadError, match="has no usable weight_map") as error:
        find_tensors(checkpoint[0])
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: data[:-10], "download it again"),
        (lambda data: data[:40], "is it truncated"),
        (lambda data: b"", "does not fit a file of 0"),
        (lambda data: (16).to_bytes(8, "little") + b"x" * 64, "not a safetensors file"),
        (lambda data: with_header(b"[1, 2]"), "no JSON object"),
        (lambda data: with_header(b'{"a.weight": {"dtype": "F32"}}'), "tensor a.weight has the header"),
    ],
)
def test_damaged_files_are_named(checkpoint, damage, message):
    file = checkpoint[0] / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(WeightLoadError, match=message) as error:
        read_header(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    "name, plain",
    [
        ("model.layers.0.x", "model.layers.0.x"),
        ("model.language_model.layers.0.x", "model.layers.0.x"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.vision_tower.x", None),
        ("vision_tower.x", None),
        ("model.layers.3.self_attn.rotary_emb.inv_freq", None),
    ],
)
def test_canonical_name(name, plain):
    assert canonical_name(name) == plain


def test_an_abstract_model_allocates_nothing_and_carries_layouts(mesh):
    model = build_model(ModelConfig.from_path(REFS / "llama-tiny"), mesh)
    values = [v.get_value() for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Param)]
    assert len(values) == 39
    assert all(isinstance(v, jax.ShapeDtypeStruct) and v.sharding.mesh == mesh for v in values)


def test_unknown_backend_and_load_format_are_named(mesh):
    config = ModelConfig.from_path(REFS / "llama-tiny")
    with pytest.raises(ValueError, match="--attention-backend 'cuda' is not available; choose one of native"):
        build_model(config, mesh, backend="cuda")
    with pytest.raises(WeightLoadError, match="--load-format 'gguf' is not supported; choose auto or dummy"):
        load_model(config, mesh, load_format="gguf")
