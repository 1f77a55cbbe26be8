"""Fits the four recovery times of the goodput simulator to the published table, as Markdown.

    python benchmarks/netsim_fit.py

The 18 cells of arXiv 2604.21428 (fgd_jax/netsim/published.py) against the formulas of fgd_jax/netsim/goodput.py: restart
from the three rigid cells, scale_down, scale_up and gather from the fifteen elastic ones, with the least largest error.
"""

from __future__ import annotations

import argparse
import dataclasses

from scipy import optimize

from fgd_jax.netsim.goodput import ChipFailures, closed_form
from fgd_jax.netsim.published import CHIPS, GOODPUT

BOUNDS = {"restart": (1.0, 600.0), "scale_down": (1.0, 120.0), "scale_up": (1.0, 120.0), "gather": (0.0, 600.0)}


def largest_error(model: ChipFailures, elastic: bool) -> float:
  """Percentage points between formula and table, in the cell where they differ most."""
  return max(abs(100 * closed_form(chips // learners, model, elastic) - published)
             for learners, kind, row in GOODPUT.values() if kind == elastic for chips, published in zip(CHIPS, row))


def fit(names: tuple[str, ...], elastic: bool) -> tuple[dict[str, float], float]:
  """The values of `names` with the least largest error, and that error."""
  error = lambda values: largest_error(dataclasses.replace(ChipFailures(), **dict(zip(names, values))), elastic)
  found = optimize.differential_evolution(error, [BOUNDS[name] for name in names], seed=0, tol=1e-8, maxiter=500)
  return dict(zip(names, found.x)), float(found.fun)


def main() -> None:
  argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
  print("| time | fitted s | used s | largest error fitted, points | used |\n|---|---|---|---|---|")
  for names, elastic in ((("restart",), False), (("scale_down", "scale_up", "gather"), True)):
    values, error = fit(names, elastic)
    used = ChipFailures()
    for name in names:
      print(f"| {name} | {values[name]:.1f} | {getattr(used, name):g} | {error:.2f} | {largest_error(used, elastic):.2f} |")


if __name__ == "__main__":
  main()
