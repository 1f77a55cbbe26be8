"""What a run starts from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fgd_jax import models
from fgd_jax.export.huggingface import read_folder

PyTree = Any


def first_params(config: ConfigDict, model: models.Model) -> PyTree:
  """Fresh parameters, or those of config.init_from in the model's own dtype.

  Raises:
    ValueError: a folder of another model, naming the key.
  """
  if config.init_from is None:
    return jax.jit(model.init)(jax.random.key(config.seed))
  found = read_folder(config.init_from, config.model.scan_layers)
  for key in ("dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size", "rope_theta", "norm_eps", "tied"):
    ours, theirs = getattr(model.config, key), getattr(found.model, key)
    if ours != theirs:
      raise ValueError(f"init_from={config.init_from!r} has {key}={theirs} and this run model.{key}={ours}; set "
                       f"model.{key}={theirs}, or start from another folder.")
  shapes = jax.eval_shape(model.init, jax.random.key(config.seed))
  return jax.tree.map(lambda x, shape: jnp.asarray(x, shape.dtype), found.params, shapes)
