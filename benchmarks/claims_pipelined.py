"""No blocking byte and DiLoCo's loss? Pipelined DiLoCo where it could fail, against DiLoCo, Streaming and FGD.

    python benchmarks/claims_pipelined.py [--out=docs/claims] [--full]

Registered before the first run:
  tuning      every method gets six settings of outer learning rate and momentum on seed 101 (as claims_order.py), at M = 8,
              H = 20, 0.46M parameters, 409,600 tokens; all other cells get what was chosen there
  final       paired seeds 1 to 8, at the same M, H and tokens
  rule        with d the paired difference in held-out loss to tuned DiLoCo and its 95 % interval: "better" where this lies
              below 0, "as good" where it lies below +0.010 nats (a quarter or less of what the variants of FGD lose
              in docs/compare), "behind" where it lies above 0 and is not as good, else "not resolved"
  cells       one thing changed at a time: claims_cells.py
  attempts    what might beat it, tuned and trained like everything else: the worker's own outer step as the guess, fragments
              of layers, isotropic outer gradients on landing (Iso-C)

Writes pipelined.csv (final), pipelined_pairs.csv (every two methods) and pipelined_hours.csv (simulated hours at 50, 100,
200 Mbit/s and 1 Gbit/s, scaled as in claims_order.py so that DiLoCo computes 36 % of its time at 100) and their PNGs. By
estimate 30 minutes on two idle cores after claims_order.py, with which it shares runs; --full (three tuning seeds, 16
seeds): two hours.
"""

from __future__ import annotations

import argparse
import os

import claims
import trials
from claims_order import difference
from trials import Entry

MARGIN = 0.010
LAYERS = "method.fragments=5,method.order=strided"
METHODS = {
    **{name: claims.METHODS[name] for name in ("DiLoCo", "GlobalM1LocalM2", "GlobalM1LocalM2-subset")},
    "Streaming, delay 1": Entry("streaming_diloco", LAYERS + ",method.delay=1,method.blend=0.0", claims.HIGH),
    "Streaming, delay H/P, blend": Entry("streaming_diloco", LAYERS + ",method.delay=4,method.blend=0.5", claims.HIGH),
    "Pipelined, P = 4": Entry("pipelined_diloco", "method.fragments=4", claims.HIGH),
    "Pipelined, P = 10": Entry("pipelined_diloco", "method.fragments=10", claims.HIGH),
    "Pipelined, P = 20": Entry("pipelined_diloco", "method.fragments=20", claims.HIGH),
    "Pipelined, layers, P = 5": Entry("pipelined_diloco", LAYERS, claims.HIGH),
    "Pipelined, own guess, P = 10": Entry("pipelined_diloco", "method.fragments=10,method.guess=own", claims.HIGH),
    "Pipelined, layers, Iso-C": Entry("pipelined_diloco", LAYERS + ",method.aggregator=iso_c",
                                      trials.outer((0.9, 1.8, 2.7), (0.3, 0.6))),
    "IsoLoCo (blocking)": Entry("isoloco", "", trials.outer((0.9, 1.8, 2.7), (0.3, 0.6))),
}
RATES = {"50 Mbit/s": 0.5, "100 Mbit/s": 1.0, "200 Mbit/s": 2.0, "1 Gbit/s": 10.0}


def main() -> None:
  args = claims.arguments(__doc__, seeds=8, full=16)
  setting = claims.tuned(args, METHODS)
  words = {name: entry.words(claims.settings(), setting[name]) for name, entry in METHODS.items()}
  done = trials.runs(claims.store(args), [(w, args.final) for w in words.values()], args.jobs, "final")
  print(final(args, setting, words, done), "\n")
  claims.write_pairs(os.path.join(args.out, "pipelined_pairs.csv"), words, done, args.final)
  print(hours(args, words, done))


def verdict(mean: float, half: float) -> str:
  low, high = mean - half, mean + half
  return "better" if high < 0 else "as good" if high < MARGIN else "behind" if low > 0 else "not resolved"


