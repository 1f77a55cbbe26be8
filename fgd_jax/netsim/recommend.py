"""Which method, with how many inner steps, reaches a loss soonest: measured losses times simulated rounds.

losses.csv (benchmarks/netsim_losses.py makes it from docs/compare) has the held-out loss of DiLoCo with H = 10 after several
numbers of steps, and that of every method after 240 steps with several H. From the first follows how many steps s DiLoCo
needs for a loss (linear in log s between measured points), and from that what another method's loss is worth:

    relative steps = 240 / s(loss of the method after 240 steps)            1 for DiLoCo with H = 10
    hours          = wanted steps of DiLoCo * relative steps * simulated seconds of a round / H / 3600

This holds as far as `ASSUMPTIONS` do.
"""

from __future__ import annotations

import csv
import importlib.resources
import json
import math
from typing import Any, NamedTuple

import numpy as np

from fgd_jax.netsim.failures import StepTimes
from fgd_jax.netsim.links import Links
from fgd_jax.netsim.plan import make_plan
from fgd_jax.netsim.rounds import simulate

REFERENCE, REFERENCE_H, MEASURED_STEPS = "diloco", 10, 240
NO_ROUNDS = ("data_parallel",)  # it exchanges in every step: H changes nothing
UNRANKED = ("local",)  # its workers never agree, so that no number of steps makes one model of them
ROUNDS = 3  # that are simulated; where links or workers differ, UNEVEN_ROUNDS
UNEVEN_ROUNDS = 50

ASSUMPTIONS = (
    "Losses were measured with 0.46 million parameters, 8 workers and 240 steps (docs/compare). It is assumed that methods "
    "relate alike, in steps to a loss, for other models, workers and lengths of training. They may not: in published runs "
    "of 35 million to 1 billion parameters (arXiv 2501.18512, H = 30) DiLoCo's loss is within 0.03 of data parallelism's, "
    "which here needs about half of the steps.",
    "Outer learning rates and momenta were tuned for H = 10 (four seeds); others were trained on two seeds, without tuning. "
    "Losses are uncertain by about 0.01 and 0.02, hours by 2 % and 4 %: rows nearer to each other are not told apart.",
    "Relative steps for an H that was not trained (?) are interpolated between trained ones; beyond them they are those of "
    "the nearest, which flatters longer intervals. Such rows have no rank.",
    "Nothing fails, and outer steps take no time (those of IsoLoCo do).")


class Loss(NamedTuple):
  """A measured loss: an entry of docs/compare, the method behind it and its options."""

  name: str
  method: str
  options: dict[str, Any]
  inner_steps: int
  steps: int
  loss: float
  seeds: int


def read_losses() -> list[Loss]:
  """The table that ships with the package."""
  text = importlib.resources.files("fgd_jax.netsim").joinpath("losses.csv").read_text()
  return [Loss(r["name"], r["method"], json.loads(r["options"]), int(r["inner_steps"]), int(r["steps"]), float(r["loss"]),
               int(r["seeds"])) for r in csv.DictReader(text.splitlines())]


def reference_steps(losses: list[Loss], loss: float) -> float:
  """Steps in which the reference reaches `loss`; NaN beyond what was measured."""
  curve = sorted((r.loss, math.log(r.steps)) for r in losses if r.name == REFERENCE and r.inner_steps == REFERENCE_H)
  levels, steps = zip(*curve)
  return math.exp(float(np.interp(loss, levels, steps))) if levels[0] <= loss <= levels[-1] else math.nan


def relative_steps(losses: list[Loss]) -> dict[tuple[str, int], float]:
  """By entry and H: steps to a loss over those of the reference."""
  return {(r.name, r.inner_steps): MEASURED_STEPS / reference_steps(losses, r.loss)
          for r in losses if r.steps == MEASURED_STEPS and r.name not in UNRANKED}


def recommend(params: float, bits: float, links: Links, times: StepTimes, steps: float, inner_steps: tuple[int, ...] = ()
              ) -> dict[str, Any]:
  """Methods and H by simulated time to a loss, soonest first; those whose H was not trained come last, without a rank.

  Args:
    params: of the model. bits: that travel for each of them.
    links, times: of the workers.
    steps: in which DiLoCo with H = 10 reaches the loss.
    inner_steps: H to look at, besides the trained ones; methods with fragments take those that they divide.

  Returns:
    `methods`: a list of dicts (name, method, options, inner_steps, compute_utilization, round_seconds, relative_steps,
    steps, hours, bytes_a_step, trained, rank), `recommended`: the first of them, `assumptions`.

  Raises:
    ValueError: one sentence.
  """
  if not 1 <= steps <= 1e12:
    raise ValueError(f"steps={steps:g} must be from 1 to 1e12.")
  losses = read_losses()
  relative = relative_steps(losses)
  rows: list[dict[str, Any]] = []
  uneven = links.uniform is None or len(set(times.seconds)) > 1
  for entry in {r.name: r for r in losses if r.name not in UNRANKED}.values():
    trained = sorted(h for name, h in relative if name == entry.name)
    for h in sorted({*trained, *inner_steps}) if entry.name not in NO_ROUNDS else trained:
      if h % entry.options.get("fragments", 1):
        continue  # fragments go out at equal distances
      plan = make_plan(entry.method, params, bits, links.workers, h, options=entry.options)
      result = simulate(plan, links, times, rounds=UNEVEN_ROUNDS if uneven else ROUNDS)
      factor = float(np.interp(math.log(h), np.log(trained), [relative[entry.name, other] for other in trained]))
      needed = steps * factor
      rows.append({"name": entry.name, "method": entry.method, "options": entry.options,
                   "inner_steps": h, "compute_utilization": result.compute_utilization,
                   "round_seconds": result.round_seconds, "relative_steps": factor, "steps": needed,
                   "hours": needed * result.round_seconds / h / 3600,
                   "bytes_a_step": (result.bytes_overlapped + result.bytes_blocking) / h, "trained": h in trained})
  rows.sort(key=lambda r: (not r["trained"], math.isnan(r["hours"]), r["hours"], r["bytes_a_step"], r["name"]))
  for rank, row in enumerate(rows, 1):
    row["rank"] = rank if row["trained"] and not math.isnan(row["hours"]) else None
  return {"steps": steps, "recommended": rows[0], "methods": rows, "assumptions": list(ASSUMPTIONS)}
