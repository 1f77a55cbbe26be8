"""Does the published bound on the workers' distance hold? Measured against 2 eta^2 sigma^2 H (1 + rho2 / (1 - rho1)).

    python benchmarks/claims_bound.py [--out=docs/claims] [--full]

The distance is the mean squared distance of two workers at the end of the inner phase; rho1 and rho2 are the expected
contractions of squared disagreement by Mix1 and Mix2; sigma^2 is the variance of one worker's stochastic gradient, summed
over parameters and measured in every round. The bound is for SGD on convex losses with an outer step of 1 without momentum.
M = 8, H = 20. Problems:

    quadratic  4096 parameters, curvatures evenly from 0 to `curvature` / (eta H), Gaussian gradient noise; `spread` is the
               distance of the workers' own optima in units of the distance that noise alone makes without curvature
    llama      the byte-level Llama of 0.46M parameters on Python's sources, inner SGD with learning rate eta

with the outer step of the bound and with Nesterov's momentum. Writes bound.csv (a line a case, resumable) and bound.png.
About 4 minutes on two busy cores; --full (three seeds, 60 rounds of llama) by estimate an hour.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import dataclasses
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import claims
import trials

METHODS = {"DiLoCo": ("diloco", {}), "GlobalM1": ("GlobalM1", {}), "GlobalM1LocalM2": ("GlobalM1LocalM2", {}),
           "LocalM1M2": ("LocalM1M2", {}), "LocalM1": ("fgd", {"mix1": "random_pairs", "mix2": "identity"})}
OUTER = ((1.0, 0.0), (0.7, 0.5), (0.7, 0.9))  # learning rate and momentum; the first is the bound's
WORKERS, H = 8, 20
HEAD = ("problem", "curvature", "spread", "eta", "method", "outer_lr", "outer_momentum", "seed", "rounds", "factor", "ratio",
        "ratio_last", "noise")


@dataclasses.dataclass(frozen=True)
class Case:
  """One training. `curvature` and `spread` are of quadratics; `eta` of llama, in a quadratic it cancels."""

  problem: str
  method: str
  outer_lr: float
  outer_momentum: float
  curvature: float = 0.0
  spread: float = 0.0
  eta: float = 1.0
  seed: int = 0
  rounds: int = 40

  def key(self) -> tuple[str, ...]:
    return tuple(str(getattr(self, name)) for name in HEAD[:9])


def cases(full: bool) -> list[Case]:
  out, seeds = [], range(3 if full else 1)
  for name in METHODS:
    for seed in seeds:
      for lr, mu in OUTER:
        out += [Case("quadratic", name, lr, mu, curvature=c, seed=seed) for c in (0.0, 0.5, 2.0, 8.0)]
        out += [Case("quadratic", name, lr, mu, curvature=2.0, spread=s, seed=seed) for s in (0.5, 2.0)]
      rounds = 60 if full else 12
      out += [Case("llama", name, 1.0, 0.0, eta=eta, seed=seed, rounds=rounds) for eta in (0.03, 0.1, 0.3)]
      out += [Case("llama", name, lr, mu, eta=0.1, seed=seed, rounds=rounds) for lr, mu in OUTER[1:]]
  return out


def train(case: Case) -> list[Any]:
  """A line of bound.csv: `ratio` is the mean of measured over predicted distance in the second half of the rounds."""
  import numpy as np
  import optax

  import fgd_jax as fgd

  name, options = METHODS[case.method]
  method = fgd.methods.make(name, outer_lr=case.outer_lr, outer_momentum=case.outer_momentum, **options)
  loss, start, batches, noise = (quadratic if case.problem == "quadratic" else llama)(case)
  init, round_fn = fgd.build_round(method, loss, optax.sgd(case.eta), workers=fgd.Workers(WORKERS), seed=case.seed,
                                   measure=("consensus",))
  rho = [getattr(round_fn.method, mixer).topology.contraction() if hasattr(round_fn.method, mixer) else 0.0
         for mixer in ("mix1", "mix2")]
  factor = 1.0 if case.method == "DiLoCo" else 1 + rho[1] / (1 - rho[0])
  state, ratios, variances = init(start), [], []
  for r in range(case.rounds):
    batch = batches(r)
    variances.append(noise(fgd.mean_params(state), batch))
    state, metrics = round_fn(state, batch)
    ratios.append(float(metrics["consensus_inner"]) / (2 * case.eta**2 * variances[-1] * H * factor))
  late = ratios[case.rounds // 2:]
  return [*case.key(), factor, float(np.mean(late)), ratios[-1], float(np.mean(variances[case.rounds // 2:]))]


def quadratic(case: Case) -> tuple[Callable, Any, Callable, Callable]:
  """Loss of a worker: sum a (w - c_m)^2 / 2 + noise . w, whose gradient noise has variance 1 in every parameter."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  size = 4096
  rng = np.random.default_rng(case.seed)
  a = jnp.asarray(case.curvature / (case.eta * H) * np.linspace(0, 1, size), jnp.float32)
  own = case.spread * case.eta * np.sqrt(H) * rng.standard_normal((WORKERS, size))
  optima = jnp.asarray(np.broadcast_to(own[:, None], (WORKERS, H, size)), jnp.float32)

  def loss(params, batch, _):
    return jnp.sum(a * (params["w"] - batch["optimum"])**2) / 2 + jnp.sum(batch["noise"] * params["w"])

  def batches(r):
    key = jax.random.fold_in(jax.random.key(case.seed), r)
    return {"optimum": optima, "noise": jax.random.normal(key, (WORKERS, H, size))}

  return loss, {"w": jnp.ones(size)}, batches, lambda params, batch: float(size)


