"""A byte-level Llama of 0.46M parameters on Python's own sources, 4 workers, FGD GlobalM1LocalM2: minutes on 2 cores."""

from fgd_jax.config import apply_variant
from fgd_jax.default_config import get_config as default


def get_config(arg: str | None = None):
  c = default()
  c.rounds = 300
  c.inner_steps = 5
  c.eval_every = 20
  c.measure_every = 20
  c.checkpoint_every = 50
  c.data.max_bytes = 16_000_000
  c.model.dim = 96
  c.model.layers = 4
  c.model.ffn_dim = 256
  c.inner.lr = 6e-3
  c.method.outer_lr = 0.7
  c.method.outer_momentum = 0.5
  apply_variant(c, arg)
  if c.method.name in ("streaming_diloco", "pipelined_diloco") and not (c.method.fragments or c.method.fragment_patterns):
    c.method.fragments = c.model.layers + 1 if c.inner_steps % (c.model.layers + 1) == 0 else 1
  return c
