"""The others' step rate while a learner of Decoupled DiLoCo is killed, paused, slow or new.

    python benchmarks/decoupled_rates.py --out=FILE [--learners=4] [--pace=0.25] [--seconds=25]

Learners are paced, so that an idle machine is less than 40 % busy. Each disturbance, of learner 0, has a window of its own,
which begins with it. The table has the rate of the other learners over that of the same ones in the undisturbed window, mean
and lowest, and the share of all cores that was busy, in all and for this run (Linux only). Rates of a machine that others
keep busy say little: look at the difference of the two shares, and at the second undisturbed window. A count of steps is
uncertain by one, which is pace / seconds of a rate.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

if __name__ == "__main__":
  PLATFORMS = os.environ.get("JAX_PLATFORMS", "")
  os.environ["JAX_PLATFORMS"] = "cpu"

import ray  # noqa: E402  (after the environment)

from fgd_jax.decoupled.options import check  # noqa: E402
from fgd_jax.decoupled.run import Run  # noqa: E402
from fgd_jax.default_config import get_config  # noqa: E402
from fgd_jax.train import claimed  # noqa: E402

MODEL = ("batch_size=2,seq_len=16,eval_batches=2,eval_batch_size=4,measure_every=0,eval_every=0,checkpoint_every=0,"
         "inner.warmup_steps=2,inner.schedule=constant,model.dim=16,model.ffn_dim=24,model.layers=1,model.heads=2,"
         "model.kv_heads=1,data.source=synthetic,quorum=1,steps=1000000,inner_steps=8,decoupled.fragments=2,"
         "decoupled.silent_after=3")
LIMIT = 120.0  # seconds that a start or a new start may take
TICK = 0.1


def cpu_ticks() -> tuple[float, float]:
  """(busy, all) clock ticks of all cores since the start of the machine; nan where there is no /proc."""
  try:
    with open("/proc/stat", encoding="ascii") as f:
      ticks = [int(x) for x in f.readline().split()[1:9]]
  except OSError:
    return float("nan"), float("nan")
  return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # idle, and waiting for disks


def own_ticks(pids: set[int]) -> dict[int, int]:
  """Clock ticks of those of these processes that are there."""
  out = {}
  for pid in pids:
    with suppress(OSError), open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as f:
      fields = f.read().rpartition(")")[2].split()
      out[pid] = int(fields[11]) + int(fields[12])
  return out


class Rates:
  """A run, and what its learners did in a window of time."""

  def __init__(self, run: Run, seconds: float):
    self.run, self.seconds = run, seconds

  def until(self, done: Callable[[], bool], limit: float = LIMIT) -> None:
    end = time.monotonic() + limit
    while not done():
      if time.monotonic() > end:
        raise TimeoutError(f"Not within {limit:.0f} s; see the events above.")
      self.run.tick()
      time.sleep(TICK)

  def trains(self, m: int, life: int = 1) -> bool:
    """Whether learner m has taken steps in that life."""
    status = self.run.statuses()[m]
    return bool(status) and status["started"] and status["life"] >= life and status["step_seconds"] > 0

  def status(self, m: int) -> dict:
    return ray.get(self.run.learners[m].status.remote(), timeout=LIMIT)

  def pids(self) -> set[int]:
    """Of the actors and of this process."""
    return {os.getpid(), *(w.last["pid"] for w in [*self.run._watched_learners, *self.run._watched_syncers] if w.last)}

  def window(self, others: list[int], disturb: Callable[[], object] = lambda: None) -> dict:
    """Steps a second of some learners from a disturbance on, and busy shares of the cores."""
    before = {m: (self.status(m)["n"], time.monotonic()) for m in others}
    busy, ticks = cpu_ticks()
    own = own_ticks(self.pids())
    disturb()
    end = time.monotonic() + self.seconds
    self.until(lambda: time.monotonic() > end, self.seconds + LIMIT)
    now, total = cpu_ticks()
    mine = sum(t - own.get(pid, 0) for pid, t in own_ticks(self.pids() | set(own)).items())
    rates = {m: (self.status(m)["n"] - n) / (time.monotonic() - t) for m, (n, t) in before.items()}
    return {"rates": rates, "busy": (now - busy) / (total - ticks), "own": mine / (total - ticks)}


def measure(run: Run, seconds: float, pace: float) -> dict[str, dict]:
  """All windows, by name."""
  rates = Rates(run, seconds)
  everyone = list(range(len(run.learners)))
  others, first = everyone[1:], lambda: run.learners[0]
  rates.until(lambda: all(rates.trains(m) for m in everyone))
  out = {"undisturbed": rates.window(everyone)}
  pid, life = rates.status(0)["pid"], rates.status(0)["life"]
  out["SIGKILL"] = rates.window(others, lambda: os.kill(pid, signal.SIGKILL))
  rates.until(lambda: rates.trains(0, life + 1))
  pid = rates.status(0)["pid"]
  try:
    out["SIGSTOP"] = rates.window(others, lambda: os.kill(pid, signal.SIGSTOP))
  finally:
    os.kill(pid, signal.SIGCONT)
  out["5x slow"] = rates.window(others, lambda: ray.get(first().set_pace.remote(5 * pace)))
  ray.get(first().set_pace.remote(pace))
  out["late joiner"] = rates.window(everyone, run.add_learner)
  rates.until(lambda: rates.trains(len(everyone)))
  out["undisturbed again"] = rates.window(everyone)
  return out


def table(windows: dict[str, dict]) -> str:
  """The windows as a table."""
  calm = windows["undisturbed"]["rates"]
  lines = ["| window | others' steps a second | of undisturbed, mean | lowest | CPU busy | of this run |",
           "| --- | --- | --- | --- | --- | --- |"]
  for name, w in windows.items():
    ratios = [rate / calm[m] for m, rate in w["rates"].items()]
    lines.append(f"| {name} | {statistics.mean(w['rates'].values()):.2f} | {statistics.mean(ratios):.3f} | "
                 f"{min(ratios):.3f} | {w['busy']:.0%} | {w['own']:.0%} |")
  return "\n".join(lines) + "\n"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", required=True, help="file for the table, which is also printed")
  parser.add_argument("--learners", type=int, default=4)
  parser.add_argument("--pace", type=float, default=0.25, help="seconds of an inner step")
  parser.add_argument("--seconds", type=float, default=25.0, help="of a window")
  args = parser.parse_args()
  config = get_config(f"{MODEL},learners={args.learners},decoupled.pace={args.pace}")
  check(config)
  with tempfile.TemporaryDirectory(prefix="rates-") as folder, claimed(folder):
    run = Run(config, folder, platforms=PLATFORMS)
    try:
      text = table(measure(run, args.seconds, args.pace))
    finally:
      run.close()
  with open(args.out, "w", encoding="utf-8") as f:
    f.write(text)
  print(text)


if __name__ == "__main__":
  main()
