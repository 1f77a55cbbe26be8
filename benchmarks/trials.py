"""Trains settings on seeds, a few at a time, each on one core, into a file of runs that every later command reuses.

    python benchmarks/trials.py "workers=8,inner_steps=20,rounds=5,method=diloco" 1,2

trains one setting (words of configs/quickstart.py) on two seeds and prints a line of JSON for each. Other scripts call
`runs`, which starts such processes for what its file does not hold yet, so that an interrupted script goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclasses.dataclass(frozen=True)
class Entry:
  """A method of a comparison: its name in the config, fixed options, and the options that are tuned."""

  method: str
  fixed: str = ""
  tuned: tuple[tuple[str, tuple[float, ...]], ...] = ()

  def grid(self) -> list[str]:
    """The tuned options as config words."""
    names = [name for name, _ in self.tuned]
    return [",".join(f"{n if '.' in n else f'method.{n}'}={v}" for n, v in zip(names, values))
            for values in itertools.product(*(values for _, values in self.tuned))]

  def words(self, settings: str, setting: str) -> str:
    """All config words of a run."""
    return ",".join(filter(None, (settings, f"method={self.method}", self.fixed, setting)))


def outer(lrs=(0.4, 0.7, 1.0), momenta=(0.4, 0.7)):
  """The usual two tuned options."""
  return ("outer_lr", lrs), ("outer_momentum", momenta)


def config_of(words: str) -> Any:
  from fgd_jax import config as configs

  config = runpy.run_path(os.path.join(ROOT, "configs/quickstart.py"))["get_config"](words)
  configs.validate(config)
  return config


def trained(words: str, seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
  """Trains one setting on several seeds with one executable; yields a row for each.

  A seed is that of the initial parameters, of the order of the data and of faults; mixing matrices are the same for all.
  `curve` has a point every `eval_every` rounds and at the end, with consensus (L2) and JS distance at the end of the inner
  phase every `measure_every` rounds and, unless that is 0, at the end.
  """
  import jax
  import numpy as np

  import fgd_jax as fgd
  from fgd_jax import config as configs
  from fgd_jax import data, faults, models
  from fgd_jax import train as trainer

  config = config_of(words)
  corpus = data.load(config.data, config.seq_len, config.seed)
  heldout = data.heldout_batches(corpus.heldout, config.eval_batch_size, config.eval_batches)["tokens"]
  model = models.make(configs.make_model_config(config, corpus.vocab_size))
  probe = jax.numpy.asarray(heldout.reshape(-1, heldout.shape[-1])[:config.measure_sequences, :-1])
  workers = fgd.Workers(config.workers)
  init, round_fn = configs.build_round(
      config, model.loss, workers, measure=("consensus", trainer.js_of(model.apply, probe)))
  evaluate = trainer.make_evaluation(model.loss, heldout, workers)
  for seed in seeds:
    began, curve = time.time(), []
    state = init(jax.jit(model.init)(jax.random.key(seed)))
    batches = data.round_batches(corpus.train, config.workers, config.inner_steps, config.batch_size, seed)
    config.faults.seed = seed
    played = faults.simulate(config, round_fn, state.params, batches[0]) if configs.simulated(config) else None
    for r in range(config.rounds):
      links = played.links(r) if config.faults.drop else None
      due = lambda every, r=r: every and ((r + 1) % every == 0 or r == config.rounds - 1)
      state, metrics = round_fn(state, batches[r], measured=bool(due(config.measure_every)), links=links)
      if due(config.eval_every) or r == config.rounds - 1:
        metrics |= evaluate(round_fn.eval_params(state), state.params)
        curve.append({"round": r + 1, "train_loss": float(np.mean(metrics["loss"])),
                      **{key: float(metrics[key]) for key in ("eval_loss", "eval_loss_workers")}})
        if due(config.measure_every):
          curve[-1] |= {"consensus_l2": float(np.sqrt(metrics["consensus_inner"])),
                        "js_distance": float(metrics["js_distance"])}
    simulated = {} if played is None else {
        "utilization": played.utilization[-1], "simulated_seconds": played.seconds[-1],
        "failed": sum(map(len, played.failures.values()))}
    yield {"words": words, "seed": seed, **curve[-1],
           "bytes_overlapped": metrics["bytes_overlapped"], "bytes_blocking": metrics["bytes_blocking"],
           "tokens": config.rounds * config.workers * config.inner_steps * config.batch_size * config.seq_len,
           "parameters": sum(x[0].size for x in jax.tree.leaves(state.params)), "seconds": time.time() - began, **simulated,
           "curve": curve}


def read(path: str) -> dict[tuple[str, int], dict[str, Any]]:
  """The runs of a file by (words, seed); a line that was cut short by an interruption does not count."""
  out = {}
  if os.path.exists(path):
    with open(path) as f:
      for line in f:
        if line.endswith("}\n"):
          row = json.loads(line)
          out[row["words"], row["seed"]] = row
  return out


def runs(path: str, wanted: Iterable[tuple[str, Sequence[int]]], jobs: int = 2, title: str = ""
         ) -> Mapping[tuple[str, int], dict[str, Any]]:
  """The runs of `path` by (words, seed), after those of `wanted`, (words, seeds), that it lacks were trained.

  Args:
    jobs: processes at a time, each on one core.
    title: of the progress bar.

  Raises:
    RuntimeError: a training failed; what was trained is kept.
  """
  import tqdm

  done, missing = read(path), dict[str, list[int]]()
  for words, seeds in wanted:
    missing.setdefault(words, []).extend(s for s in seeds if (words, s) not in done and s not in missing.get(words, ()))
  pieces = [(words, seeds[i:i + 4]) for words, seeds in missing.items() for i in range(0, len(seeds), 4)]
  if not pieces:
    return done
  os.makedirs(os.path.dirname(path), exist_ok=True)
  if os.path.exists(path):
    with open(path, "rb+") as f:
      text = f.read()
      f.truncate(text.rfind(b"\n") + 1)  # half a line
  lock, failed = threading.Lock(), []
  with (tqdm.tqdm(total=sum(len(seeds) for _, seeds in pieces), desc=title, unit="run", smoothing=0.05) as bar,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool):

    def train(piece: tuple[str, list[int]]) -> None:
      for line in _child(*piece):
        with lock, open(path, "a") as f:
          f.write(line)
          bar.update()

    for piece, future in {piece[0] + str(piece[1]): pool.submit(train, piece) for piece in pieces}.items():
      try:
        future.result()
      except subprocess.CalledProcessError:
        failed.append(piece)
  if failed:
    raise RuntimeError(f"{len(failed)} trainings failed, the first with {failed[0]}; the same command tries them again.")
  return read(path)


def one_core() -> dict[str, str]:
  """The environment of a process that computes on one core (two threads each made two at a time 15 % slower)."""
  flags = (os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false").strip()
  return os.environ | {"XLA_FLAGS": flags, "OMP_NUM_THREADS": "1", "NPROC": "1"}


def _child(words: str, seeds: list[int]) -> Iterator[str]:
  """The lines of a process that trains, on one core."""
  command = [sys.executable, os.path.abspath(__file__), words, ",".join(map(str, seeds))]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one_core()) as process:
    assert process.stdout is not None
    yield from process.stdout
  if process.returncode:
    raise subprocess.CalledProcessError(process.returncode, command)


def best(done: Mapping[tuple[str, int], dict[str, Any]], candidates: Sequence[str], seeds: Sequence[int]) -> str:
  """The words with the least mean held-out loss over the seeds; runs that diverged come last."""
  def mean(words):
    values = [done[words, seed]["eval_loss"] for seed in seeds]
    value = sum(values) / len(values)
    return (value != value, value)
  return min(candidates, key=mean)


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
  """Mean and half width of Student's confidence interval."""
  import numpy as np
  from scipy import stats

  n = len(values)
  half = stats.t.ppf((1 + level) / 2, n - 1) * np.std(values, ddof=1) / np.sqrt(n) if n > 1 else float("nan")
  return float(np.mean(values)), float(half)


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  line = lambda cells: "| " + " | ".join(map(str, cells)) + " |"
  return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("words", help="key=value,... of configs/quickstart.py")
  parser.add_argument("seeds", help="numbers, comma separated")
  args = parser.parse_args()
  for row in trained(args.words, [int(s) for s in args.seeds.split(",")]):
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
  main()
