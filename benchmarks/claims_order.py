"""Do FGD's variants come in the order that its authors report? Paired seeds, each method tuned, against simulated hours.

    python benchmarks/claims_order.py [--out=docs/claims] [--full]

Outer learning rate and momentum (data_parallel: the inner learning rate) are tuned for every method in six settings on seed
101, at M = 8 and H = 20; then it is trained on paired seeds, and, as tuned there, with other M and H on equally many tokens.
Besides the paper's subset stands the one of equal bytes that `fgd_jax.report.sensitivity` picks at the end of such a run.
Writes order.csv, order_pairs.csv (every two methods) and order.png (the variants, with 95 % intervals of the paired
difference to DiLoCo; loss against simulated hours at the bandwidth at which DiLoCo computes 36 % of its time),
order_hours.csv (against DiLoCo trained for those hours alone, so that its learning rate has decayed, too, and against its
long run at that hour), and order_trend.csv and .png. By estimate 40 minutes on two idle cores; --full (three tuning seeds,
12 seeds, six for each trend): an hour and a half.
"""

from __future__ import annotations

import argparse
import math
import os

import claims
import numpy as np
import trials

PUBLISHED = {"data_parallel": 17.53, "DiLoCo": 18.65, "GlobalM1LocalM2": 18.80, "GlobalM1LocalM2-subset": 19.15,
             "LocalM1M2": 19.37, "GlobalM1": 19.42}  # perplexity, 10B tokens, M = 8, H = 100 (arXiv 2606.22768)
METHODS = {**claims.METHODS, "GlobalM1LocalM2, JS's subset": trials.Entry(
    "GlobalM1LocalM2", "method.subset=^(embed|layers_0|layers_3|lm_head)/", claims.LOW)}
CELLS = ((4, 20), (8, 20), (16, 20), (8, 10), (8, 50))  # (M, H)


def main() -> None:
  args = claims.arguments(__doc__, seeds=6, full=12)
  setting = claims.tuned(args, METHODS)
  words = {name: entry.words(claims.settings(), setting[name]) for name, entry in METHODS.items()}
  done = trials.runs(claims.store(args), [(w, args.final) for w in words.values()], args.jobs, "order")
  print(order(args, setting, words, done), "\n")
  claims.write_pairs(os.path.join(args.out, "order_pairs.csv"), words, done, args.final)
  print(equal_hours(args, setting, words, done), "\n")
  print(trend(args, setting))


def difference(done, words: str, reference: str, seeds: list[int]) -> tuple[float, float]:
  """Mean of the paired differences in held-out loss, and half its 95 % interval."""
  return trials.interval([done[words, s]["eval_loss"] - done[reference, s]["eval_loss"] for s in seeds])


def order(args: argparse.Namespace, setting: dict[str, str], words: dict[str, str], done) -> str:
  """Writes order.csv and order.png; returns the table."""
  bandwidth = claims.like_100_mbps(words["DiLoCo"])
  rows, lines = [], []
  for name in words:
    total, utilisation = claims.seconds(words[name], f"{bandwidth}Mbps")
    mean, half = trials.interval([done[words[name], s]["eval_loss"] for s in args.final])
    gap, gap_half = difference(done, words[name], words["DiLoCo"], args.final)
    reported = math.log(PUBLISHED[name] / PUBLISHED["DiLoCo"]) if name in PUBLISHED else float("nan")
    of = lambda key, name=name: sum(done[words[name], s][key] for s in args.final) / len(args.final)
    rows.append([name, setting[name], len(args.final), mean, half, gap, gap_half, reported, of("consensus_l2"),
                 of("js_distance"), of("bytes_overlapped"), of("bytes_blocking"), utilisation, total / 3600])
    lines.append([name, setting[name].replace("method.outer_", "").replace(",", ", "), f"{mean:.3f} ± {half:.3f}",
                  "" if name == "DiLoCo" else f"{gap:+.3f} ± {gap_half:.3f}",
                  f"{reported:+.3f}" if name in PUBLISHED else "", f"{100 * utilisation:.0f}",
                  f"{total / 3600:.2f}"])
  claims.write_csv(os.path.join(args.out, "order.csv"), (
      "method", "setting", "seeds", "loss", "loss_ci95", "minus_diloco", "minus_diloco_ci95", "published_minus_diloco",
      "consensus_l2", "js_distance", "bytes_overlapped", "bytes_blocking", "utilization", "simulated_hours"), rows)
  plot(os.path.join(args.out, "order.png"), rows, words, done, args.final, bandwidth)
  return trials.markdown(("method", "tuned", "held-out loss", "minus DiLoCo", "published", "utilisation %",
                          "simulated hours"), lines)


def plot(path: str, rows, words: dict[str, str], done, seeds: list[int], bandwidth: float) -> None:
  from matplotlib.figure import Figure

  figure = Figure(figsize=(12, 4.2), layout="constrained")
  left, right = figure.subplots(1, 2)
  for y, row in enumerate(rows):
    left.errorbar(row[5], y, xerr=row[6], fmt="o", color=f"C{y}", capsize=3)
    left.plot(row[7], y, "x", color="0.3",
              label="published, 1.5B parameters (log perplexities)" if y == 0 else None)
  left.set_yticks(range(len(rows)), [row[0] for row in rows])
  left.invert_yaxis()
  left.axvline(0, color="0.7", lw=1)
  left.set_xlabel("held-out loss minus DiLoCo's, nats (95 % interval)")
  left.legend(fontsize=8)
  for y, (name, w) in enumerate(words.items()):
    if name == "data_parallel":
      continue  # a hundred times as long
    total, _ = claims.seconds(w, f"{bandwidth}Mbps")
    curves = [claims.curve_at(done[w, s], total) for s in seeds]
    right.plot(curves[0][0], [sum(c) / len(c) for c in zip(*(losses for _, losses in curves))], "o-", ms=3, color=f"C{y}",
               label=name)
  right.set_xlabel(f"simulated hours at {bandwidth:.2f} Mbit/s and {claims.STEP_SECONDS:g} s a step (DiLoCo: 36 %)")
  right.set_ylabel("held-out loss, nats per byte")
  right.legend(fontsize=8)
  for axes in (left, right):
    axes.grid(alpha=0.3)
  figure.savefig(path, dpi=120)


