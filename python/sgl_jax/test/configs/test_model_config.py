"""ModelConfig from HF config.json: patterns, both Gemma 4 spellings, overrides, refusals by name."""

from __future__ import annotations

import json

import pytest

from sgl_jax.srt.configs.layer_spec import RopeSpec, RopeType
from sgl_jax.srt.configs.model_config import LayerKind, ModelConfig, ModelConfigError
from sgl_jax.test.models.reference_prompts import FIXTURES

S, F = LayerKind.SWA, LayerKind.FULL
REFS = FIXTURES / "refs"


def raw(family: str, **changes) -> dict:
    """A reference config with changes; a value of ... removes the key."""
    data = json.loads((REFS / f"{family}-tiny" / "config.json").read_text()) | changes
    return {k: v for k, v in data.items() if v is not ...}


def parse(family: str, overrides=None, **changes) -> ModelConfig:
    return ModelConfig.from_hf_dict(raw(family, **changes), override_args=overrides)


def test_gemma4_reference():
    cfg = ModelConfig.from_path(REFS / "gemma4-tiny")
    assert cfg.layer_pattern == (S, S, F, S, S, F)
    assert (cfg.swa_attention_layer_ids, cfg.full_attention_layer_ids) == ([0, 1, 3, 4], [2, 5])
    assert cfg.is_hybrid_swa and cfg.sliding_window == 32 and cfg.num_hidden_layers == 6
    assert (cfg.full.num_q_heads, cfg.full.num_kv_heads, cfg.full.head_dim, cfg.full.k_eq_v) == (
        8,
        2,
        32,
        True,
    )
    assert (cfg.swa.num_q_heads, cfg.swa.num_kv_heads, cfg.swa.head_dim, cfg.swa.k_eq_v) == (8, 4, 16, False)
    assert cfg.full.rope == RopeSpec(1e6, RopeType.PROPORTIONAL, partial_factor=0.25)
    assert cfg.swa.rope == RopeSpec(1e4)
    assert (cfg.full.scale, cfg.swa.scale, cfg.final_logit_softcap) == (1.0, 1.0, 30.0)
    assert (cfg.context_len, cfg.dtype, cfg.vocab_size, cfg.tie_word_embeddings) == (
        4096,
        "float32",
        384,
        True,
    )
    assert cfg.tokens.eos == (1,) and cfg.tokens.bos == 2


def test_gemma4_as_transformers_writes_it_back():
    """``per_layer_config`` instead of ``global_*``: the same model (MODELS 1a)."""
    own = {"head_dim": 32, "num_key_value_heads": 2}
    again = parse(
        "gemma4", global_head_dim=..., num_global_key_value_heads=..., per_layer_config={"2": own, "5": own}
    )
    assert (again.full, again.swa) == (parse("gemma4").full, parse("gemma4").swa)


def test_gemma4_31b_from_the_hub():
    """The multimodal wrapper: text under ``text_config``, no ``layer_types``: the family's rule, [S x 5, F] x 10."""
    text = {
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 262144,
        "vocab_size": 262144,
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": None,
        "dtype": "bfloat16",
    }
    cfg = ModelConfig.from_hf_dict(
        {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]},
        generation={"eos_token_id": [1, 106, 50]},
    )
    assert cfg.full_attention_layer_ids == [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]
    assert cfg.dtype == "bfloat16" and cfg.tokens.eos == (1, 106, 50)
    # bf16 KV bytes of one token: sliding 16 KiB a layer, full 8 KiB a layer
    assert cfg.swa.kv_bytes_per_token(1, 2) == 16 * 1024
    assert cfg.full.kv_bytes_per_token(1, 2) == 8 * 1024
    assert (cfg.get_num_kv_heads(4), cfg.get_num_kv_heads(8)) == (1, 1)
    assert cfg.get_total_num_kv_heads_with_replication(8) == 8
    assert cfg.get_total_num_kv_heads_with_replication(8, S) == 16


