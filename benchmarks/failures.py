"""Held-out loss and compute utilisation when exchanges fail: DiLoCo against the variants of Factored Gossip DiLoCo.

    python benchmarks/failures.py --out=runs/failures [--drop=0.05] [--bandwidth=1.435Mbps]

The settings of every method are those that benchmarks/compare_methods.py chose without failures, and so are the losses
without failures (docs/compare); runs with failures are on the same seeds, so that a seed's two runs differ by the failures
alone. DiLoCo repeats a failed all-reduce: it loses time, and its loss is the same. Resumable: a finished run is a line of
runs.csv. The default bandwidth gives DiLoCo 36 % utilisation at one second a step, as 100 Mbit/s gives the 1.5B model of
arXiv 2606.22768. Takes about 25 minutes on one idle core.
"""

import argparse
import csv
import os

import compare_methods
import numpy as np
import trials

METHODS = ("diloco", "GlobalM1LocalM2", "GlobalM1LocalM2-subset", "LocalM1M2", "GlobalM1")
FIELDS = ("method", "seed", "drop", "bandwidth", "eval_loss", "utilization", "simulated_seconds", "failed", "seconds")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", required=True, help="folder of the runs and the table; the same folder resumes")
  parser.add_argument("--baseline", default=os.path.join(trials.ROOT, "docs/compare"), help="runs without failures")
  parser.add_argument("--drop", type=float, default=0.05, help="probability that an exchange fails (faults.drop)")
  parser.add_argument("--bandwidth", default="1.435Mbps", help="of each worker")
  parser.add_argument("--seeds", default="1,2,3,4")
  args = parser.parse_args()
  os.makedirs(args.out, exist_ok=True)
  path, seeds = os.path.join(args.out, "runs.csv"), [int(s) for s in args.seeds.split(",")]
  losses, tables = {}, []
  for name in METHODS:
    rows = [r for r in compare_methods.read(os.path.join(args.baseline, f"{name}.csv"))
            if r["purpose"] == "final" and int(r["seed"]) in seeds]
    if len(rows) < len(seeds):
      parser.error(f"--baseline={args.baseline} has {len(rows)} final runs of {name} for {len(seeds)} seeds; run "
                   "benchmarks/compare_methods.py first.")
    without = {int(r["seed"]): float(r["eval_loss"]) for r in rows}
    faulty = runs(path, name, rows[0]["setting"], args, seeds)
    base = utilisation(name, rows[0]["setting"], args, 0.0)
    pairs = [float(faulty[s]["eval_loss"]) - without[s] for s in seeds]
    losses[name] = ([without[s] for s in seeds], [float(faulty[s]["eval_loss"]) for s in seeds])
    mean = lambda key, faulty=faulty: float(np.mean([float(faulty[s][key]) for s in seeds]))
    tables.append([name, f"{np.mean(list(without.values())):.3f}", f"{mean('eval_loss'):.3f}",
                   f"{np.mean(pairs):+.4f} ± {np.std(pairs, ddof=1) / np.sqrt(len(pairs)):.4f}" if len(pairs) > 1 else "",
                   f"{mean('failed'):.1f}", f"{100 * base:.1f}", f"{100 * mean('utilization'):.1f}",
                   f"{mean('simulated_seconds'):.0f}"])
  head = ("method", "loss", f"loss, drop {args.drop:g}", "difference, paired", "exchanges lost", "utilisation %",
          f"utilisation %, drop {args.drop:g}", "simulated s")
  text = trials.markdown(head, tables)
  with open(os.path.join(args.out, "results.md"), "w") as f:
    f.write(text + "\n")
  plot(os.path.join(args.out, "results.png"), tables, losses)
  print(text)


def words(setting: str, name: str, args: argparse.Namespace, drop: float) -> str:
  entry = compare_methods.ENTRIES[name]
  return ",".join(filter(None, (compare_methods.SETTINGS, f"method={entry.method}", entry.fixed, setting,
                                f"faults.drop={drop},network.bandwidth={args.bandwidth},network.step_seconds=1")))


def utilisation(name: str, setting: str, args: argparse.Namespace, drop: float) -> float:
  """Of a run without training it."""
  from fgd_jax import netsim

  config = trials.config_of(words(setting, name, args, drop))
  plan, _ = netsim.plan_of_config(config)
  links = netsim.read_links(args.bandwidth, config.workers)
  return netsim.simulate(plan, links, netsim.StepTimes((1.0,)), rounds=config.rounds).compute_utilization


def runs(path: str, name: str, setting: str, args: argparse.Namespace, seeds: list[int]) -> dict[int, dict]:
  """The method's runs with failures by seed, trained where they are missing."""
  done = {int(r["seed"]): r for r in compare_methods.read(path)
          if (r["method"], float(r["drop"]), r["bandwidth"]) == (name, args.drop, args.bandwidth)}
  missing = [seed for seed in seeds if seed not in done]
  if missing:
    for row in compare_methods.trained(words(setting, name, args, args.drop), missing, measured=False):
      row = {k: v for k, v in row.items() if k in FIELDS} | {"method": name, "drop": args.drop, "bandwidth": args.bandwidth}
      rows = [*compare_methods.read(path), row]
      with open(path + ".tmp", "w", newline="") as f:
        writer = csv.DictWriter(f, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
      os.replace(path + ".tmp", path)
      done[row["seed"]] = row
      print(f"{name} seed {row['seed']}: {row['eval_loss']:.4f}, utilisation {100 * row['utilization']:.1f} %", flush=True)
  return done


def plot(path: str, tables: list[list[str]], losses: dict[str, tuple[list[float], list[float]]]) -> None:
  """Loss and utilisation with and without failures."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(10, 4), layout="constrained")
  left, right = figure.subplots(1, 2)
  for x, name in enumerate(losses):
    for offset, values, colour in ((-0.15, losses[name][0], "C0"), (0.15, losses[name][1], "C3")):
      left.plot([x + offset] * len(values), values, "o", color=colour, ms=4)
    for offset, column, colour in ((-0.2, 5, "C0"), (0.2, 6, "C3")):
      right.bar(x + offset, float(tables[x][column]), 0.4, color=colour,
                label=("no failures", "with failures")[column - 5] if x == 0 else None)
  left.set_ylabel("held-out loss, nats per byte (every seed)")
  right.set_ylabel("compute utilisation (%)")
  right.legend()
  for axes in (left, right):
    axes.set_xticks(range(len(losses)), losses, rotation=20, ha="right")
    axes.grid(axis="y", alpha=0.3)
  figure.savefig(path, dpi=120)


if __name__ == "__main__":
  main()
