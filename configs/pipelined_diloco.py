"""Pipelined DiLoCo (ours) at the quickstart's size, M = 8, H = 20: ten flat fragments, one always in flight."""

from fgd_jax.config import apply_variant
from fgd_jax.default_config import get_config as default


def get_config(arg: str | None = None):
  c = default()
  c.method.name = "pipelined_diloco"
  c.method.fragments, c.method.order = 10, "flat"
  c.method.landing, c.method.guess = "add", "continue"
  c.method.outer_lr, c.method.outer_momentum = 0.7, 0.7
  c.workers, c.inner_steps, c.rounds = 8, 20, 100
  c.data.max_bytes = 16_000_000
  c.model.dim, c.model.layers, c.model.ffn_dim = 96, 4, 256
  c.inner.lr = 3e-3
  apply_variant(c, arg)
  return c
