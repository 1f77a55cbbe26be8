"""Learners that are killed at random: goodput, uptime and loss, beside an undisturbed run of equal tokens.

    python benchmarks/chaos.py [--learners=4] [--minutes=1.5] [--mean-time=40] [--json]

Each learner of Decoupled DiLoCo is killed (SIGKILL) at the events of a Poisson process of its own and started again by Ray.
Learners are paced, so that a core shared with others does not decide; --pace=0 lets them run as fast as they can. Goodput is
the rate of inner steps over that of the undisturbed run; the prediction is that of fgd_jax.netsim for as many failures, with
the recovery time that was measured. Uptime is the share of the time in which at least one learner advanced.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time

import numpy as np

if __name__ == "__main__":
  PLATFORMS = os.environ.get("JAX_PLATFORMS", "")
  os.environ["JAX_PLATFORMS"] = "cpu"

from fgd_jax.decoupled.options import check  # noqa: E402  (after the environment)
from fgd_jax.decoupled.run import Run  # noqa: E402
from fgd_jax.default_config import get_config  # noqa: E402
from fgd_jax.netsim.goodput import ChipFailures, simulate_goodput  # noqa: E402
from fgd_jax.train import claimed  # noqa: E402

MODEL = ("batch_size=4,seq_len=64,eval_batches=8,measure_every=0,eval_every=0,checkpoint_every=0,inner.warmup_steps=20,"
         "inner.schedule=constant,model.dim=32,model.ffn_dim=64,model.layers=2,model.heads=2,model.kv_heads=1,"
         "data.max_bytes=2000000,inner_steps=24,decoupled.fragments=8,steps=1000000,decoupled.silent_after=3")


STILL = 2.0  # seconds without a step of any learner that are not down time: steps and looks take time


def failures(seed: int, learners: int, mean: float, seconds: float) -> list[tuple[float, int]]:
  """(time, learner) of every kill, in order."""
  out = []
  for m in range(learners):
    draw, t = np.random.default_rng([seed, m]), 0.0
    while (t := t + draw.exponential(mean)) < seconds:
      out.append((t, m))
  return sorted(out)


def train(config, workdir: str, kills: list[tuple[float, int]], done, platforms: str) -> dict[str, float]:
  """Trains until done(run, seconds); the clock starts when all learners train."""
  with claimed(workdir):
    run = Run(config, workdir, platforms=platforms)
    try:
      while not all(s.get("started") and s["n"] > 0 for s in run.statuses()):
        run.tick()
        time.sleep(0.1)
      began = time.monotonic()
      seen = [(s["n"], s["life"]) for s in run.statuses()]
      steps, down, last, recoveries, killed = 0, 0.0, 0.0, [], {}
      kills = list(kills)
      while not done(run, time.monotonic() - began):
        run.tick()
        now = time.monotonic() - began
        while kills and kills[0][0] <= now:
          _, m = kills.pop(0)
          if m not in killed:  # one that is still starting is not killed again, as in the simulator
            os.kill(run.statuses()[m]["pid"], signal.SIGKILL)
            killed[m] = now
        advanced = False
        for m, s in enumerate(run.statuses()):
          n, life = seen[m]
          if s["life"] == life and s["n"] > n:
            steps, advanced = steps + s["n"] - n, True
          elif s["life"] > life and m in killed:
            recoveries.append(now - killed.pop(m))
          seen[m] = s["n"], s["life"]
        if advanced:
          down, last = down + max(0.0, now - last - STILL), now
        time.sleep(0.1)
      seconds = time.monotonic() - began
      return {"seconds": seconds, "inner_steps": steps, "uptime": 1 - down / seconds, "tokens": run.tokens,
              "syncer_steps": run.step, "kills": len(recoveries) + len(killed),
              "recovery_seconds": statistics.mean(recoveries) if recoveries else 0.0, **run.evaluate()}
    finally:
      run.close()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--learners", type=int, default=4)
  parser.add_argument("--minutes", type=float, default=1.5, help="of the disturbed run, once all learners train")
  parser.add_argument("--mean-time", type=float, default=40.0, help="seconds between failures of one learner, on average")
  parser.add_argument("--pace", type=float, default=0.15, help="seconds of an inner step")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--json", action="store_true", help="print figures as JSON")
  args = parser.parse_args()
  config = get_config(f"{MODEL},learners={args.learners},seed={args.seed},decoupled.pace={args.pace}")
  check(config)
  seconds = 60 * args.minutes
  kills = failures(args.seed, args.learners, args.mean_time, seconds)
  with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
    chaos = train(config, os.path.join(folder, "chaos"), kills, lambda run, now: now >= seconds, PLATFORMS)
    calm = train(config, os.path.join(folder, "calm"), [], lambda run, now: run.tokens >= chaos["tokens"], PLATFORMS)
  for result in (chaos, calm):
    result["step_rate"] = result["inner_steps"] / result["seconds"] / args.learners
  chaos["goodput"], calm["goodput"] = chaos["step_rate"] / calm["step_rate"], 1.0
  # For the failures that there were: few of them are not their expectation.
  mean_time = args.learners * chaos["seconds"] / max(chaos["kills"], 1)
  model = ChipFailures(mean_time=mean_time, restart=chaos["recovery_seconds"])
  predicted = simulate_goodput(args.learners, args.learners, model, elastic=False, seconds=200 * seconds, seed=args.seed)
  chaos["predicted_goodput"], calm["predicted_goodput"] = predicted.goodput, 1.0
  chaos["predicted_uptime"], calm["predicted_uptime"] = predicted.uptime, 1.0
  if args.json:
    print(json.dumps({"chaos": chaos, "undisturbed": calm}))
    return
  print("| run | kills | recovery, s | goodput | predicted | uptime | predicted | tokens | syncer steps | held-out loss |")
  print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
  for name, r in (("failures", chaos), ("undisturbed", calm)):
    print(f"| {name} | {r['kills']} | {r['recovery_seconds']:.1f} | {r['goodput']:.3f} | {r['predicted_goodput']:.3f} | "
          f"{r['uptime']:.3f} | {r['predicted_uptime']:.3f} | {r['tokens']:,} | {r['syncer_steps']} | "
          f"{r['eval_loss']:.3f} |")
  sys.stdout.flush()


if __name__ == "__main__":
  main()
