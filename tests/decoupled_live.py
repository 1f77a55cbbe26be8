"""A run on real Ray processes, tiny and paced, with what tests ask of it; and the command in a process of its own."""

import json
import os
import subprocess
import sys
import time

from fgd_jax.decoupled import run
from fgd_jax.decoupled.options import check
from fgd_jax.default_config import get_config

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = ("batch_size=2,seq_len=16,eval_batches=2,eval_batch_size=4,measure_every=0,inner.warmup_steps=2,model.dim=16,"
        "model.ffn_dim=24,model.layers=1,model.heads=2,model.kv_heads=1,data.source=synthetic,inner.schedule=constant")
PACE, WATCH = 0.4, 8.0
# Of the rate of the run's first, undisturbed window: other processes share the cores, and do so unevenly. A learner that
# waits for another one loses far more: `silent_after` is 3 of the 8 seconds, a pause or a new start all of them.
SLACK = 0.25
LIVE = (f"{TINY},quorum=1,steps=100000,inner_steps=4,decoupled.fragments=2,eval_every=0,checkpoint_every=0,"
        f"decoupled.pace={PACE},decoupled.silent_after=3,decoupled.codec=int8,decoupled.error_feedback=True")


class Live:
  """A run that goes on, with what the tests ask of it."""

  def __init__(self, workdir, options="learners=4"):
    self.workdir = workdir
    config = get_config(f"{LIVE},{options}")
    check(config)
    self.run = run.Run(config, workdir)
    self.until(lambda: all(s["started"] and s["n"] > 4 for s in self.statuses()), 300)

  def until(self, done, seconds):
    end = time.monotonic() + seconds
    while not done():
      assert time.monotonic() < end, f"not within {seconds} s: {self.events()[-4:]}"
      self.run.tick()
      time.sleep(0.1)

  def watch(self, seconds):
    end = time.monotonic() + seconds
    self.until(lambda: time.monotonic() > end, seconds + 5)

  def statuses(self):
    return [s or {"started": False} for s in self.run.statuses()]

  def status(self, m):
    return run.ray.get(self.run.learners[m].status.remote(), timeout=30)

  def pid(self, m):
    return self.status(m)["pid"]

  def events(self, actor=None):
    found = lines(os.path.join(self.workdir, "events.jsonl"))
    return [(e["actor"], e["event"]) for e in found if actor in (None, e["actor"])]

  def rates(self, learners, during):
    """Inner steps a second of these learners, times the pace, while `during` runs."""
    before = {m: (self.status(m)["n"], time.monotonic()) for m in learners}
    during()
    out = {}
    for m, (n, t) in before.items():
      out[m] = (self.status(m)["n"] - n) / (time.monotonic() - t) * PACE
    return out

  def undisturbed(self, learners, during):
    """Their step rate is that of the first window, less SLACK and the step by which each count of steps is uncertain."""
    rates = self.rates(learners, during)
    slack = SLACK + 2 * PACE / WATCH
    assert all(rate > (1 - slack) * self.first[m] for m, rate in rates.items()), (rates, self.first)

  def contributors(self, since, syncer=0):
    return {c["learner"] for record in self.tape(syncer) if record["step"] > since for c in record["contributions"]}

  def tape(self, syncer=0):
    return [x for x in lines(os.path.join(self.workdir, "syncer", str(syncer), "tape.jsonl")) if "step" in x]

  def steps(self):
    return [r["round"] for r in lines(os.path.join(self.workdir, "metrics.jsonl"))]


# --- the command ----------------------------------------------------------------------------------------------------


def lines(path):
  with open(path) as f:
    return [json.loads(line) for line in f]


def environment(x64="1"):
  """As a user's shell has it: without the test suite's eight devices."""
  return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": x64}


def command(module, arg, workdir, *options):
  return [sys.executable, "-m", module, f"--config=configs/default.py:{arg}", f"--workdir={workdir}", *options]


def start(*words, x64="1"):
  return subprocess.Popen(command(*words), cwd=ROOT, env=environment(x64), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)


def finish(process, seconds=400):
  out, err = process.communicate(timeout=seconds)
  return process.returncode, out, err
