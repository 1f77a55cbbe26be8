"""DiLoCo's main run (arXiv 2311.08105): 150M parameters on C4, M = 8, H = 500, outer Nesterov 0.7 / 0.9.

The width of the feed-forward layers is not given (ours: 4 x dim in SwiGLU's two thirds). The paper pre-trains 24k steps with
data parallelism before; here the 128 rounds start from scratch. Data: C4 or any text prepared with `python -m
fgd_jax.data.tokenize`.
"""

from fgd_jax.config import apply_variant
from fgd_jax.default_config import get_config as default


def get_config(arg: str | None = None):
  c = default()
  c.method.name = "diloco"
  c.method.outer_lr, c.method.outer_momentum = 0.7, 0.9
  c.workers, c.inner_steps, c.rounds = 8, 500, 128
  c.seq_len, c.batch_size, c.accumulate = 1024, 64, 8  # 512 sequences for all workers
  c.inner.lr, c.inner.warmup_steps, c.inner.weight_decay = 4e-4, 1000, 0.1
  c.data.source, c.data.path = "array_record", "data/c4"
  c.model.vocab_size = 32_000
  c.model.dim, c.model.layers, c.model.heads, c.model.kv_heads, c.model.ffn_dim = 896, 12, 16, 16, 2432
  c.model.scan_layers, c.model.remat, c.model.dtype = True, True, "bfloat16"
  c.eval_every, c.checkpoint_every, c.measure_every = 5, 5, 0
  c.allow_cpu = False
  apply_variant(c, arg)
  return c
