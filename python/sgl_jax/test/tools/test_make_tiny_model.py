"""make-tiny-model: reproducible bytes, a usable tokenizer, refusals by argument."""

from __future__ import annotations

import json
import stat

import jax
import pytest
from jax.sharding import AxisType
from tokenizers import Tokenizer

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.models.registry import load_model
from sgl_jax.test.models.paged_engine import FAMILIES, REFS
from sgl_jax.tools.make_tiny_model import main, make_tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_default_arguments_reproduce_the_reference_weights(family, tmp_path):
    """Byte for byte, on any machine and numpy version."""
    out = tmp_path / family
    assert main(["--family", family, "--out", str(out)]) == 0
    reference = REFS / f"{family}-tiny"
    assert (out / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()
    ours, theirs = ModelConfig.from_path(out), ModelConfig.from_path(reference)
    assert (ours.layer_pattern, ours.full, ours.swa) == (theirs.layer_pattern, theirs.full, theirs.swa)
    assert ours.tokens.eos == (1, 5)
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o644 for f in out.iterdir())


@pytest.mark.parametrize("family, layers", [("gemma4", 1), ("gemma4", 4), ("gemma3", 2), ("llama", 2)])
def test_other_depths_load_strictly(family, layers, tmp_path):
    made = make_tiny_model(family, tmp_path / "m", layers=layers, seed=3)
    config = ModelConfig.from_path(made.path)
    assert config.num_hidden_layers == layers
    mesh = jax.make_mesh(
        (1, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1]
    )
    load_model(config, mesh)


def test_window_and_seed(tmp_path):
    a = make_tiny_model("gemma4", tmp_path / "a", window=160)
    b = make_tiny_model("gemma4", tmp_path / "b", seed=1)
    assert ModelConfig.from_path(a.path).sliding_window == 160
    assert (a.path / "model.safetensors").read_bytes() != (b.path / "model.safetensors").read_bytes()


def test_tokenizer_round_trips_any_text(tmp_path):
    tokenizer = Tokenizer.from_file(str(make_tiny_model("llama", tmp_path / "m").path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 384
    text = "Héllo, the cache 你好 🙂\n  tabs\tand spaces"
    ids = tokenizer.encode(text).ids
    assert ids[0] == 2 and tokenizer.decode(ids[1:]) == text
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids[1:]
    assert tokenizer.encode("<|turn>user<turn|>", add_special_tokens=False).ids[0] == 4


def test_auto_tokenizer_applies_the_chat_template(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model("gemma3", tmp_path / "m").path)
    chat = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yes"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><|turn>user\nhi<turn|>\n<|turn>model\nyes<turn|>\n<|turn>model\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)
    assert tokenizer(text, add_special_tokens=False)["input_ids"][:2] == [2, 4]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_configuration(family, tmp_path):
    """Loading the weights there needs torch; its own strict config class at least agrees about every layer."""
    from transformers import AutoConfig

    out = make_tiny_model(family, tmp_path / "m").path
    theirs, ours = AutoConfig.from_pretrained(out), ModelConfig.from_path(out)
    assert theirs.num_hidden_layers == ours.num_hidden_layers
    if ours.is_hybrid_swa:
        windowed = [i for i, kind in enumerate(theirs.layer_types) if kind == "sliding_attention"]
        assert (windowed, theirs.sliding_window) == (ours.swa_attention_layer_ids, ours.sliding_window)
    theirs.save_pretrained(tmp_path / "again")  # Gemma 4 comes back in the other spelling
    again = ModelConfig.from_path(tmp_path / "again")
    assert (again.layer_pattern, again.full, again.swa) == (ours.layer_pattern, ours.full, ours.swa)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--family", "llama", "--window", "8"], "--window 8: llama has no window layers"),
        (["--family", "gemma4", "--window", "0"], "--window is 0, must be at least 1"),
        (["--family", "gemma4", "--layers", "-1"], "--layers is -1, must be at least 1"),
        (["--family", "gemma4", "--seed", "-1"], "--seed is -1, must be at least 0"),
    ],
)
def test_bad_arguments_exit_2_and_write_nothing(args, message, tmp_path, capsys):
    assert main([*args, "--out", str(tmp_path / "m")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_existing_folders(tmp_path, capsys):
    out = tmp_path / "m"
    out.mkdir()
    assert main(["--family", "llama", "--out", str(out)]) == 0  # empty: fine
    assert main(["--family", "qwen3", "--out", str(out)]) == 2
    assert "is not empty; name a new folder or pass --force" in capsys.readouterr().err
    assert main(["--family", "qwen3", "--out", str(out), "--force"]) == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    assert main(["--family", "qwen3", "--out", str(precious), "--force"]) == 2
    assert (precious / "thesis.txt").exists()
