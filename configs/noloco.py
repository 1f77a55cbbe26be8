"""NoLoCo's 125M run (arXiv 2506.10911, values of the authors' code): H = 50, pairs, beta = gamma = 0.7, alpha = 0.5.

25,000 steps, without the random pipeline routing of the paper. M = 8 is one of its data-parallel
degrees (4 to 16); the batch is ours.
"""

from fgd_jax.config import apply_variant
from fgd_jax.default_config import get_config as default


def get_config(arg: str | None = None):
  c = default()
  c.method.name = "noloco"
  c.method.group_size, c.method.alpha, c.method.beta, c.method.gamma = 2, 0.5, 0.7, 0.7
  c.workers, c.inner_steps, c.rounds = 8, 50, 500
  c.seq_len, c.batch_size, c.accumulate = 1024, 32, 4
  c.inner.lr, c.inner.warmup_steps, c.inner.end_lr_fraction = 6e-4, 1000, 0.1
  c.data.source, c.data.path = "array_record", "data/c4"
  c.model.vocab_size = 128_256
  c.model.dim, c.model.layers, c.model.heads, c.model.kv_heads, c.model.ffn_dim = 768, 12, 12, 12, 3072
  c.model.scan_layers, c.model.remat, c.model.dtype = True, True, "bfloat16"
  c.eval_every, c.checkpoint_every, c.measure_every = 10, 10, 0
  c.allow_cpu = False
  apply_variant(c, arg)
  return c
