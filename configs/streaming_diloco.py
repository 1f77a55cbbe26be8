"""Streaming DiLoCo's 500M run (arXiv 2501.18512): M = 2, H = 30, strided fragments of 3 layers, delay 1, blend 0.5, E3M0.

18 layers in 6 fragments, which the embedding and the head join so that 6 divides H (the paper gives them a fragment of their
own, which `method.ends=own,method.fragments=7` with an inner_steps that 7 divides is). The blocks and the rounding of E3M0
are ours.
"""

from fgd_jax.config import apply_variant
from fgd_jax.default_config import get_config as default


def get_config(arg: str | None = None):
  c = default()
  c.method.name = "streaming_diloco"
  c.method.outer_lr, c.method.outer_momentum = 0.4, 0.9
  c.method.fragments, c.method.order, c.method.ends = 6, "strided", "joined"
  c.method.delay, c.method.blend, c.method.codec = 1, 0.5, "e3m0"
  c.workers, c.inner_steps, c.rounds = 2, 30, 700
  c.seq_len, c.batch_size, c.accumulate = 1024, 128, 8  # the paper's batch is not restated
  c.inner.lr, c.inner.warmup_steps, c.inner.b2, c.inner.end_lr_fraction = 4e-4, 1000, 0.99, 0.05
  c.data.source, c.data.path = "array_record", "data/c4"
  c.model.vocab_size = 32_000
  c.model.dim, c.model.layers, c.model.heads, c.model.kv_heads, c.model.ffn_dim = 1536, 18, 24, 24, 6144
  c.model.scan_layers, c.model.remat, c.model.dtype = True, True, "bfloat16"
  c.eval_every, c.checkpoint_every, c.measure_every = 20, 20, 0
  c.allow_cpu = False
  apply_variant(c, arg)
  return c
