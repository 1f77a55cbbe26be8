"""Published figures and what the simulator makes of the same settings, side by side."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fgd_jax.netsim import closed
from fgd_jax.netsim.failures import Drops, StepTimes
from fgd_jax.netsim.goodput import simulate_goodput
from fgd_jax.netsim.layers import Layered
from fgd_jax.netsim.links import read_links
from fgd_jax.netsim.plan import make_plan
from fgd_jax.netsim.rounds import simulate

# --- Factored Gossip DiLoCo (arXiv 2606.22768): utilisation in percent; M = 8, H = 100, 1.5B parameters -------------------

FGD = {("diloco", "100Mbps"): 36, ("diloco", "200Mbps"): 53, ("GlobalM1", "100Mbps"): 56, ("GlobalM1", "200Mbps"): 100,
       ("GlobalM1LocalM2", "100Mbps"): 36, ("GlobalM1LocalM2", "200Mbps"): 66, ("GlobalM1LocalM2-subset", "100Mbps"): 45}
FGD_PARAMS, FGD_BITS, FGD_WORKERS, FGD_STEPS = 1.498e9, 16.0, 8, 100
# One free number (derived, methods-core.md 4.6): the inner phase takes 0.56 of a ring all-reduce at 100 Mbit/s.
FGD_STEP_SECONDS = 0.56 * 2 * 7 / 8 * FGD_PARAMS * FGD_BITS / 100e6 / FGD_STEPS


class Cell(NamedTuple):
  """One figure: where it stands in its table, published and simulated."""

  row: str
  column: str
  published: float
  simulated: float
  standard_error: float = 0.0  # of `simulated`, where it is a mean over random runs


def fgd_table() -> list[Cell]:
  """The seven utilisations of the FGD paper, in percent."""
  out = []
  for (method, bandwidth), published in FGD.items():
    plan = make_plan(method, FGD_PARAMS, FGD_BITS, FGD_WORKERS, FGD_STEPS)
    result = simulate(plan, read_links(bandwidth, FGD_WORKERS), StepTimes((FGD_STEP_SECONDS,)), rounds=3)
    out.append(Cell(method, bandwidth, published, 100 * result.compute_utilization))
  return out


# --- Streaming DiLoCo (arXiv 2501.18512): Gbit/s for a utilisation of 50, 80, 90, 95, 99 %; H = 100 ------------------------

TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
STREAMING_1B = {
    "data_parallel": (86.8, 152.6, 184.2, 222.3, 569.0), "diloco": (1.4, 6.2, 13.3, 23.3, 86.8),
    "streaming": (1.4, 5.2, 9.1, 16.0, 28.1), "streaming_overlap": (1.4, 4.3, 6.2, 9.1, 11.0),
    "streaming_overlap_fp4": (0.4, 0.9, 1.7, 2.0, 3.0)}
# The grid of which the published cells are the first values that reach a target: 50 from 0.1 to 1000 Gbit/s, ratio 1.207.
GRID = tuple(float(g) for g in np.logspace(-1, 3, 50))
SIZES = {"1B": (1e9, 24, 0.1), "10B": (1e10, 48, 0.8), "100B": (1e11, 108, 4.9)}  # parameters, layers, seconds a step
# Fitted on the 1B table: bits that a reduction sends for each nominal parameter. With bf16's 16 every cell is within one
# step of the grid, but most of them one step above; layers without embeddings hold fewer parameters than the nominal size.
BITS = 13.4
FP4_SHARE = 4 / 16


def streaming_models(size: str, bits: float = BITS) -> dict[str, Layered]:
  """The five methods of the table for a model size, by `layers.py`'s choices.

  Raises:
    ValueError: an unknown size, or bits out of range.
  """
  if size not in SIZES:
    raise ValueError(f"size={size!r} must be one of {', '.join(SIZES)}.")
  if not 0.01 <= bits <= 1024:
    raise ValueError(f"bits={bits:g} must be from 0.01 to 1024.")
  params, layers, seconds = SIZES[size]
  model = lambda fragments, delay=0, share=1.0: Layered(layers, seconds, params * bits * share, 100, fragments, delay)
  return {"data_parallel": model(0), "diloco": model(1), "streaming": model(layers // 3),
          "streaming_overlap": model(layers // 3, 1), "streaming_overlap_fp4": model(layers // 3, 1, FP4_SHARE)}


def streaming_table(size: str, bits: float = BITS) -> dict[str, list[float]]:
  """Gbit/s of the grid that each method needs for TARGETS."""
  grid = [1e9 * g for g in GRID]
  return {name: [round(model.needed(target, grid) / 1e9, 3) for target in TARGETS]
          for name, model in streaming_models(size, bits).items()}


def grid_steps(published: float, simulated: float) -> int:
  """How many steps of the grid lie between a published cell (rounded to one decimal) and a simulated one."""
  place = lambda value: min(range(len(GRID)), key=lambda i: abs(math.log(GRID[i] / value)))
  return place(simulated) - place(published)


def streaming_cells(size: str = "1B", bits: float = BITS) -> list[Cell]:
  """The table's cells with their published values, which the specification has for 1B only (NaN elsewhere)."""
  known = STREAMING_1B if size == "1B" else {}
  return [Cell(method, f"{target:.0%}", known.get(method, (math.nan,) * 5)[i], row[i])
          for method, row in streaming_table(size, bits).items() for i, target in enumerate(TARGETS)]


