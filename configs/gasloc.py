"""GASLoC (arXiv 2606.11081) in the shape of NoLoCo's 125M run; its own values were not available, all here are ours."""

from fgd_jax.config import apply_variant
from fgd_jax.default_config import get_config as default


def get_config(arg: str | None = None):
  c = default()
  c.method.name = "gasloc"
  c.method.topology, c.method.momentum_mixing = "random_pairs", "local"
  c.method.eta, c.method.alpha, c.method.gamma = 0.7, 1.0, 0.5
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
