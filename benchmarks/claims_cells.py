"""Pipelined DiLoCo where it could fail: one thing changed at a time, against DiLoCo and FGD in the same cell.

    python benchmarks/claims_cells.py [--out=docs/claims] [--full]

Registered before the first run: all methods as tuned by claims_pipelined.py at M = 8, H = 20 and 0.46M parameters, three
paired seeds and equally many tokens in each cell, and that script's rule. Cells: M = 4, 16; H = 10, 40, 50, 100; int8 and
E3M0 payloads; 5 % of the exchanges fail; 0.9M parameters; three times the tokens; --large: 4M parameters, one seed. DiLoCo,
against which a cell is compared, sends float32 and loses no exchange. Pipelined fragments have P = 20, or 10 where 20 does
not divide H. (H = 40 and P = 20 were added when the final table was known, before any cell was run.)

Writes pipelined_cells.csv and .png. By estimate 35 minutes on two idle cores after claims_pipelined.py, 10 more for --large;
--full (all of it with eight seeds): four hours.
"""

from __future__ import annotations

import argparse
import os

import claims
import trials
from claims_order import difference
from claims_pipelined import METHODS, plot, verdict

DILOCO, FGD, ISO = "DiLoCo", "GlobalM1LocalM2", "Pipelined, layers, Iso-C"
P10, P20 = "Pipelined, P = 10", "Pipelined, P = 20"
COLUMNS = (FGD, P10, P20, ISO)


def cells(large: bool) -> dict[str, tuple[str, str, tuple[str, ...]]]:
  """Settings, further words and methods of every cell beside DiLoCo."""
  some, usual = claims.settings, (FGD, P20, ISO)
  out = {
      "M = 8, H = 20": (some(), "", COLUMNS),
      "M = 4": (some(workers=4), "", COLUMNS), "M = 16": (some(workers=16), "", usual),
      "H = 10": (some(inner_steps=10), "", (FGD, P10, ISO)), "H = 40": (some(inner_steps=40), "", (P20, ISO)),
      "H = 50": (some(inner_steps=50), "", (FGD, P10, ISO)), "H = 100": (some(inner_steps=100), "", (P20, ISO)),
      "int8": (some(), "method.codec=int8,method.error_feedback=True", (P20, ISO)),
      "E3M0": (some(), "method.codec=e3m0,method.error_feedback=True", (P20, ISO)),
      "5 % fail": (some(), "faults.drop=0.05", (P20, ISO)),
      "0.9M": (some(model="0.9M"), "", usual), "3 x tokens": (some(tokens=3 * claims.TOKENS), "", (P20, ISO))}
  return {**out, "4M": (some(model="4M"), "", (P20, ISO))} if large else out


def main() -> None:
  args = claims.arguments(__doc__, seeds=3, full=8, large="4M parameters, too")
  print(table(args, claims.tuned(args, {name: METHODS[name] for name in (DILOCO, *COLUMNS)})))


def table(args: argparse.Namespace, setting: dict[str, str]) -> str:
  """Trains the cells; writes pipelined_cells.csv and .png; returns the table of differences to DiLoCo in the same cell."""
  gaps, rows, wanted = {}, [], []
  for cell, (settings, more, names) in cells(args.large or args.full).items():
    seeds = args.final if args.full or cell != "4M" else args.final[:1]
    plain = METHODS[DILOCO].words(settings, setting[DILOCO])
    words = {name: METHODS[name].words(settings, setting[name]) for name in names}
    wanted += [(cell, name, f"{w},{more}".rstrip(","), plain, seeds) for name, w in words.items()]
  pairs = [(w, seeds) for *_, own, plain, seeds in wanted for w in (plain, own)]
  done = trials.runs(claims.store(args), pairs, args.jobs, "cells")
  for cell, name, w, plain, seeds in wanted:
    gaps[cell, name] = difference(done, w, plain, seeds)
    loss, _ = trials.interval([done[w, s]["eval_loss"] for s in seeds])
    rows.append([cell, name, len(seeds), loss, *gaps[cell, name], verdict(*gaps[cell, name])])
  claims.write_csv(os.path.join(args.out, "pipelined_cells.csv"),
                   ("cell", "method", "seeds", "loss", "minus_diloco", "minus_diloco_ci95", "verdict"), rows)
  order = list(dict.fromkeys(cell for cell, _ in gaps))
  plot(os.path.join(args.out, "pipelined_cells.png"), "held-out loss minus DiLoCo's in the same cell, nats (95 % interval)",
       {cell: {name: gaps[cell, name] for name in COLUMNS if (cell, name) in gaps} for cell in order})
  interval = lambda half: "" if half != half else f" ± {half:.3f}"  # none of one seed
  show = lambda key: f"{gaps[key][0]:+.3f}{interval(gaps[key][1])}" if key in gaps else ""
  return trials.markdown(("minus DiLoCo", *COLUMNS), [[cell, *(show((cell, name)) for name in COLUMNS)] for cell in order])


if __name__ == "__main__":
  main()
