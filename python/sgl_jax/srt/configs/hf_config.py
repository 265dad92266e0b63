"""Reading HF ``config.json``: typed access with errors that name file, key, value and remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_jax.srt.configs.layer_spec import RopeSpec, RopeType


class ModelConfigError(ValueError):
    """A checkpoint's configuration cannot be used. Names the file or key, the value and what to do."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ModelConfigError when absent, unreadable or not an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(
            f"{path} not found: --model-path must be a local checkpoint folder with a config.json"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelConfigError(f"{path} holds {type(data).__name__}, expected a JSON object")
    return data


class ConfigReader:
    """Typed view of a (text) config dict. ``source`` names the file in errors."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data = data
        self.source = source

    def error(self, message: str) -> ModelConfigError:
        return ModelConfigError(f"{self.source}: {message}")

    def get(self, key: str, default: Any = None) -> Any:
        """Value of ``key``; JSON null counts as absent."""
        value = self.data.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(f"`{key}` is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"`{key}` is {value!r}, expected an integer >= {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.error(f"`{key}` is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"`{key}` is {value!r}, expected a number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"`{key}` is {value!r}, expected true or false")
        return value

    def refuse_features(self, family: str, features: Mapping[str, str]) -> None:
        """Raise naming every key of ``features`` (key -> what it is) whose value is set: not implemented."""
        on = [f"`{k}` = {self.data[k]!r} ({what})" for k, what in features.items() if self.data.get(k)]
        if on:
            raise self.error(
                f"{family} with {', '.join(on)} is not supported; use a checkpoint without this feature"
            )

    def activation(self, *keys: str) -> str:
        """``"gelu_tanh"`` or ``"silu"`` from the first present key."""
        value = next((self.data[k] for k in keys if self.get(k) is not None), None)
        known = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "silu": "silu", "swish": "silu"}
        if value not in known:
            raise self.error(f"`{keys[0]}` is {value!r}, supported: {', '.join(sorted(known))}")
        return known[value]


def parse_rope(
    cfg: ConfigReader, params: Mapping[str, Any], default_theta: float | None, where: str
) -> RopeSpec:
    """One rope dict (``rope_parameters`` or ``rope_scaling`` spelling) as a RopeSpec.

    Raises ModelConfigError for an unknown ``rope_type`` and for a theta that neither dict nor default gives.
    """
    name = params.get("rope_type", params.get("type", "default")) or "default"
    try:
        kind = RopeType(name)
    except ValueError:
        known = ", ".join(t.value for t in RopeType)
        raise cfg.error(f"`{where}.rope_type` is {name!r}, supported: {known}") from None
    theta = params.get("rope_theta", default_theta)
    if theta is None:
        raise cfg.error(f"`{where}.rope_theta` is missing")
    fields = {
        "partial_factor": params.get("partial_rotary_factor"),
        "factor": params.get("factor"),
        "low_freq_factor": params.get("low_freq_factor"),
        "high_freq_factor": params.get("high_freq_factor"),
    }
    given: dict[str, Any] = {k: float(v) for k, v in fields.items() if v is not None}
    original = params.get("original_max_position_embeddings")
    if kind is RopeType.LLAMA3 and ("factor" not in given or original is None):
        raise cfg.error(f"`{where}` of type llama3 needs `factor` and `original_max_position_embeddings`")
    if original is not None and kind is RopeType.LLAMA3:
        return RopeSpec(float(theta), kind, original_context=int(original), **given)
    return RopeSpec(float(theta), kind, **given)
