"""What the scripts claims_*.py share: the settings of their trainings, methods with their grids, and simulated time.

All runs are lines of one file, docs/claims/runs.jsonl, so that a run that two scripts need is trained once. The settings:
configs/quickstart.py's byte-level Llama of 0.46M parameters on Python's own sources, M workers with batches of 2 sequences
of 64 bytes, AdamW with lr 3e-3 and a cosine that ends with the run. Runs that are compared see equally many tokens.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import trials
from trials import Entry, outer

TOKENS = 409_600  # of a run: 400 steps of 8 workers
MODELS = {"0.46M": "", "0.9M": "model.dim=128,model.ffn_dim=352", "4M": "model.dim=256,model.layers=6,model.ffn_dim=704"}
LOW, HIGH = outer((0.3, 0.5, 0.7), (0.3, 0.6)), outer((0.4, 0.7, 1.0), (0.3, 0.6))
METHODS = {
    "data_parallel": Entry("data_parallel", "", (("inner.lr", (1.5e-3, 2e-3, 3e-3, 4e-3, 6e-3, 8e-3)),)),
    "DiLoCo": Entry("diloco", "", HIGH),
    "GlobalM1LocalM2": Entry("GlobalM1LocalM2", "", HIGH),
    "GlobalM1LocalM2-subset": Entry("GlobalM1LocalM2-subset", "", LOW),
    "LocalM1M2": Entry("LocalM1M2", "", HIGH),
    "GlobalM1": Entry("GlobalM1", "", LOW),
}
STEP_SECONDS = 1.0


def settings(workers: int = 8, inner_steps: int = 20, tokens: int = TOKENS, model: str = "0.46M",
             tuning: bool = False) -> str:
  """Config words of a run; a run of tuning is evaluated at its end alone, and not measured."""
  steps = tokens // (workers * 2 * 64)
  if steps % inner_steps:
    raise ValueError(f"tokens={tokens} are {steps} steps of {workers} workers, which H={inner_steps} does not divide.")
  rounds = steps // inner_steps
  often = "eval_every=0,measure_every=0" if tuning else f"eval_every={max(1, rounds // 5)},measure_every={rounds}"
  return ",".join(filter(None, (
      f"workers={workers},inner_steps={inner_steps},rounds={rounds},batch_size=2,seq_len=64,inner.lr=3e-3,"
      f"inner.warmup_steps=20,eval_batches=8,eval_batch_size=16,measure_sequences=8,{often}", MODELS[model])))


def tuned(args: argparse.Namespace, methods: dict[str, Entry]) -> dict[str, str]:
  """The best setting of every method's grid on the tuning seeds."""
  base = settings(tuning=True)
  grids = {name: [entry.words(base, setting) for setting in entry.grid()] for name, entry in methods.items()}
  wanted = [(words, args.tune_seeds) for grid in grids.values() for words in grid]
  done = trials.runs(store(args), wanted, args.jobs, "tuning")
  chosen = {name: trials.best(done, grid, args.tune_seeds) for name, grid in grids.items()}
  return {name: methods[name].grid()[grids[name].index(chosen[name])] for name in methods}


def store(args: argparse.Namespace) -> str:
  return os.path.join(args.out, "runs.jsonl")


def seconds(words: str, bandwidth: str) -> tuple[float, float]:
  """Simulated seconds of a run and its compute utilisation, with steps of STEP_SECONDS and `bandwidth` for each worker."""
  from fgd_jax import netsim

  config = trials.config_of(words)
  plan, _ = netsim.plan_of_config(config)
  result = netsim.simulate(plan, netsim.read_links(bandwidth, config.workers), netsim.StepTimes((STEP_SECONDS,)),
                           rounds=config.rounds)
  return result.round_ends[-1], result.compute_utilization


def like_100_mbps(words: str, utilisation: float = 0.36) -> float:
  """Mbit/s at which DiLoCo's `words` have the utilisation that the paper's DiLoCo has at 100 Mbit/s.

  A blocking exchange takes a time that falls as 1 / bandwidth, so one simulation says it.
  """
  _, at_one = seconds(words, "1Mbps")
  return (1 / at_one - 1) / (1 / utilisation - 1)


def curve_at(run: dict[str, Any], total: float) -> tuple[list[float], list[float]]:
  """Simulated hours and held-out losses of a run that takes `total` seconds."""
  curve = run["curve"]
  return [total * p["round"] / curve[-1]["round"] / 3600 for p in curve], [p["eval_loss"] for p in curve]


def arguments(doc: str | None, seeds: int | None = None, full: int | None = None, **switches: str) -> argparse.Namespace:
  """The command line: out, full, jobs, and `final`, the paired seeds 1, 2, ... (by default so many, with --full `full`).

  Args:
    switches: further flags that are on or off, with their help.
  """
  p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--out", default=os.path.join(trials.ROOT, "docs/claims"), help="folder of runs, tables and figures; the "
                 "same folder goes on where it stopped (default docs/claims)")
  p.add_argument("--full", action="store_true", help="the full size")
  p.add_argument("--jobs", type=int, default=2, help="trainings at a time, each on one core")
  if seeds is not None:
    p.add_argument("--seeds", type=int, help=f"paired seeds of the main table, at least 2 (default {seeds}, full {full})")
  for name, text in switches.items():
    p.add_argument(f"--{name}", action="store_true", help=text)
  args = p.parse_args()
  if seeds is not None:
    count = args.seeds or (full if args.full else seeds)
    if count < 2:
      p.error(f"--seeds={count} must be at least 2 for a confidence interval.")
    args.final = list(range(1, count + 1))
  args.tune_seeds = [101, 102, 103] if args.full else [101]
  os.makedirs(args.out, exist_ok=True)
  return args


def write_pairs(path: str, words: dict[str, str], done, seeds: Sequence[int]) -> None:
  """The paired difference in held-out loss of every two runs, half its 95 % interval, and the two-sided p of its t test."""
  import itertools

  from scipy import stats

  rows = []
  for a, b in itertools.combinations(words, 2):
    x, y = ([done[words[name], s]["eval_loss"] for s in seeds] for name in (a, b))
    rows.append([a, b, len(seeds), *trials.interval([p - q for p, q in zip(x, y)]), stats.ttest_rel(x, y).pvalue])
  write_csv(path, ("method", "other", "seeds", "minus_other", "minus_other_ci95", "p"), rows)


def write_csv(path: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
  import csv

  with open(path, "w", newline="") as f:
    writer = csv.writer(f, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
