"""What the runs of configs/paper would take on the paper's network, by fgd_jax.netsim, as Markdown.

    python benchmarks/paper_hours.py [--workers=8]

An inner step takes 4.7 s (`netsim table fgd`: what makes the seven published utilisations, where float32 travels), which is
an A100's for 2^16 tokens of a 1.5B model. Published: 1T tokens take about 16 weeks with GlobalM1 and about 29 with DiLoCo.
"""

from __future__ import annotations

import argparse
import os
import runpy

import trials

from fgd_jax import netsim
from fgd_jax.netsim.plan import plan_of_config
from fgd_jax.netsim.published import FGD_BITS, FGD_STEP_SECONDS

CONFIG = os.path.join(trials.ROOT, "configs", "paper", "fgd_1p5b.py")
STEP_SECONDS = FGD_STEP_SECONDS * 32 / FGD_BITS
HOUR, WEEK = 3600, 7 * 86_400


def cells(config, bandwidth: str) -> list[str]:
  """Utilisation in percent, hours for 10B and 30B tokens, weeks for 1T."""
  plan, _ = plan_of_config(config)
  links, times = netsim.read_links(bandwidth, config.workers), netsim.StepTimes((STEP_SECONDS,))
  result = netsim.simulate(plan, links, times, rounds=3)
  seconds = result.round_seconds / (config.workers * config.inner_steps * config.batch_size * config.seq_len)  # of a token
  return [f"{100 * result.compute_utilization:.1f}", *(f"{seconds * n / HOUR:,.0f}" for n in (10e9, 30e9)),
          f"{seconds * 1e12 / WEEK:,.1f}"]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--workers", type=int, default=8)
  workers = parser.parse_args().workers
  head = ["run", *(f"{bw} Mbit/s: {what}" for bw in (100, 200) for what in ("busy, %", "10B, h", "30B, h", "1T, weeks"))]
  found = runpy.run_path(CONFIG)
  configs = {run: found["get_config"](f"{words},workers={workers}") for run, words in found["RUNS"].items()}
  print(trials.markdown(head, [[run, *cells(c, "100Mbps"), *cells(c, "200Mbps")] for run, c in configs.items()]))


if __name__ == "__main__":
  main()