def final(args: argparse.Namespace, setting: dict[str, str], words: dict[str, str], done) -> str:
  rows, lines = [], []
  for name, w in words.items():
    mean, half = trials.interval([done[w, s]["eval_loss"] for s in args.final])
    gap, gap_half = difference(done, w, words["DiLoCo"], args.final)
    of = lambda key, w=w: sum(done[w, s][key] for s in args.final) / len(args.final)
    decided = "" if name == "DiLoCo" else verdict(gap, gap_half)
    rows.append([name, setting[name], len(args.final), mean, half, gap, gap_half, decided, of("eval_loss_workers"),
                 of("js_distance"), of("bytes_overlapped"), of("bytes_blocking")])
    lines.append([name, setting[name].replace("method.outer_", "").replace(",", ", "), f"{mean:.3f} ± {half:.3f}",
                  "" if name == "DiLoCo" else f"{gap:+.4f} ± {gap_half:.4f}", decided, f"{of('bytes_overlapped') / 1e6:.2f}",
                  f"{of('bytes_blocking') / 1e6:.2f}"])
  claims.write_csv(os.path.join(args.out, "pipelined.csv"), (
      "method", "setting", "seeds", "loss", "loss_ci95", "minus_diloco", "minus_diloco_ci95", "verdict", "loss_workers",
      "js_distance", "bytes_overlapped", "bytes_blocking"), rows)
  plot(os.path.join(args.out, "pipelined.png"), "held-out loss minus DiLoCo's, nats (95 % interval)",
       {row[0]: {"": (row[5], row[6])} for row in rows if row[0] != "DiLoCo"})
  return trials.markdown(("method", "tuned", "held-out loss", "minus DiLoCo", "rule", "MB overlapped", "MB blocking"), lines)


def hours(args: argparse.Namespace, words: dict[str, str], done) -> str:
  """Writes pipelined_hours.csv and .png; returns the table of simulated hours."""
  from matplotlib.figure import Figure

  unit, figure = claims.like_100_mbps(words["DiLoCo"]), Figure(figsize=(14, 3.8), layout="constrained")
  rows, table = [], {name: [name] for name in words}
  for axes, (label, factor) in zip(figure.subplots(1, len(RATES), sharey=True), RATES.items()):
    for c, (name, w) in enumerate(words.items()):
      total, utilisation = claims.seconds(w, f"{unit * factor}Mbps")
      curves = [claims.curve_at(done[w, s], total) for s in args.final]
      losses = [sum(c) / len(c) for c in zip(*(y for _, y in curves))]
      axes.plot(curves[0][0], losses, "o-" if c < 10 else "o--", ms=3, color=f"C{c % 10}", label=name)
      rows += [[label, name, utilisation, x, y] for x, y in zip(curves[0][0], losses)]
      table[name].append(f"{total / 3600:.2f} ({100 * utilisation:.0f} %)")
    axes.set_title(label, fontsize=9)
    axes.set_xlabel("simulated hours")
    axes.grid(alpha=0.3)
  figure.axes[0].set_ylabel("held-out loss, nats per byte")
  figure.axes[-1].legend(fontsize=6)
  figure.savefig(os.path.join(args.out, "pipelined_hours.png"), dpi=120)
  claims.write_csv(os.path.join(args.out, "pipelined_hours.csv"),
                   ("bandwidth", "method", "utilization", "hours", "loss"), rows)
  return trials.markdown(("simulated hours (utilisation)", *RATES), list(table.values()))


def plot(path: str, label: str, gaps: dict[str, dict[str, tuple[float, float]]]) -> None:
  """Intervals, a line for each key."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(9, 0.4 * len(gaps) + 1.4), layout="constrained")
  axes = figure.subplots()
  names = list(dict.fromkeys(name for cells in gaps.values() for name in cells))
  for y, cells in enumerate(gaps.values()):
    for name, (mean, half) in cells.items():
      c = names.index(name)
      axes.errorbar(mean, y + 0.18 * (c - (len(names) - 1) / 2), xerr=half, fmt="o", ms=4, capsize=3, color=f"C{c}",
                    label=name if name and name not in axes.get_legend_handles_labels()[1] else None)
  axes.set_yticks(range(len(gaps)), gaps)
  axes.invert_yaxis()
  axes.axvline(0, color="0.6", lw=1)
  axes.axvline(MARGIN, color="0.6", lw=1, ls=":")
  axes.set_xlabel(label)
  axes.grid(axis="x", alpha=0.3)
  if any(names):
    axes.legend(fontsize=8)
  figure.savefig(path, dpi=120)


if __name__ == "__main__":
  main()