# --- Decoupled DiLoCo (arXiv 2604.21428): goodput in percent on 150k, 300k, 1.2M chips -------------------------------------

CHIPS = (150_000, 300_000, 1_200_000)
GOODPUT = {"data_parallel, rigid": (1, False, (72, 57, 27)), "data_parallel, elastic": (1, True, (88, 80, 58)),
           "2 learners": (2, True, (94, 88, 70)), "4 learners": (4, True, (96, 93, 82)),
           "8 learners": (8, True, (98, 96, 88)), "16 learners": (16, True, (99, 98, 93))}


WEEKS = 10  # that are simulated for a cell


def goodput_table(seed: int = 0) -> list[Cell]:
  """The table of Decoupled DiLoCo's chaos simulator: the means of WEEKS simulated weeks, with seeds from WEEKS * seed on."""
  out = []
  for name, (learners, elastic, row) in GOODPUT.items():
    for chips, published in zip(CHIPS, row):
      weeks = [100 * simulate_goodput(learners, chips, elastic=elastic, seed=WEEKS * seed + week).goodput
               for week in range(WEEKS)]
      out.append(Cell(name, f"{chips:,}", published, float(np.mean(weeks)), float(np.std(weeks, ddof=1) / WEEKS**0.5)))
  return out


# --- 5 % failing communication (arXiv 2606.22768; of what is not known, so each reading has its columns) ------------------


def failure_table(probability: float = 0.05, bandwidth: str = "200Mbps", rounds: int = 400, seed: int = 0
                  ) -> list[dict[str, Any]]:
  """DiLoCo against the FGD variants with failing communication, in the setting of `fgd_table`; utilisations in percent."""
  rows = []
  for method in ("diloco", "GlobalM1", "GlobalM1LocalM2", "GlobalM1LocalM2-subset", "LocalM1M2"):
    plan, links = make_plan(method, FGD_PARAMS, FGD_BITS, FGD_WORKERS, FGD_STEPS), read_links(bandwidth, FGD_WORKERS)
    row: dict[str, Any] = {"method": method}
    row["none"] = 100 * simulate(plan, links, StepTimes((FGD_STEP_SECONDS,)), rounds=3).compute_utilization
    for unit in ("message", "link"):
      drops = Drops(probability, unit)
      result = simulate(plan, links, StepTimes((FGD_STEP_SECONDS,)), drops, rounds=rounds, seed=seed)
      expected = closed.utilization(plan, links, FGD_STEP_SECONDS, drops)
      row |= {unit: 100 * result.compute_utilization, f"{unit}_closed_form": None if expected is None else 100 * expected,
              f"{unit}_retries": result.retries, f"{unit}_skipped": result.skipped, f"{unit}_lost_pairs": result.lost_pairs}
    rows.append(row)
  return rows
