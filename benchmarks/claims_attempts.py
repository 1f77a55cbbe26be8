"""What might beat pipelined DiLoCo as it is: schedules, momenta, the order of fragments, isotropic outer gradients.

    python benchmarks/claims_attempts.py [--out=docs/claims] [--full]

Registered before the first run: the settings (M = 8, H = 20, 0.46M parameters, equal tokens), tuning seed and rule of
claims_pipelined.py, three settings an attempt, around or beyond the best one that claims_pipelined.py found, four paired
seeds:
  cosine      the outer learning rate falls to 0 by a cosine; DiLoCo with it, too
  momenta     lower and higher momenta for P = 20, whose best one was the lowest of its grid
  JS order    fragments of layers in the order of their JS sensitivity (docs/claims/sensitivity.md: embedding and head,
              first, last, third, second layer), with the setting that was chosen for the tree's order. At the end of a
              round, when the model is evaluated, the first fragment has just been merged, the last one H/P steps ago, the
              second one longest ago; so either the most sensitive are the freshest or the oldest
  Iso-C       isotropic outer gradients on landing: fragments of tensors, two steps in flight in place of four; and a greater
              momentum and outer learning rate, for the blocking IsoLoCo, too
When fragments of tensors were best at 4.0, the edge of their grid, the same learning rate was added to the grids of the
other two and 6.0 to theirs.

Writes attempts.csv, attempts_pairs.csv (every two) and attempts.png. By estimate 30 minutes on two idle cores after
claims_pipelined.py; --full (three tuning seeds, eight paired ones): an hour and a half.
"""

from __future__ import annotations

import argparse
import os

import claims
import trials
from claims_order import difference
from claims_pipelined import LAYERS, METHODS, plot, verdict
from trials import Entry

COSINE, ISO, P20 = "method.outer_schedule=cosine", "method.aggregator=iso_c", "method.fragments=20"
TENSORS = "method.fragments=10,method.order=balanced"
STEEP, AROUND = trials.outer((0.7, 1.0, 1.4), (0.3,)), trials.outer((1.8, 2.7, 4.0, 6.0), (0.6,))
BEYOND = trials.outer((2.7, 4.0), (0.6, 0.8))
ENDS, LAYER = "^(embed|final_norm|lm_head)/", "^layers_{}/".format
# P = 5. Freshest at the end of a round: fragment 0, then 4, 3, 2, 1.
FRESH = ";".join((ENDS, LAYER(1), LAYER(2), LAYER(3), LAYER(0)))
OLD = ";".join((LAYER(1), ENDS, LAYER(0), LAYER(3), LAYER(2)))
ISOLOCO = "IsoLoCo (blocking), greater steps"  # against which those with isotropic outer gradients are compared, too
ATTEMPTS = {
    "Pipelined, P = 20, momenta": Entry("pipelined_diloco", P20, trials.outer((0.7,), (0.0, 0.15, 0.45))),
    "DiLoCo, cosine": Entry("diloco", COSINE, STEEP),
    "Pipelined, P = 20, cosine": Entry("pipelined_diloco", f"{P20},{COSINE}", STEEP),
    "Pipelined, tensors, P = 10, Iso-C": Entry("pipelined_diloco", f"{TENSORS},{ISO}", AROUND),
    "Pipelined, layers, Iso-C, greater steps": Entry("pipelined_diloco", f"{LAYERS},{ISO}", BEYOND),
    ISOLOCO: Entry("isoloco", "", BEYOND),
}
ORDERS = {"Pipelined, layers, sensitive freshest": FRESH, "Pipelined, layers, sensitive oldest": OLD}
KNOWN = ("data_parallel", "DiLoCo", "Pipelined, P = 20", "Pipelined, layers, P = 5", "Pipelined, layers, Iso-C",
         "IsoLoCo (blocking)")

ENTRIES = {name: (METHODS | claims.METHODS)[name] for name in KNOWN} | ATTEMPTS


def main() -> None:
  args = claims.arguments(__doc__, seeds=4, full=8)
  print(table(args, claims.tuned(args, ENTRIES)))


def table(args: argparse.Namespace, setting: dict[str, str]) -> str:
  """Trains the attempts; writes attempts.csv and .png; returns the table of differences to DiLoCo."""
  base, layers = claims.settings(), setting["Pipelined, layers, P = 5"]
  words = {name: entry.words(base, setting[name]) for name, entry in ENTRIES.items()}
  for name, patterns in ORDERS.items():
    words[name] = Entry("pipelined_diloco", f"method.fragment_patterns={patterns}").words(base, layers)
  done = trials.runs(claims.store(args), [(w, args.final) for w in words.values()], args.jobs, "attempts")
  claims.write_pairs(os.path.join(args.out, "attempts_pairs.csv"), words, done, args.final)
  rows, lines = [], []
  for name, w in words.items():
    gap, half = difference(done, w, words["DiLoCo"], args.final)
    loss, loss_half = trials.interval([done[w, s]["eval_loss"] for s in args.final])
    chosen = setting.get(name, layers).replace("method.outer_", "").replace(",", ", ")
    decided = "" if name == "DiLoCo" else verdict(gap, half)
    blocking = done[w, args.final[0]]["bytes_blocking"] / 1e6
    iso = difference(done, w, words[ISOLOCO], args.final) if "Iso-C" in name else ()
    rows.append([name, chosen, len(args.final), loss, loss_half, gap, half, decided, *(iso or ("", "")), blocking])
    show = lambda gap, half: f"{gap:+.4f} ± {half:.4f}"
    lines.append([name, chosen, f"{loss:.3f} ± {loss_half:.3f}", "" if name == "DiLoCo" else show(gap, half), decided,
                  show(*iso) if iso else "", f"{blocking:.2f}"])
  claims.write_csv(os.path.join(args.out, "attempts.csv"), (
      "method", "setting", "seeds", "loss", "loss_ci95", "minus_diloco", "minus_diloco_ci95", "verdict",
      "minus_isoloco", "minus_isoloco_ci95", "MB_blocking"), rows)
  plot(os.path.join(args.out, "attempts.png"), "held-out loss minus DiLoCo's, nats (95 % interval)",
       {row[0]: {"": (row[5], row[6])} for row in rows if row[0] != "DiLoCo"})
  return trials.markdown(("method", "tuned", "held-out loss", "minus DiLoCo", "rule", "minus IsoLoCo", "MB blocking"), lines)


if __name__ == "__main__":
  main()
