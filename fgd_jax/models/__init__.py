"""Model families: each file has a frozen config and `make(config) -> Model`, pure functions of plain nested dicts."""

from fgd_jax.models.llama import LlamaConfig, Model, count_params, make, stack_layers, unstack_layers

__all__ = ["LlamaConfig", "Model", "count_params", "make", "stack_layers", "unstack_layers"]
