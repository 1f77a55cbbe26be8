"""Tunes every method, trains it on paired seeds, and writes one table, one CSV and one plot.

    python benchmarks/compare_methods.py --out=runs/compare [--methods="diloco;noloco"] [key=value ...]

Each method gets the same effort: its grid of settings (below) on the tuning seeds, then the best of them on the final seeds,
which tuning never saw. One process trains a method with all its settings; a run is a line of METHOD.csv as soon as it is
done, so an interrupted comparison goes on where it stopped. The CSV is results.csv, the table results.md, the plot
results.png. Numbers of different --out folders, or settings, are not comparable.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time

import trials
from trials import Entry, outer

SETTINGS = ("workers=8,inner_steps=10,rounds=24,batch_size=2,seq_len=64,inner.lr=3e-3,inner.warmup_steps=20,eval_batches=8,"
            "eval_batch_size=16,measure_sequences=8")
ENTRIES = {
    "data_parallel": Entry("data_parallel"),
    "local": Entry("local"),
    "diloco": Entry("diloco", "", outer()),
    "isoloco": Entry("isoloco", "", outer((0.9, 1.8, 2.7), (0.4, 0.8))),
    "diloco, rda": Entry("diloco", "method.aggregator=rda", outer((0.2, 0.4, 0.7))),
    "streaming": Entry("streaming_diloco", "method.fragments=5,method.delay=1", outer()),
    "pipelined": Entry("pipelined_diloco", "method.fragments=5", outer()),
    "eager": Entry("eager_diloco", "", outer((0.2, 0.4, 0.7), (0.3, 0.6))),
    "GlobalM1LocalM2": Entry("GlobalM1LocalM2", "", outer()),
    "GlobalM1LocalM2-subset": Entry("GlobalM1LocalM2-subset", "", outer((0.3, 0.5, 0.7))),
    "LocalM1M2": Entry("LocalM1M2", "", outer()),
    "GlobalM1": Entry("GlobalM1", "", outer((0.2, 0.4, 0.6))),
    "GlobalM1, recovered": Entry("GlobalM1", "method.momentum=recovered,method.retain=0.8", outer((0.3, 0.5, 0.7))),
    "noloco": Entry("noloco", "method.gamma=0.7", (("beta", (0.5, 0.8, 1.1)), ("alpha", (0.3, 0.6)))),
    "gasloc": Entry("gasloc", "", (("eta", (0.5, 0.8, 1.1)), ("gamma", (0.3, 0.6)))),
}
FIELDS = ("method", "setting", "seed", "purpose", "eval_loss", "eval_loss_workers", "consensus_l2", "js_distance",
          "bytes_overlapped", "bytes_blocking", "tokens", "parameters", "seconds")


# --- one method, in a process of its own --------------------------------------------------------------------------------


def train_all(name: str, out: str, settings: str, tune: list[int], final: list[int]) -> None:
  """Tunes and trains one method; appends a line to its CSV after every run."""
  path = os.path.join(out, f"{name}.csv")
  entry, rows = ENTRIES[name], read(path)
  done = {(r["setting"], int(r["seed"])): float(r["eval_loss"]) for r in rows}
  grid = entry.grid()

  def run(setting: str, seeds: list[int], purpose: str) -> None:
    missing = [seed for seed in seeds if (setting, seed) not in done]
    if not missing:
      return
    for row in trained(entry.words(settings, setting), missing, measured=purpose == "final"):
      row |= {"method": name, "setting": setting, "purpose": purpose}
      done[setting, row["seed"]] = row["eval_loss"]
      append(path, row)
      print(f"{name} {setting or '(nothing to tune)'} seed {row['seed']}: {row['eval_loss']:.4f} in {row['seconds']:.0f} s",
            flush=True)

  if len(grid) > 1:
    for setting in grid:
      run(setting, tune, "tuning")
    mean = lambda setting: sum(done[setting, seed] for seed in tune) / len(tune)
    best = min(grid, key=lambda setting: (mean(setting) != mean(setting), mean(setting)))
  else:
    best = grid[0]
  run(best, final, "final")


def trained(words: str, seeds: list[int], measured: bool):
  """`trials.trained` with an evaluation at the end alone; `measured`: with consensus and JS."""
  return trials.trained(f"{words},eval_every=0,measure_every={1_000_000 if measured else 0}", seeds)


# --- table and plot -------------------------------------------------------------------------------------------------------


def read(path: str) -> list[dict[str, str]]:
  if not os.path.exists(path):
    return []
  with open(path, newline="") as f:
    return [row for row in csv.DictReader(f) if row.get("seconds")]  # a line cut short by an interruption does not count


def append(path: str, row: dict) -> None:
  rows = [*read(path), row]
  with open(path + ".tmp", "w", newline="") as f:
    writer = csv.DictWriter(f, FIELDS, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
  os.replace(path + ".tmp", path)


def summarise(out: str, final: list[int]) -> str:
  """Writes results.csv, results.md and results.png from all methods of the folder; returns the table."""
  import numpy as np

  rows = [row for name in ENTRIES for row in read(os.path.join(out, f"{name}.csv"))]
  with open(os.path.join(out, "results.csv"), "w", newline="") as f:
    writer = csv.DictWriter(f, FIELDS)
    writer.writeheader()
    writer.writerows(rows)
  chosen = [r for r in rows if r["purpose"] == "final" and int(r["seed"]) in final]
  kept = {name: [r for r in chosen if r["method"] == name] for name in ENTRIES}
  loss = {name: {int(r["seed"]): float(r["eval_loss"]) for r in mine} for name, mine in kept.items()}
  spread = lambda v, sign="": f"{np.mean(v):{sign}.3f} ± {np.std(v, ddof=1) / np.sqrt(len(v)):.3f}" if len(v) > 1 else ""
  head = ("method", "tuned", "held-out loss", "minus DiLoCo, paired", "workers' mean", "consensus L2", "JS", "MB overlapped",
          "MB blocking")
  lines, points = [], []
  for name, mine in kept.items():
    if not mine:
      continue
    paired = [loss[name][s] - loss["diloco"][s] for s in loss[name] if s in loss.get("diloco", {})]
    mean = lambda key, mine=mine: float(np.mean([float(r[key]) for r in mine]))
    tuned = mine[0]["setting"].replace("method.", "").replace("outer_", "").replace(",", ", ") or "-"
    lines.append([
        name, tuned, spread(list(loss[name].values())), "" if name == "diloco" else spread(paired, "+"),
        f"{mean('eval_loss_workers'):.3f}", f"{mean('consensus_l2'):.2f}", f"{mean('js_distance'):.3f}",
        f"{mean('bytes_overlapped') / 1e6:.2f}", f"{mean('bytes_blocking') / 1e6:.2f}"])
    points.append((name, mean("bytes_blocking") / 1e6, mean("bytes_overlapped") / 1e6, list(loss[name].values())))
  with open(os.path.join(out, "results.md"), "w") as f:
    f.write((text := trials.markdown(head, lines)) + "\n")
  if points:
    plot(os.path.join(out, "results.png"), points)
  return text


def plot(path: str, points: list) -> None:
  """Held-out loss of every method (mean and seeds), and its bytes."""
  from matplotlib.figure import Figure

  points = sorted(points, key=lambda p: sum(p[3]) / len(p[3]))
  figure = Figure(figsize=(11, 0.34 * len(points) + 1.6), layout="constrained")
  left, right = figure.subplots(1, 2, sharey=True)
  for y, (_, blocking, overlapped, losses) in enumerate(points):
    left.plot(losses, [y] * len(losses), "o", color="0.7", ms=4)
    left.plot([sum(losses) / len(losses)], [y], "D", color="C0", ms=6)
    right.barh(y, blocking, color="C3", label="blocking" if y == 0 else None)
    right.barh(y, overlapped, left=blocking, color="C2", label="overlapped" if y == 0 else None)
  left.set_yticks(range(len(points)), [p[0] for p in points])
  left.invert_yaxis()
  left.set_xlabel("held-out loss, nats per byte (mean, and every seed)")
  right.set_xlabel("MB that a worker sends in a round")
  right.legend()
  for axes in (left, right):
    axes.grid(axis="x", alpha=0.3)
  figure.savefig(path, dpi=120)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", required=True, help="folder of the table; the same folder resumes")
  parser.add_argument("--methods", default="", help="names joined by ';' (default: all): " + "; ".join(ENTRIES))
  parser.add_argument("--tune-seeds", default="101,102")
  parser.add_argument("--seeds", default="1,2,3,4")
  parser.add_argument("--jobs", type=int, default=2, help="methods at a time, each on one core")
  parser.add_argument("--one", help=argparse.SUPPRESS)
  parser.add_argument("settings", nargs="*", help="key=value for all runs, besides " + SETTINGS)
  args = parser.parse_args()
  names = [n for n in args.methods.split(";") if n] or list(ENTRIES)
  if unknown := [n for n in names if n not in ENTRIES]:
    parser.error(f"--methods: {unknown[0]!r} is none of {'; '.join(ENTRIES)}.")
  tune, final = ([int(s) for s in seeds.split(",")] for seeds in (args.tune_seeds, args.seeds))
  if set(tune) & set(final):
    parser.error(f"--seeds and --tune-seeds share {sorted(set(tune) & set(final))}; final seeds must be fresh.")
  os.makedirs(args.out, exist_ok=True)
  settings = ",".join([SETTINGS, *args.settings])
  refuse_other_settings(os.path.join(args.out, "settings.json"), settings, parser)
  if args.one:
    return train_all(args.one, args.out, settings, tune, final)
  waiting, running, failed = list(names), {}, []
  while waiting or running:
    while waiting and len(running) < args.jobs:
      name = waiting.pop(0)
      running[name] = subprocess.Popen([sys.executable, os.path.abspath(__file__), f"--one={name}", *sys.argv[1:]],
                                       env=trials.one_core())
    for name, process in list(running.items()):
      if process.poll() is not None:
        running.pop(name)
        failed += [name] if process.returncode else []
    time.sleep(0.5)
  print("\n" + summarise(args.out, final))
  if failed:
    sys.exit(f"Failed: {', '.join(failed)}; the same command tries them again.")


def refuse_other_settings(path: str, settings: str, parser: argparse.ArgumentParser) -> None:
  """A folder holds runs of one setting."""
  if os.path.exists(path):
    with open(path) as f:
      if json.load(f) != settings:
        parser.error(f"{os.path.dirname(path)} holds runs with other settings; choose another --out.")
  else:
    with open(path, "w") as f:
      json.dump(settings, f)


if __name__ == "__main__":
  main()
