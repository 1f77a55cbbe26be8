"""Does the Jensen-Shannon distance between workers predict loss spikes better than the L2 distance of their parameters?

    python benchmarks/claims_spikes.py [--out=docs/claims] [--full]

Trains runs that should spike (too high an outer learning rate, too little mixing, synchronised momentum) and calm ones, and
measures after every round the workers' mean held-out loss, and at the end of its inner phase both distances. Rounds are
short (H = 10), the inner learning rate stays constant after its warm-up, so that the distances do not fall with it.

A *spike* is a round whose loss is above the least loss so far by more than `RISE` nats, after a round that was not. A
distance is *raised* by its ratio to its own median of the five rounds before, and a *warning* is a ratio above 1.2. Reported
for each distance: the correlation r of log(ratio) with the loss minus its median of the five rounds before, in the same
round and 1 to 3 rounds later; the median ratio where a spike begins; the area under the ROC curve (0.5: no better than
chance) of the ratio as a sign that the loss rises by more than RISE / 2 within the next three rounds; the share of spikes
with a warning in the five rounds before, and of all rounds with one (chance); and the lead, the median number of rounds from
the first of these warnings to the spike (0: none). r and the ratio at spikes were added after a first look at the curves.
Writes spikes.csv (all rounds), spikes_summary.csv, spikes.png. About 8 minutes on two busy cores; --full (six seeds, rounds
twice as many) six times as long.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import claims
import numpy as np
import trials

RISE, BACK, AHEAD, WARNING = 0.03, 5, 3, 1.2
CASES = {
    "GlobalM1 1.0 / 0.9": "method=GlobalM1,method.outer_lr=1.0,method.outer_momentum=0.9",
    "GlobalM1 0.7 / 0.9": "method=GlobalM1,method.outer_lr=0.7,method.outer_momentum=0.9",
    "GlobalM1 0.7 / 0.9, outer state mixed": "method=GlobalM1,method.outer_lr=0.7,method.outer_momentum=0.9,"
                                             "method.mix_outer_state=mix1",
    "LocalM1M2 1.0 / 0.9": "method=LocalM1M2,method.outer_lr=1.0,method.outer_momentum=0.9",
    "pairs in Mix1 alone, 0.7 / 0.9": "method=fgd,method.mix1=random_pairs,method.mix2=identity,method.outer_lr=0.7,"
                                      "method.outer_momentum=0.9",
    "DiLoCo 1.2 / 0.9": "method=diloco,method.outer_lr=1.2,method.outer_momentum=0.9",
    "GlobalM1LocalM2 0.7 / 0.3 (calm)": "method=GlobalM1LocalM2,method.outer_lr=0.7,method.outer_momentum=0.3",
    "DiLoCo 0.7 / 0.3 (calm)": "method=diloco,method.outer_lr=0.7,method.outer_momentum=0.3",
}


def main() -> None:
  args = claims.arguments(__doc__, seeds=2, full=6)
  rounds = 80 if args.full else 40
  base = (f"workers=8,inner_steps=10,rounds={rounds},batch_size=2,seq_len=64,inner.lr=3e-3,inner.warmup_steps=20,"
          "inner.schedule=constant,eval_batches=4,eval_batch_size=16,measure_sequences=8,eval_every=1,measure_every=1")
  words = {name: f"{base},{case}" for name, case in CASES.items()}
  done = trials.runs(claims.store(args), [(w, args.final) for w in words.values()], args.jobs, "spikes")
  curves = {(name, seed): columns(done[w, seed]) for name, w in words.items() for seed in args.final}
  claims.write_csv(os.path.join(args.out, "spikes.csv"), ("case", "seed", "round", "loss", "l2", "js"), [
      [name, seed, r + 1, *(f"{c[key][r]:.6g}" for key in ("loss", "l2", "js"))]
      for (name, seed), c in curves.items() for r in range(len(c["loss"]))])
  plot(os.path.join(args.out, "spikes.png"), curves)
  print(summary(curves, args))


def columns(run: dict[str, Any]) -> dict[str, np.ndarray]:
  return {key: np.array([point[name] for point in run["curve"]])
          for key, name in (("loss", "eval_loss_workers"), ("l2", "consensus_l2"), ("js", "js_distance"))}


def spikes(loss: np.ndarray) -> list[int]:
  """Rounds (from 0) at which a spike begins; the rounds of which BACK do not lie behind are left out."""
  above = np.nan_to_num(loss, nan=np.inf) > np.nan_to_num(np.minimum.accumulate(loss), nan=-np.inf) + RISE
  return [r for r in range(BACK, len(loss)) if above[r] and not above[r - 1]]


def raised(distance: np.ndarray) -> np.ndarray:
  """log of the distance over the median of the BACK rounds before; nan where these are not there."""
  out = np.full(len(distance), np.nan)
  for r in range(BACK, len(distance)):
    out[r] = np.log(distance[r] / np.median(distance[r - BACK:r]))
  return out


def auc(score: np.ndarray, label: np.ndarray) -> float:
  """Area under the ROC curve: how often a positive scores above a negative (ties count half)."""
  from scipy import stats

  positive, negative = score[label], score[~label]
  if not len(positive) or not len(negative):
    return float("nan")
  return float(stats.mannwhitneyu(positive, negative).statistic) / (len(positive) * len(negative))


def alarms(curve: dict[str, np.ndarray], key: str) -> tuple[np.ndarray, np.ndarray]:
  """Score of every round, and whether the loss rises by more than RISE / 2 within the next AHEAD rounds."""
  loss, score = curve["loss"], raised(curve[key])
  rounds = [r for r in range(len(loss) - 1) if np.isfinite(score[r]) and np.isfinite(loss[r])]
  rises = [not np.all(loss[r + 1:r + 1 + AHEAD] <= loss[r] + RISE / 2) for r in rounds]
  return score[rounds], np.array(rises, bool)


def lead(curve: dict[str, np.ndarray], key: str) -> list[int]:
  """Rounds from the first warning to each spike; 0 where there was none before it."""
  score = raised(curve[key])
  warned = lambda r: [k for k in range(min(BACK, r), 0, -1) if score[r - k] > np.log(WARNING)]
  return [next(iter(warned(r)), 0) for r in spikes(curve["loss"])]


def at_spikes(curves: list[dict[str, np.ndarray]], key: str) -> float:
  """Median, over the rounds in which a spike begins, of the distance over its recent median."""
  values = [raised(c[key])[r] for c in curves for r in spikes(c["loss"])]
  return float(np.exp(np.median(values))) if values else float("nan")


def by_chance(curves: list[dict[str, np.ndarray]], key: str) -> float:
  """Share of all rounds in whose BACK rounds before there is a warning, so what `lead` would find by chance."""
  scores = [raised(c[key]) for c in curves]
  seen = [np.any(s[r - BACK:r] > np.log(WARNING)) for s in scores for r in range(2 * BACK, len(s))]
  return float(np.mean(seen))


def tracks(curves: list[dict[str, np.ndarray]], key: str, later: int = 0) -> float:
  """Correlation of what a distance is above its recent median with what the loss is above its own, `later` rounds later."""
  x = np.concatenate([raised(c[key])[BACK:len(c[key]) - later] for c in curves])
  above = lambda loss: [loss[r] - np.median(loss[r - BACK:r]) for r in range(BACK + later, len(loss))]
  y = np.concatenate([above(c["loss"]) for c in curves])
  both = np.isfinite(x) & np.isfinite(y)
  return float(np.corrcoef(x[both], y[both])[0, 1])


def summary(curves: dict[tuple[str, int], dict[str, np.ndarray]], args: argparse.Namespace) -> str:
  """Writes spikes_summary.csv; returns its table."""
  rows = []
  for name in [*CASES, "all"]:
    chosen = [c for (case, _), c in curves.items() if name in (case, "all")]
    for key in ("js", "l2"):
      parts, leads = [alarms(c, key) for c in chosen], [k for c in chosen for k in lead(c, key)]
      rows.append([
          name, len(leads), key.upper(), *(tracks(chosen, key, k) for k in range(AHEAD + 1)), at_spikes(chosen, key),
          auc(np.concatenate([s for s, _ in parts]), np.concatenate([l for _, l in parts])),
          float(np.mean([k > 0 for k in leads])) if leads else float("nan"), by_chance(chosen, key),
          float(np.median(leads)) if leads else float("nan")])
  head = ("runs", "spikes", "distance", "r, same round", *(f"r, {k} later" for k in range(1, AHEAD + 1)), "at spikes", "AUC",
          "warned", "by chance", "lead")
  claims.write_csv(os.path.join(args.out, "spikes_summary.csv"), head, rows)
  show = lambda x: "-" if isinstance(x, float) and x != x else f"{x:.2f}" if isinstance(x, float) else x
  return trials.markdown(head, [[show(cell) for cell in row] for row in rows])


def plot(path: str, curves: dict[tuple[str, int], dict[str, np.ndarray]]) -> None:
  """Loss and both distances of the first seed of every case."""
  from matplotlib.figure import Figure

  seed = min(seed for _, seed in curves)
  figure = Figure(figsize=(13, 6.5), layout="constrained")
  for axes, name in zip(figure.subplots(2, 4).flat, CASES):
    c = curves[name, seed]
    rounds = range(1, len(c["loss"]) + 1)
    axes.plot(rounds, c["loss"], color="C0", label="loss (left)")
    for r in spikes(c["loss"]):
      axes.axvline(r + 1, color="C3", lw=0.8, alpha=0.6)
    other = axes.twinx()
    for key, colour in (("js", "C1"), ("l2", "C2")):
      other.plot(rounds, c[key] / np.median(c[key]), color=colour, lw=1, label=f"{key.upper()} / median (right)")
    axes.set_title(name, fontsize=8)
    axes.set_xlabel("round", fontsize=8)
    if name == next(iter(CASES)):
      axes.legend(loc="upper left", fontsize=7)
      other.legend(loc="upper right", fontsize=7)
  figure.savefig(path, dpi=120)


if __name__ == "__main__":
  main()
