"""The 1.5B runs of the FGD paper (arXiv 2606.22768): Llama 3, FineWeb, M = 8 and 16 workers, H = 100, 500 and 1000.

    python -m fgd_jax.train --config=configs/paper/fgd_1p5b.py:method=GlobalM1LocalM2,tokens=30e9 --workdir=runs/fgd
    python -m fgd_jax.train --config=configs/paper/fgd_1p5b.py:method=diloco,workers=16,inner_steps=500 --workdir=runs/diloco

`tokens` (10e9 where it is left out) sets the rounds, also after `--config.workers=16` and the like; other words set keys.
RUNS below has the results table.

One worker a chip of v5p:2x2x2 (M = 8) or v5p:2x2x4 (M = 16): docs/claims/paper.md says what was compiled for them, what is
known of the paper's runs, and what one of them costs. None has been run.

Known of the paper, from summaries: the model (1.5B; the shape is identified by the subset's 43 %), the data set, M, H, AdamW
inside, Nesterov outside, 100 and 200 Mbit/s, and the perplexities in RUNS. Unknown, and so ours:

    batch         2^16 tokens a worker and step, half a million for M = 8. Derived up to a factor of two: at 200 Mbit/s 1T
                  tokens take 16 weeks (GlobalM1), and an inner phase 0.56 of a ring all-reduce at 100 Mbit/s, which is 61k
                  tokens a worker and step where float32 travels, and 30k where bfloat16 does
    seq_len       2048
    inner.*       peak learning rate, warm-up, cosine to a tenth at the end of the run, betas, decay and clipping
    method.*      outer learning rate and momentum: DiLoCo's 0.7 / 0.9, for GlobalM1 0.4 / 0.8 (0.7 / 0.9 is unstable there)
    evaluation    of which parameters (here the workers' mean), on which text, and with which tokenizer (here Llama 3's)
    length        whether the 10B column is a run of its own (here it is) or a point of the 30B run

Data, once (the downloads were not tried; 100BT has more than a pass of 30B tokens, in 4 bytes each):

    hf download HuggingFaceFW/fineweb --repo-type dataset --include "sample/100BT/*" --local-dir data/raw
    hf download meta-llama/Llama-3.2-1B tokenizer.json --local-dir data/llama3
    pip install '.[parquet]'
    python -m fgd_jax.data.tokenize --input=data/raw/sample/100BT --output=data/fineweb \
      --tokenizer=data/llama3/tokenizer.json --seq_len=2048 --heldout_fraction=0.001
"""

import os
import runpy

from fgd_jax.config import apply_variant

LLAMA = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "llama_1p5b.py")

# Validation perplexity, H = 100, M = 8, after                 10B tokens   30B tokens
RUNS = {
    "Sync-DP": "method=data_parallel",                         # 17.53      unknown
    "DiLoCo": "method=diloco",                                 # 18.65      15.52
    "GlobalM1LocalM2": "method=GlobalM1LocalM2",               # 18.80      15.60
    "GlobalM1LocalM2-subset": "method=GlobalM1LocalM2-subset",  # 19.15      unknown
    "LocalM1M2": "method=LocalM1M2",                           # 19.37      unknown
    "GlobalM1": "method=GlobalM1",                             # 19.42      unknown
    "GlobalM1S": "method=GlobalM1,method.mix_outer_state=mix1",  # unknown    unknown (periodic spikes; our reading of the S)
}
# M = 16, H = 500 and H = 1000: no perplexity is known, only that the gap grows with both.


def budget(words: list[str]) -> float:
  """Tokens of all workers, from the last word tokens= where there is one."""
  text = [word.partition("=")[2] for word in words if is_budget(word)][-1:] or ["10e9"]
  try:
    tokens = float(text[0])
  except ValueError:
    tokens = 0.0
  if not 0 < tokens < float("inf"):
    raise ValueError(f"Config variant 'tokens={text[0]}' must be a positive number, such as tokens=30e9.")
  return tokens


def is_budget(word: str) -> bool:
  return word.partition("=")[0].strip() == "tokens"


def get_config(arg: str | None = None):
  c = runpy.run_path(LLAMA)["get_config"]()  # the model and its precision
  c.seq_len, c.batch_size, c.accumulate = 2048, 32, 16
  c.eval_batches, c.eval_batch_size = 64, 4  # half a million held-out tokens
  c.measure_every = 0  # above 0, consensus and JS distance, in a second program that blocks
  c.network.bandwidth, c.network.step_seconds = "200Mbps", "4.7"  # the paper's, for simulated_seconds in metrics.jsonl
  words = (arg or "").replace("method=GlobalM1S", RUNS["GlobalM1S"]).split(",")
  of = c.get_ref  # computed from other keys, whatever sets them
  a_round = of("workers") * of("batch_size") * of("seq_len") * of("inner_steps")
  c.rounds = (a_round // 2 + round(budget(words))) // a_round
  for key in ("eval_every", "checkpoint_every"):  # every 1000 inner steps, 1.3 hours of an A100
    c[key] = (of("inner_steps") + 999) // of("inner_steps")
  apply_variant(c, ",".join(word for word in words if not is_budget(word)))
  return c
