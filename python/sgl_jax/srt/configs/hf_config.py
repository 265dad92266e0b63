"""Reading HF ``config.json``: typed access with errors that name file, key, value and remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_jax.srt.configs.layer_spec import RopeSpec, RopeType

_INT_LIMIT = 2**31
_NUMBER_LIMIT = 1e18


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
    """Typed view of a (text) config dict. ``source`` names the file in errors, ``prefix`` the object inside it (``"rope_scaling."``)."""

    def __init__(self, data: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.data = data
        self.source = source
        self.prefix = prefix

    def error(self, message: str) -> ModelConfigError:
        return ModelConfigError(f"{self.source}: {message}")

    def wrong(self, key: str, value: Any, expected: str) -> ModelConfigError:
        return self.error(f"`{self.prefix}{key}` is {value!r}, expected {expected}")

    def missing(self, key: str) -> ModelConfigError:
        return self.error(f"`{self.prefix}{key}` is missing")

    def get(self, key: str, default: Any = None) -> Any:
        """Value of ``key``; JSON null counts as absent."""
        value = self.data.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.missing(key)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < _INT_LIMIT:
            raise self.wrong(key, value, f"an integer >= {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0: every real number of a config is a scale, a base or an epsilon."""
        value = self.get(key, default)
        if value is None:
            raise self.missing(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _NUMBER_LIMIT:
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def section(self, key: str) -> ConfigReader | None:
        """The object at ``key``, as a reader of its own; None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return ConfigReader(value, self.source, f"{self.prefix}{key}.")

    def token_ids(self, key: str) -> list[int]:
        """One id or a list of ids; empty when absent."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < _INT_LIMIT for i in ids):
            raise self.wrong(key, value, "a token id or a list of token ids")
        return ids

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
        if not isinstance(value, str) or value not in known:
            raise self.error(f"`{keys[0]}` is {value!r}, supported: {', '.join(sorted(known))}")
        return known[value]


def parse_rope(params: ConfigReader, default_theta: float | None) -> RopeSpec:
    """One rope object (``rope_parameters`` or ``rope_scaling`` spelling) as a RopeSpec.

    Raises ModelConfigError for an unknown ``rope_type`` and for a theta that neither object nor default gives.
    """
    name = params.get("rope_type", params.get("type", "default"))
    known = {t.value: t for t in RopeType}
    if not isinstance(name, str) or name not in known:
        raise params.error(f"`{params.prefix}rope_type` is {name!r}, supported: {', '.join(known)}")
    kind, theta = known[name], params.number("rope_theta", default_theta)
    fields = {
        "partial_factor": "partial_rotary_factor",
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    }
    given: dict[str, Any] = {f: params.number(k) for f, k in fields.items() if params.get(k) is not None}
    if kind is not RopeType.LLAMA3:
        return RopeSpec(theta, kind, **given)
    original = params.get("original_max_position_embeddings")
    if "factor" not in given or original is None:
        raise params.error(
            f"`{params.prefix[:-1]}` of type llama3 needs `factor` and `original_max_position_embeddings`"
        )
    return RopeSpec(theta, kind, original_context=params.integer("original_max_position_embeddings"), **given)
