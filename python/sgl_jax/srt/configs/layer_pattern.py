"""Which layers are windowed (D62): the explicit list, or the family's known rule, or a refusal by name."""

from __future__ import annotations

from sgl_jax.srt.configs.hf_config import ConfigReader
from sgl_jax.srt.configs.layer_spec import LayerKind

_NAMES = {"full_attention": LayerKind.FULL, "sliding_attention": LayerKind.SWA}


def every_nth_full(num_layers: int, period: int) -> tuple[LayerKind, ...]:
    """``period - 1`` window layers, then a full one, and so on. Layer ``i`` is FULL iff ``(i + 1) % period == 0``."""
    return tuple(LayerKind.FULL if (i + 1) % period == 0 else LayerKind.SWA for i in range(num_layers))


def explicit_pattern(cfg: ConfigReader, num_layers: int) -> tuple[LayerKind, ...] | None:
    """``layer_types`` as a pattern; None when the key is absent.

    Raises ModelConfigError for a wrong length, a non-list, or a layer type we do not run.
    """
    types = cfg.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        size = len(types) if isinstance(types, list) else repr(types)
        raise cfg.error(
            f"layer pattern cannot be determined: `layer_types` has {size} entries, `num_hidden_layers` is {num_layers}"
        )
    unknown = sorted({str(t) for t in types} - _NAMES.keys())
    if unknown:
        raise cfg.error(f"`layer_types` contains {', '.join(unknown)}; supported: {', '.join(_NAMES)}")
    return tuple(_NAMES[t] for t in types)


def gemma_pattern(cfg: ConfigReader, num_layers: int, last_is_full: bool) -> tuple[LayerKind, ...]:
    """Gemma 3 / 4: ``layer_types``, else every ``sliding_window_pattern``-th (default 6th) layer is full.

    ``last_is_full``: Gemma 4 makes the last layer full whatever the list says.
    """
    pattern = explicit_pattern(cfg, num_layers)
    if pattern is None:
        pattern = every_nth_full(num_layers, cfg.integer("sliding_window_pattern", 6))
    if last_is_full:
        pattern = pattern[:-1] + (LayerKind.FULL,)
    return pattern


def plain_pattern(cfg: ConfigReader, num_layers: int) -> tuple[LayerKind, ...]:
    """Llama-like families: all full, unless ``layer_types`` or Qwen's ``use_sliding_window`` rule says otherwise."""
    pattern = explicit_pattern(cfg, num_layers)
    if pattern is not None:
        return pattern
    if "use_sliding_window" in cfg.data:
        if not cfg.flag("use_sliding_window"):
            return (LayerKind.FULL,) * num_layers
        first = cfg.integer("max_window_layers", minimum=0)
        return tuple(LayerKind.SWA if i >= first else LayerKind.FULL for i in range(num_layers))
    if cfg.get("sliding_window") is not None:
        raise cfg.error(
            f"layer pattern cannot be determined: `sliding_window` is {cfg.get('sliding_window')} but neither "
            "`layer_types` nor `use_sliding_window` says which layers use it; add `layer_types` to config.json"
        )
    return (LayerKind.FULL,) * num_layers
