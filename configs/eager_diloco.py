"""Eager updates' 500M run (arXiv 2502.12996): M = 2, H = 30, outer lr 0.4, E3M0 outer gradients, one round of delay."""

from fgd_jax.config import apply_variant
from fgd_jax.default_config import get_config as default


def get_config(arg: str | None = None):
  c = default()
  c.method.name = "eager_diloco"
  c.method.outer_lr, c.method.outer_momentum = 0.4, 0.9
  c.method.delay, c.method.codec = 1, "e3m0"
  c.workers, c.inner_steps, c.rounds = 2, 30, 700
  c.seq_len, c.batch_size, c.accumulate = 1024, 128, 8  # not given
  c.inner.lr, c.inner.warmup_steps, c.inner.b2, c.inner.end_lr_fraction = 4e-4, 1000, 0.99, 0.05
  c.data.source, c.data.path = "array_record", "data/c4"
  c.model.vocab_size = 32_000
  c.model.dim, c.model.layers, c.model.heads, c.model.kv_heads, c.model.ffn_dim = 1536, 18, 24, 24, 6144
  c.model.scan_layers, c.model.remat, c.model.dtype = True, True, "bfloat16"
  c.eval_every, c.checkpoint_every, c.measure_every = 20, 20, 0
  c.allow_cpu = False
  apply_variant(c, arg)
  return c
