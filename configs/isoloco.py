"""IsoLoCo's 178M run (arXiv 2607.03011, the authors' configuration): M = 8, H = 30, 3.55B tokens, outer 1.8 / 0.8.

`:method=diloco,method.outer_lr=0.7,method.outer_momentum=0.9` is their DiLoCo baseline; the merging rules of their sweep are
`method=diloco` with method.aggregator=ties (0.7, momentum 0), dare (1.5), tsv_m (0.6), all at inner.lr=2.76e-3, and iso_c
(2.1), iso_cts (3.1) at 3.91e-3.
"""

from fgd_jax.config import apply_variant
from fgd_jax.default_config import get_config as default


def get_config(arg: str | None = None):
  c = default()
  c.method.name = "isoloco"
  c.method.outer_lr, c.method.outer_momentum = 1.8, 0.8
  c.workers, c.inner_steps, c.rounds = 8, 30, 226  # 3.55B tokens
  c.seq_len, c.batch_size, c.accumulate = 2048, 32, 4
  c.inner.lr, c.inner.warmup_steps, c.inner.b2, c.inner.end_lr_fraction = 1.38e-3, 678, 0.95, 0.1
  c.data.source, c.data.path = "array_record", "data/dclm"
  c.model.vocab_size = 32_000
  c.model.dim, c.model.layers, c.model.heads, c.model.kv_heads, c.model.ffn_dim = 1024, 9, 8, 8, 2688
  c.model.scan_layers, c.model.remat, c.model.dtype = True, True, "bfloat16"
  c.eval_every, c.checkpoint_every, c.measure_every = 10, 10, 0
  c.allow_cpu = False
  apply_variant(c, arg)
  return c
