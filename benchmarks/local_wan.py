"""Compute utilisation on a real slow network, beside the simulator's. launch/local_wan.sh starts several of these processes.

Every process is one worker. First a mean and a swap of the parameters are timed, by rounds of DiLoCo and of pairs in which
all workers begin to exchange at the same moment; they calibrate the simulator. Then each method trains some rounds with the
host form of overlap. Its utilisation is the time of its inner steps divided by the time that passed, averaged over workers,
over the rounds after the first; the simulator is given the measured time of an inner step of each worker.

Process 0 prints a table, and writes everything to WORKDIR/local_wan.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import fgd_jax as fgd
from fgd_jax import config as configs
from fgd_jax import data, distributed, models, netsim
from fgd_jax.netsim.plan import load_config
from fgd_jax.netsim.show import table


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--config", default="configs/quickstart.py")
  parser.add_argument("--workdir", default="runs/local_wan")
  parser.add_argument("--methods", default="diloco,GlobalM1,GlobalM1LocalM2", help="names, joined by commas")
  parser.add_argument("--rate", default="10mbit", help="of each worker's link, as tc writes it")
  parser.add_argument("--rounds", type=int, default=6, help="of each method, besides the first")
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  args = parser.parse_args()
  try:
    report = measure(args)
  except (ValueError, OSError, distributed.PeerError) as e:
    sys.exit(f"local_wan: {e}")
  if distributed.leader():
    os.makedirs(args.workdir, exist_ok=True)
    with open(os.path.join(args.workdir, "local_wan.json"), "w", encoding="utf-8") as f:
      json.dump(report, f, indent=2)
    print(json.dumps(report) if args.json else show(report), flush=True)
  distributed.finish()


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Calibration and all methods; the same in every process."""
  path, _, settings = args.config.partition(":")
  config = lambda method: load_config(f"{path}:method={method},overlap.form=host" + (f",{settings}" if settings else ""))
  calibration = {"mean": config("diloco"), "swap": config("fgd,method.mix1=identity,method.mix2=random_pairs")}
  runs = {name: config(name) for name in args.methods.split(",")}
  first = next(iter(runs.values()))
  for c in (*runs.values(), *calibration.values()):
    configs.validate(c)
  distributed.start({"config": args.config, "methods": args.methods, "rounds": args.rounds}, first.limits.start)
  configs.set_cpu_devices(first, distributed.count())
  workers = configs.make_workers(first)
  distributed.preflight(workers.mesh, first.limits.start)
  with distributed.Watch(600) as watch:
    watch.at("The calibration did not end")
    corpus = data.load(first.data, first.seq_len, first.seed)
    model = models.make(configs.make_model_config(first, corpus.vocab_size))
    params = jax.jit(model.init)(jax.random.key(first.seed))
    seconds = {kind: calibrate(c, model, params, corpus, workers) for kind, c in calibration.items()}
    results = {}
    for name, c in runs.items():
      watch.at(f"The rounds of {name} did not end")
      results[name] = train(c, model, params, corpus, workers, args.rounds) | simulated(name, c, corpus.vocab_size, seconds,
                                                                                       args.rate)
      results[name]["modelled"] = model_of(results[name])
  sizes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
  return {"workers": workers.count, "inner_steps": first.inner_steps, "rate": args.rate, "parameter_bytes": sizes,
          "mean_seconds": seconds["mean"], "swap_seconds": seconds["swap"], "methods": {
              name: {k: v for k, v in r.items() if k != "plan"} for name, r in results.items()}}


class Trainer:
  """Rounds of one method.

  Args:
    rounds: for which batches are read before the first.
  """

  def __init__(self, config: Any, model: Any, params: Any, corpus: data.Corpus, workers: fgd.Workers, rounds: int):
    init, self.round_fn = fgd.build_round(configs.make_method(config), model.loss, configs.make_inner_optimizer(config),
                                          workers=workers, seed=config.seed, overlap="host")
    of_rounds = data.round_batches(corpus.train, config.workers, config.inner_steps, config.batch_size, config.seed,
                                   only=workers.local)
    self.batches = [self.round_fn.from_local(of_rounds[r]) for r in range(rounds)]
    self.state = init(params)
    self.programs = self.round_fn.compile(self.state, self.batches[0], measured=(False,)).values()

  def round(self, r: int) -> tuple[jax.Array, dict[str, float]]:
    """Loss [M, H] and timeline of the next round."""
    self.state, metrics = self.round_fn(self.state, self.batches[r], measured=False)
    return metrics["loss"], max((p.timeline for p in self.programs), key=lambda t: t.get("begin", 0.0))