def llama(case: Case) -> tuple[Callable, Any, Callable, Callable]:
  """The model of the other claims; its noise is measured between the gradients of all workers on a round's first batches."""
  import jax
  import jax.numpy as jnp

  from fgd_jax import config as configs
  from fgd_jax import data, models

  config = trials.config_of(claims.settings())
  corpus = data.load(config.data, config.seq_len, config.seed)
  model = models.make(configs.make_model_config(config, corpus.vocab_size))
  stream = data.round_batches(corpus.train, WORKERS, H, config.batch_size, case.seed)
  first = 4

  @jax.jit
  def variance(params, batch):
    one = lambda tokens: jax.grad(model.loss)(params, {"tokens": tokens}, None)
    grads = jax.lax.map(one, batch["tokens"][:, :first].reshape(WORKERS * first, *batch["tokens"].shape[2:]))
    return sum(jnp.sum(jnp.var(g, axis=0, ddof=1)) for g in jax.tree.leaves(grads))

  start = jax.jit(model.init)(jax.random.key(case.seed))
  return model.loss, start, lambda r: stream[r], lambda params, batch: float(variance(params, batch))


def main() -> None:
  args = claims.arguments(__doc__)
  path, wanted = os.path.join(args.out, "bound.csv"), cases(args.full)
  done = read(path)
  missing = [case for case in wanted if case.key() not in done]
  if missing:
    import tqdm

    os.environ |= trials.one_core()  # for the processes
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
      futures = [pool.submit(train, case) for case in missing]
      for future in tqdm.tqdm(concurrent.futures.as_completed(futures), "bound", len(futures), unit="run"):
        row = [str(cell) for cell in future.result()]
        done[tuple(row[:9])] = row
        claims.write_csv(path + ".tmp", HEAD, list(done.values()))
        os.replace(path + ".tmp", path)
  print(summarise(args, [done[case.key()] for case in wanted]))


def read(path: str) -> dict[tuple[str, ...], list[str]]:
  if not os.path.exists(path):
    return {}
  with open(path, newline="") as f:
    return {tuple(row[:9]): row for row in list(csv.reader(f))[1:]}


def summarise(args: argparse.Namespace, rows: list[list[str]]) -> str:
  """Draws bound.png; returns a table of measured over predicted distance, the mean over seeds."""
  table: dict[str, dict[str, list[float]]] = {}
  for row in rows:
    r = dict(zip(HEAD, row))
    what = (f"quadratic, curvature {r['curvature']}" + (f", spread {r['spread']}" if float(r["spread"]) else "")
            if r["problem"] == "quadratic" else f"llama, eta {r['eta']}")
    outer = "" if float(r["outer_momentum"]) == 0 else f", Nesterov {r['outer_lr']} / {r['outer_momentum']}"
    table.setdefault(what + outer, {}).setdefault(r["method"], []).append(float(r["ratio"]))
  mean = {what: {name: sum(v) / len(v) for name, v in cells.items()} for what, cells in table.items()}
  from matplotlib.figure import Figure

  figure = Figure(figsize=(10, 0.3 * len(mean) + 1.5), layout="constrained")
  axes = figure.subplots()
  for c, name in enumerate(METHODS):
    axes.plot([cells[name] for cells in mean.values()], range(len(mean)), "o", ms=5, color=f"C{c}", label=name)
  axes.set_yticks(range(len(mean)), mean)
  axes.invert_yaxis()
  axes.set_xscale("log")
  axes.axvline(1, color="0.4", lw=1)
  axes.set_xlabel("measured squared distance / bound (right of the line: the bound is broken)")
  axes.grid(alpha=0.3)
  axes.legend(fontsize=8)
  figure.savefig(os.path.join(args.out, "bound.png"), dpi=120)
  return trials.markdown(("measured / bound", *METHODS), [
      [what, *(f"{cells[name]:.2f}" for name in METHODS)] for what, cells in mean.items()])


if __name__ == "__main__":
  main()
