"""Trains DiLoCo for several numbers of steps, and makes the loss table of `python -m fgd_jax.netsim recommend`.

    python benchmarks/netsim_losses.py --train [--seeds=1,2] [--rounds=6,12,24,48,96]     writes docs/compare/budgets.csv
    python benchmarks/netsim_losses.py                                                    writes fgd_jax/netsim/losses.json

The first command trains DiLoCo as tuned in docs/compare (settings of compare_methods.py), each number of rounds a run with a
learning-rate schedule of its own; runs that stand in the file already are not repeated. The second one needs no training: it
takes DiLoCo's losses from budgets.csv, and those of all methods at the end of their 240 steps from results.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from typing import Any

import compare_methods

FOLDER = os.path.join(compare_methods.ROOT, "docs/compare")
BUDGETS, TABLE = os.path.join(FOLDER, "budgets.csv"), os.path.join(compare_methods.ROOT, "fgd_jax/netsim/losses.json")
FIELDS = ("rounds", "seed", "eval_loss", "tokens", "seconds")


def finals() -> dict[str, list[dict[str, str]]]:
  """The final runs of every method in results.csv, by the name of its entry."""
  out: dict[str, list[dict[str, str]]] = {}
  for row in compare_methods.read(os.path.join(FOLDER, "results.csv")):
    if row["purpose"] == "final":
      out.setdefault(row["method"], []).append(row)
  return out


def train(rounds: list[int], seeds: list[int]) -> None:
  """DiLoCo's missing runs; each is a line of budgets.csv as soon as it is done."""
  setting = finals()["diloco"][0]["setting"]
  for count in rounds:
    done = {int(r["seed"]) for r in compare_methods.read(BUDGETS) if int(r["rounds"]) == count}
    missing = [seed for seed in seeds if seed not in done]
    words = f"{compare_methods.SETTINGS},rounds={count},method=diloco,{setting}"
    for row in compare_methods.trained(words, missing, measured=False) if missing else ():
      new = not os.path.exists(BUDGETS)
      with open(BUDGETS, "a", newline="") as f:
        writer = csv.DictWriter(f, FIELDS, extrasaction="ignore", lineterminator="\n")
        if new:
          writer.writeheader()
        writer.writerow(row | {"rounds": count})
      print(f"{count} rounds, seed {row['seed']}: {row['eval_loss']:.4f} in {row['seconds']:.0f} s", flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--train", action="store_true")
  parser.add_argument("--seeds", default="1,2")
  parser.add_argument("--rounds", default="6,12,24,48,96")
  args = parser.parse_args()
  if args.train:
    train([int(n) for n in args.rounds.split(",")], [int(n) for n in args.seeds.split(",")])


if __name__ == "__main__":
  main()
