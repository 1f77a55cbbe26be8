"""How the cost of simulating a week of failing chips grows with their number, as Markdown.

    python benchmarks/netsim_scale.py [--chips=150000,300000,600000,1200000,2400000] [--learners=8] [--days=7]

Rows: elastic learners whose chips fail at a constant rate (their failures are merged into one Poisson process a learner, so
the cost grows with the number of failures), and with Weibull lifetimes, which are drawn chip by chip in one array. Seconds
are wall time of one process; memory is the process's peak so far.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

from fgd_jax.netsim.goodput import ChipFailures, simulate_goodput

LIFETIMES = (("Poisson", 1.0), ("Weibull, shape 0.7", 0.7))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--chips", default="150000,300000,600000,1200000,2400000")
  parser.add_argument("--learners", type=int, default=8)
  parser.add_argument("--days", type=float, default=7.0)
  args = parser.parse_args()
  print("| chips | lifetimes | failures | stalls | goodput % | seconds | us per failure | peak MiB |")
  print("|---|---|---|---|---|---|---|---|")
  for name, shape in LIFETIMES:
    for chips in map(int, args.chips.split(",")):
      began = time.perf_counter()
      result = simulate_goodput(args.learners, chips, ChipFailures(shape=shape), seconds=args.days * 86400)
      seconds = time.perf_counter() - began
      peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)
      print(f"| {chips:,} | {name} | {result.failures:,} | {result.stalls:,} | {100 * result.goodput:.1f} | {seconds:.2f} | "
            f"{1e6 * seconds / max(result.failures, 1):.1f} | {peak:.0f} |")


if __name__ == "__main__":
  main()
