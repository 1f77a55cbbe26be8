"""Decoupled DiLoCo on one machine: four learners and a syncer on Ray, the quickstart's model, minutes on 2 cores."""

from fgd_jax.config import apply_variant
from fgd_jax.default_config import get_config as default


def get_config(arg: str | None = None):
  c = default()
  c.learners, c.quorum, c.steps = 4, 1, 240
  c.inner_steps = 24
  c.decoupled.fragments = 12
  c.eval_every = 24
  c.checkpoint_every = 60
  c.measure_every = 0
  c.data.max_bytes = 16_000_000
  c.model.dim = 96
  c.model.layers = 4
  c.model.ffn_dim = 256
  c.inner.lr = 6e-3
  c.decoupled.outer_momentum = 0.5
  apply_variant(c, arg)
  return c
