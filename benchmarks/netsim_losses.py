"""Makes the loss table of `python -m fgd_jax.netsim recommend`, after the trainings that it needs.

    python benchmarks/netsim_losses.py --train         adds to docs/compare/budgets.csv (about half an hour on one core)
    python benchmarks/netsim_losses.py                 writes fgd_jax/netsim/losses.csv; trains nothing

Trained are, as tuned in docs/compare (settings of compare_methods.py, H = 10, 240 steps):

    DiLoCo for other numbers of steps, each run with a learning-rate schedule of its own: what a loss costs in steps
    every method for 240 steps with H = 40, nothing tuned again: what H costs in loss

Runs that stand in budgets.csv are not repeated.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
from typing import Any

import compare_methods
import trials

FOLDER = os.path.join(trials.ROOT, "docs/compare")
RUNS, BUDGETS = os.path.join(FOLDER, "results.csv"), os.path.join(FOLDER, "budgets.csv")
TABLE = os.path.join(trials.ROOT, "fgd_jax/netsim/losses.csv")
STEPS, INNER_STEPS = 240, 10  # of results.csv
SEEDS = (1, 2)
FIELDS = ("method", "inner_steps", "rounds", "seed", "eval_loss", "tokens", "seconds")
TABLE_FIELDS = ("name", "method", "options", "inner_steps", "steps", "loss", "seeds")


def finals() -> dict[str, list[dict[str, str]]]:
  """The final runs of every method in results.csv, by the name of its entry."""
  out: dict[str, list[dict[str, str]]] = {}
  for row in compare_methods.read(RUNS):
    if row["purpose"] == "final":
      out.setdefault(row["method"], []).append(row)
  return out


def options(name: str) -> dict[str, Any]:
  """What the entry's method was made with, fixed and tuned options alike."""
  words = ",".join(filter(None, (compare_methods.ENTRIES[name].fixed, finals()[name][0]["setting"])))
  pairs = [word.removeprefix("method.").split("=") for word in words.split(",") if word]
  return {key: ast.literal_eval(value) if value[0].isdigit() else value for key, value in pairs}


def wanted() -> list[tuple[str, int, int]]:
  """(entry, H, rounds) of all trainings, each with SEEDS."""
  out = [("diloco", INNER_STEPS, rounds) for rounds in (6, 12, 24, 48, 96)]
  names = [name for name in finals() if name not in ("data_parallel", "local")]  # for them H means nothing
  return out + [(name, 40, STEPS // 40) for name in names]


def train() -> None:
  """The missing runs; each is a line of budgets.csv as soon as it is done."""
  if not os.path.exists(BUDGETS):
    with open(BUDGETS, "w", newline="") as f:
      csv.DictWriter(f, FIELDS, lineterminator="\n").writeheader()
  for name, inner_steps, rounds in wanted():
    same = lambda r: (r["method"], int(r["inner_steps"]), int(r["rounds"])) == (name, inner_steps, rounds)
    done = {int(r["seed"]) for r in compare_methods.read(BUDGETS) if same(r)}
    missing, entry = [seed for seed in SEEDS if seed not in done], compare_methods.ENTRIES[name]
    words = ",".join(filter(None, (compare_methods.SETTINGS, f"method={entry.method}", entry.fixed,
                                   finals()[name][0]["setting"], f"inner_steps={inner_steps}", f"rounds={rounds}")))
    for row in compare_methods.trained(words, missing, measured=False) if missing else ():
      row = {**row, "method": name, "inner_steps": inner_steps, "rounds": rounds}
      with open(BUDGETS, "a", newline="") as f:
        csv.DictWriter(f, FIELDS, extrasaction="ignore", lineterminator="\n").writerow(row)
      print(f"{name}, H = {inner_steps}, {rounds} rounds, seed {row['seed']}: {row['eval_loss']:.4f} in "
            f"{row['seconds']:.0f} s", flush=True)


def table() -> list[dict[str, Any]]:
  """Losses by method, H and steps, as losses.csv holds them.

  A run of budgets.csv is compared with the run of the same method and seed in results.csv; the mean of these differences is
  added to the method's mean over all seeds there, so that which seeds were trained again does not matter much.
  """
  final = {name: {int(r["seed"]): float(r["eval_loss"]) for r in rows} for name, rows in finals().items()}
  mean = lambda values: sum(values) / len(values)
  cells: dict[tuple[str, int, int], list[float]] = {
      (name, INNER_STEPS, STEPS): list(losses.values()) for name, losses in final.items()}
  counts = {key: len(losses) for key, losses in cells.items()}
  more: dict[tuple[str, int, int], list[float]] = {}
  for row in compare_methods.read(BUDGETS):
    name, inner_steps = row["method"], int(row["inner_steps"])
    key = (name, inner_steps, inner_steps * int(row["rounds"]))
    if key not in cells:
      more.setdefault(key, []).append(float(row["eval_loss"]) - final[name][int(row["seed"])])
  for key, differences in more.items():
    cells[key], counts[key] = [mean(final[key[0]].values()) + mean(differences)], len(differences)
  return [{"name": name, "method": compare_methods.ENTRIES[name].method, "options": json.dumps(options(name)),
           "inner_steps": inner_steps, "steps": steps, "loss": f"{mean(cells[name, inner_steps, steps]):.4f}",
           "seeds": counts[name, inner_steps, steps]} for name, inner_steps, steps in sorted(cells)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--train", action="store_true", help="only train what is missing")
  if parser.parse_args().train:
    return train()
  with open(TABLE, "w", newline="") as f:
    writer = csv.DictWriter(f, TABLE_FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table())


if __name__ == "__main__":
  main()
