"""A small Llama (10M parameters, layers scanned, bf16 activations) to see what a compiler makes of a round.

    python -m fgd_jax.aot --config=configs/overlap.py:workers=4,mesh.fsdp=2,method=LocalM1M2 --topology=v5e:2x4
"""

from fgd_jax.config import apply_variant
from fgd_jax.default_config import get_config as default


def get_config(arg: str | None = None):
  c = default()
  c.workers = 8
  c.inner_steps = 16
  c.batch_size = 8
  c.seq_len = 256
  c.measure_every = 0

  c.data.source = "synthetic"

  c.model.vocab_size = 1024
  c.model.dim = 512
  c.model.layers = 4
  c.model.heads = 8
  c.model.kv_heads = 4
  c.model.ffn_dim = 1024
  c.model.scan_layers = True
  c.model.remat = True
  c.model.dtype = "bfloat16"

  c.method.name = "GlobalM1LocalM2"
  apply_variant(c, arg)
  return c