def calibrate(config: Any, model: Any, params: Any, corpus: data.Corpus, workers: fgd.Workers, repeats: int = 3) -> float:
  """Median seconds of a method's blocking exchange of the parameters when nobody is late."""
  trainer, times = Trainer(config, model, params, corpus, workers, repeats + 1), []

  def timed(land: Callable) -> Callable:
    def together(*args):
      distributed.together("calibration", lambda: None, 600)
      began = time.monotonic()
      out = jax.block_until_ready(land(*args))
      times.append(time.monotonic() - began)
      return out
    return together

  for program in trainer.programs:
    program.land = timed(program.land)
  for r in range(repeats + 1):
    trainer.round(r)
  return float(np.median(multihost_utils.process_allgather(np.array(times[1:]))))


def train(config: Any, model: Any, params: Any, corpus: data.Corpus, workers: fgd.Workers, rounds: int) -> dict[str, Any]:
  """Some rounds of a method: times and losses."""
  trainer, timelines, losses = Trainer(config, model, params, corpus, workers, rounds + 1), [], []
  for r in range(rounds + 1):
    if r == 1:
      distributed.together("the first round", lambda: None, 600)
    loss, timeline = trainer.round(r)
    losses.append(loss)
    timelines.append(timeline)
  timed = timelines[1:]
  own = [sum(t["inner_done"] - t["begin"] for t in timed), timed[-1]["land_done"] - timed[0]["begin"]]
  inner, elapsed = np.asarray(multihost_utils.process_allgather(np.array(own))).reshape(-1, 2).T
  loss = [float(np.mean(multihost_utils.process_allgather(x, tiled=True))) for x in losses]
  overlapped, blocking = trainer.round_fn.traffic(trainer.state.params, trainer.batches[0])
  return {"measured_utilization": float(np.mean(inner / elapsed)), "round_seconds": float(np.mean(elapsed)) / rounds,
          "compute_seconds": float(np.mean(inner)) / rounds, "worker_compute_seconds": [float(x) / rounds for x in inner],
          "bytes_overlapped": overlapped, "bytes_blocking": blocking, "first_loss": loss[0], "last_loss": loss[-1],
          "inner_steps": config.inner_steps, "rounds": rounds}


def simulated(name: str, config: Any, vocab_size: int, seconds: dict[str, float], rate: str) -> dict[str, Any]:
  """The method's plan, its exchanges sized so that they take the calibrated times on links of this rate."""
  config.model.vocab_size = config.model.vocab_size or vocab_size
  plan, count = netsim.plan_of_config(config)
  bits = netsim.parse_bandwidth(rate.replace("bit", "bit/s"))
  m = config.workers
  nominal = {"mean": 2 * (m - 1) / m * 4 * count * 8 / bits, "swap": 4 * count * 8 / bits}
  sized = tuple(dataclasses.replace(e, nbytes=e.nbytes * seconds[kind] / nominal[kind])
                for e in plan.exchanges for kind in ["mean" if e.mean else "swap"])
  links = netsim.read_links(rate.replace("bit", "bit/s"), m)
  return {"plan": (dataclasses.replace(plan, exchanges=sized), links)}


def model_of(result: dict[str, Any]) -> dict[str, float]:
  """What the simulator says with the measured times of inner steps."""
  plan, links = result["plan"]
  times = netsim.StepTimes(tuple(s / result["inner_steps"] for s in result["worker_compute_seconds"]))
  simulation = netsim.simulate(plan, links, times, rounds=result["rounds"])
  return {"utilization": simulation.compute_utilization, "round_seconds": simulation.round_seconds}


def show(report: dict[str, Any]) -> str:
  """The report for people."""
  rows = []
  for name, r in report["methods"].items():
    off = r["measured_utilization"] / r["modelled"]["utilization"] - 1
    rows.append([name, f"{r['compute_seconds']:.2f}", f"{r['round_seconds']:.2f}", f"{r['modelled']['round_seconds']:.2f}",
                 f"{100 * r['measured_utilization']:.1f}", f"{100 * r['modelled']['utilization']:.1f}", f"{100 * off:+.1f}",
                 f"{r['first_loss']:.3f}", f"{r['last_loss']:.3f}"])
  columns = ("method", "inner s", "round s", "modelled s", "utilisation %", "modelled %", "off by %", "first loss",
             "last loss")
  return (f"{report['workers']} processes on links of {report['rate']}, {report['parameter_bytes'] / 1e6:.2f} MB of "
          f"parameters, H = {report['inner_steps']}; measured: a mean {report['mean_seconds']:.2f} s, a swap "
          f"{report['swap_seconds']:.2f} s\n{table(rows, columns)}")


if __name__ == "__main__":
  main()