def test_gemma3_old_spelling():
    """Hub Gemma 3: ``sliding_window_pattern`` and the two theta keys."""
    cfg = parse(
        "gemma3",
        layer_types=...,
        rope_parameters=...,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert cfg.layer_pattern == (S, S, F, S, S, F)
    assert cfg.full.rope == RopeSpec(1e6, RopeType.LINEAR, factor=8.0)
    assert cfg.swa.rope == RopeSpec(1e4)
    assert cfg.full.scale == 0.25


def test_gemma3_default_pattern_is_every_sixth():
    assert parse("gemma3", layer_types=..., num_hidden_layers=7).layer_pattern == (S, S, S, S, S, F, S)


def test_gemma4_last_layer_is_always_full():
    assert parse("gemma4", layer_types=["sliding_attention"] * 6).layer_pattern == (S, S, S, S, S, F)


@pytest.mark.parametrize("family, scale, rope", [("llama", 0.25, 1e4), ("qwen3", 0.25, 1e6)])
def test_plain_families_have_one_pool(family, scale, rope):
    cfg = parse(family)
    assert cfg.layer_pattern == (F, F, F, F) and cfg.swa is None
    assert not cfg.is_hybrid_swa and cfg.sliding_window is None and cfg.swa_attention_layer_ids == []
    assert (cfg.full.scale, cfg.full.rope.theta, cfg.tie_word_embeddings) == (scale, rope, False)


def test_llama3_rope():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert parse("llama", rope_scaling=scaling, rope_theta=5e5).full.rope == RopeSpec(
        5e5, RopeType.LLAMA3, factor=8.0, original_context=8192
    )


def test_qwen3_window_rule():
    cfg = parse("qwen3", use_sliding_window=True, max_window_layers=3, sliding_window=64)
    assert cfg.layer_pattern == (F, F, F, S) and cfg.sliding_window == 64


def test_overrides():
    cfg = ModelConfig.from_path(
        REFS / "gemma4-tiny", {"sliding_window": 160, "dtype": "bfloat16", "context_length": 1024}
    )
    assert (cfg.sliding_window, cfg.dtype, cfg.context_len) == (160, "bfloat16", 1024)
    assert parse("gemma4", {"dtype": "auto", "context_length": None}).dtype == "float32"


@pytest.mark.parametrize(
    "heads, tensor, stored", [(4, 1, 4), (4, 2, 4), (4, 4, 4), (2, 4, 4), (1, 4, 4), (2, 8, 8)]
)
def test_kv_heads_are_replicated_to_the_tensor_axis(heads, tensor, stored):
    assert parse("llama", num_key_value_heads=heads).full.kv_heads_stored(tensor) == stored


@pytest.mark.parametrize(
    "family, changes, message",
    [
        (
            "gemma4",
            {"layer_types": ["full_attention"]},
            "`layer_types` has 1 entries, `num_hidden_layers` is 6",
        ),
        (
            "gemma4",
            {"layer_types": ["linear_attention"] * 6},
            "contains linear_attention; supported: full_attention",
        ),
        ("gemma4", {"sliding_window": None}, "`sliding_window` is missing"),
        ("gemma4", {"sliding_window": 0}, "`sliding_window` is 0, expected an integer >= 1"),
        (
            "gemma4",
            {"hidden_size_per_layer_input": 256},
            r"`hidden_size_per_layer_input` = 256 \(per-layer embeddings\)",
        ),
        ("gemma4", {"num_kv_shared_layers": 2}, "KV sharing"),
        ("gemma4", {"enable_moe_block": True}, "mixture of experts"),
        ("gemma4", {"use_double_wide_mlp": True}, "double-wide"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "'all' is not supported"),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": 32}}}, "layer 5 .* must be alike"),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional"),
        ("gemma3", {"hidden_activation": "relu"}, "`hidden_activation` is 'relu'"),
        ("llama", {"sliding_window": 64}, "layer pattern cannot be determined: `sliding_window` is 64"),
        ("llama", {"attention_bias": True}, "attention bias"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn', supported: default, linear"),
        (
            "llama",
            {"architectures": ["FalconForCausalLM"]},
            r"\['FalconForCausalLM'\], which is not supported",
        ),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ("llama", {"dtype": "int8"}, "`dtype` is 'int8'"),
        ("llama", {"hidden_size": "64"}, "`hidden_size` is '64', expected an integer"),
        ("llama", {"vocab_size": None}, "`vocab_size` is missing"),
        ("llama", {"architectures": 5}, "`architectures` is 5, which is not supported"),
        ("llama", {"rms_norm_eps": 0}, "`rms_norm_eps` is 0, expected a number above 0"),
        ("llama", {"rope_parameters": "big"}, "`rope_parameters` is 'big', expected an object"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": "x"}},
            r"`rope_parameters\.rope_theta` is 'x', expected",
        ),
        ("llama", {"eos_token_id": ["</s>"]}, r"`eos_token_id` is \['</s>'\], expected a token id"),
        ("llama", {"hidden_act": ["silu"]}, r"`hidden_act` is \['silu'\], supported"),
        ("gemma4", {"per_layer_config": [1]}, r"`per_layer_config` is \[1\], expected an object"),
        (
            "gemma4",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": -1}}},
            r"`rope_parameters\.full_attention\.rope_theta` is -1",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(family, changes, message):
    """D62 and friends: file, key, value."""
    with pytest.raises(ModelConfigError, match=message):
        parse(family, **changes)


@pytest.mark.parametrize("family", ["gemma4", "gemma3", "llama", "qwen3"])
@pytest.mark.parametrize("value", ["x", -1, 1.5, True, [1, "a"], {"a": 1}, float("nan"), 10**30], ids=repr)
def test_no_value_of_any_key_gives_a_python_error(family, value):
    """Whatever a key holds, the config is served or refused with file and key."""
    for key in [*raw(family), "layer_types", "rope_scaling", "rope_theta", "per_layer_config", "text_config"]:
        try:
            parse(family, **{key: value})
        except ModelConfigError as error:
            assert "config.json: " in str(error), key


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"context_length": 5000}, r"--context-length 5000 is outside 1\.\.4096"),
        ({"dtype": "int4"}, "--dtype is 'int4', supported: auto, float32"),
        ({"sliding_windw": 3}, "override `sliding_windw` = 3: no such key"),
    ],
)
def test_bad_overrides(overrides, message):
    with pytest.raises(ModelConfigError, match=message):
        parse("gemma4", overrides)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ModelConfigError, match=r"config\.json not found: --model-path"):
        ModelConfig.from_path(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="cannot be read as JSON"):
        ModelConfig.from_path(tmp_path)


@pytest.mark.parametrize(
    "tensor, message", [(3, "8 query heads do not divide"), (8, None), (16, "8 query heads")]
)
def test_tensor_parallel_limits(tensor, message):
    cfg = parse("gemma4")
    if message is None:
        cfg.check_tensor_parallel(tensor)
    else:
        with pytest.raises(ModelConfigError, match=message):
            cfg.check_tensor_parallel(tensor)
