"""From a ModelConfig to a model: abstract (for planning) or loaded."""

from __future__ import annotations

from jax.sharding import Mesh

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.models.decoder import BuildContext, CausalLM
from sgl_jax.srt.models.gemma import GemmaForCausalLM
from sgl_jax.srt.models.llama import LlamaForCausalLM
from sgl_jax.srt.models.loader import load_weights

#: family -> model class
FAMILIES: dict[str, type[CausalLM]] = {
    "gemma3": GemmaForCausalLM,
    "gemma4": GemmaForCausalLM,
    "llama": LlamaForCausalLM,
    "qwen3": LlamaForCausalLM,
}


def build_model(config: ModelConfig, mesh: Mesh, backend: str = "native") -> CausalLM:
    """The model with abstract parameters (ShapeDtypeStruct with sharding); allocates nothing.

    ``mesh`` has the axes ``("data", "tensor")``, axis types Auto. Raises ModelConfigError when heads or MLP do not divide over the tensor
    axis, ValueError for an unknown attention backend.
    """
    config.check_tensor_parallel(mesh.shape["tensor"])
    return FAMILIES[config.family](BuildContext(config, mesh, backend))  # type: ignore[call-arg]


def load_model(
    config: ModelConfig, mesh: Mesh, backend: str = "native", load_format: str = "auto", seed: int = 0
) -> CausalLM:
    """:func:`build_model`, then weights (see loader.load_weights)."""
    model = build_model(config, mesh, backend)
    load_weights(model, config, load_format, seed)
    return model
