"""The 1.5B Llama 3 of the FGD paper (arXiv 2606.22768), M = 8, H = 100, on one accelerator slice or more for each worker.

The shape is identified from the published 1.5B and 43 %: Llama-3.2-1B's with untied embeddings has 1.498B parameters, of
which embedding, LM head and two layers are 43.2 %. Batch size, sequence length and learning rates of the paper are unknown;
those below are ours. Data: FineWeb (or any text) prepared with `python -m fgd_jax.data.tokenize`.
"""

from fgd_jax.config import apply_variant
from fgd_jax.default_config import get_config as default


def get_config(arg: str | None = None):
  c = default()
  c.workers = 8
  c.inner_steps = 100
  c.rounds = 100
  c.batch_size = 64
  c.accumulate = 8
  c.seq_len = 2048
  c.eval_every = 5
  c.eval_batches = 16
  c.measure_every = 10
  c.measure_sequences = 1
  c.checkpoint_every = 5
  c.allow_cpu = False

  c.data.source = "array_record"
  c.data.path = "data/fineweb"

  c.model.vocab_size = 128_256
  c.model.dim = 2048
  c.model.layers = 16
  c.model.heads = 32
  c.model.kv_heads = 8
  c.model.ffn_dim = 8192
  c.model.rope_theta = 500_000.0
  c.model.tied = False
  c.model.scan_layers = True
  c.model.remat = True
  c.model.dtype = "bfloat16"

  c.inner.lr = 3e-4
  c.inner.warmup_steps = 1000

  c.method.name = "GlobalM1LocalM2-subset"
  apply_variant(c, arg)
  return c