def equal_hours(args: argparse.Namespace, setting: dict[str, str], words: dict[str, str], done) -> str:
  """Trains DiLoCo for as many rounds as it computes in each variant's hours, its cosine ending there; writes
  order_hours.csv; returns the table of differences to these runs, and to the long runs at that hour."""
  bandwidth = claims.like_100_mbps(words["DiLoCo"])
  hours = {name: claims.seconds(w, f"{bandwidth}Mbps")[0] for name, w in words.items()}
  whole = trials.config_of(words["DiLoCo"]).rounds
  shorter, rounds = {}, {}
  for name in words:
    if name not in ("DiLoCo", "data_parallel"):
      rounds[name] = max(1, round(whole * hours[name] / hours["DiLoCo"]))
      base = claims.settings(tokens=claims.TOKENS * rounds[name] // whole)
      shorter[name] = claims.METHODS["DiLoCo"].words(base, setting["DiLoCo"])
  done = trials.runs(claims.store(args), [(w, args.final) for w in shorter.values()], args.jobs, "equal hours")
  rows = []
  for name, w in shorter.items():
    long = [claims.curve_at(done[words["DiLoCo"], s], hours["DiLoCo"]) for s in args.final]
    there = [float(np.interp(hours[name] / 3600, *curve)) for curve in long]
    ended = [done[w, s]["eval_loss"] for s in args.final]
    gaps = [trials.interval([done[words[name], s]["eval_loss"] - x for s, x in zip(args.final, losses)])
            for losses in (ended, there)]
    rows.append([name, hours[name] / 3600, rounds[name], len(ended), *trials.interval(ended), *gaps[0],
                 *trials.interval(there), *gaps[1]])
  claims.write_csv(os.path.join(args.out, "order_hours.csv"), (
      "method", "hours", "diloco_rounds", "seeds", *(f"{what}{ci}" for which in ("ended", "long") for what in (
          f"diloco_{which}", f"minus_diloco_{which}") for ci in ("", "_ci95"))), rows)
  show = lambda x, half, sign="": f"{x:{sign}.3f} ± {half:.3f}"
  return trials.markdown(
      ("method", "simulated hours", "DiLoCo's rounds", "ended there", "minus this", "of the long run", "minus this"),
      [[name, f"{h:.2f}", f"{r} of {whole}", show(*row[:2]), show(*row[2:4], "+"), show(*row[4:6]), show(*row[6:], "+")]
       for name, h, r, _, *row in rows])


def trend(args: argparse.Namespace, setting: dict[str, str]) -> str:
  """Trains the other M and H; writes order_trend.csv and .png; returns the table."""
  seeds = args.final[:6 if args.full else 3]
  methods = {name: entry for name, entry in claims.METHODS.items() if name != "data_parallel"}
  words = {(name, m, h): entry.words(claims.settings(m, h), setting[name])
           for name, entry in methods.items() for m, h in CELLS}
  done = trials.runs(claims.store(args), [(w, seeds) for w in words.values()], args.jobs, "M and H")
  gaps = {key: difference(done, w, words["DiLoCo", key[1], key[2]], seeds) for key, w in words.items()}
  losses = {key: trials.interval([done[w, s]["eval_loss"] for s in seeds])[0] for key, w in words.items()}
  claims.write_csv(os.path.join(args.out, "order_trend.csv"),
                   ("method", "workers", "inner_steps", "seeds", "loss", "minus_diloco", "minus_diloco_ci95"),
                   [[name, m, h, len(seeds), losses[name, m, h], *gaps[name, m, h]] for name, m, h in words])
  from matplotlib.figure import Figure

  figure = Figure(figsize=(10, 3.8), layout="constrained")
  left, right = figure.subplots(1, 2, sharey=True)
  for axes, cells, index, label in ((left, [c for c in CELLS if c[1] == 20], 0, "workers M (H = 20)"),
                                    (right, sorted(c for c in CELLS if c[0] == 8), 1, "inner steps H (M = 8)")):
    for c, name in enumerate(methods):
      if name != "DiLoCo":
        points = [gaps[name, *cell] for cell in cells]
        axes.errorbar([cell[index] for cell in cells], [p[0] for p in points], yerr=[p[1] for p in points], fmt="o-", ms=4,
                      capsize=3, color=f"C{c + 1}", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks([cell[index] for cell in cells], [str(cell[index]) for cell in cells])
    axes.axhline(0, color="0.7", lw=1)
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)
  left.set_ylabel("held-out loss minus DiLoCo's, nats (95 %)")
  left.legend(fontsize=8)
  figure.savefig(os.path.join(args.out, "order_trend.png"), dpi=120)
  return trials.markdown(("minus DiLoCo", *(f"M = {m}, H = {h}" for m, h in CELLS)), [
      [name, *(f"{gaps[name, m, h][0]:+.3f} ± {gaps[name, m, h][1]:.3f}" for m, h in CELLS)]
      for name in methods if name != "DiLoCo"])


if __name__ == "__main__":
  main()
