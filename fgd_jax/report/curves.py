"""The picture of one run: held-out loss, disagreement and bytes by round."""

from __future__ import annotations

import os
from typing import Any

from fgd_jax.runlog import read_lines

FILE_NAME = "curves.png"


def plot_run(workdir: str, summary: dict[str, Any]) -> str:
  """Draws curves.png in the run's folder from its metrics.jsonl; returns its path.

  Panels: training and held-out loss with the unigram level, consensus L2, JS distance, bytes a worker sends in a round.
  """
  import matplotlib
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt
  from matplotlib import ticker

  records = read_lines(os.path.join(workdir, "metrics.jsonl"))
  series = lambda key: zip(*[(r["round"], r[key]) for r in records if key in r])
  figure, ((loss, consensus), (js, traffic)) = plt.subplots(2, 2, figsize=(11, 7), layout="constrained", sharex=True)
  figure.suptitle(f"{summary['method']}, {summary['workers']} workers, {summary['parameters']:,} parameters: "
                  f"held-out loss {summary['eval_loss']:.3f}")
  loss.plot(*series("train_loss"), color="0.75", lw=1, label="training, mean of workers")
  loss.plot(*series("eval_loss"), marker=".", label="held out, mean model")
  loss.plot(*series("eval_loss_workers"), marker=".", ls="--", label="held out, mean of workers")
  if summary["unigram_loss"] == summary["unigram_loss"]:
    loss.axhline(summary["unigram_loss"], color="k", lw=0.8, ls=":", label="unigram model")
  loss.set_ylabel("loss (nats per token)")
  loss.legend()
  for axis, key, label in ((consensus, "consensus_l2", "consensus L2 (end of inner phase)"),
                           (js, "js_distance", "JS distance (0 to 1)")):
    if any(key in r for r in records):
      axis.plot(*series(key), marker=".")
    else:
      axis.text(0.5, 0.5, "not measured (measure_every=0)", ha="center", transform=axis.transAxes)
    axis.set_ylabel(label)
    axis.set_ylim(bottom=0)
  for key, label in (("bytes_overlapped", "overlapped"), ("bytes_blocking", "blocking")):
    rounds, values = series(key)
    traffic.plot(rounds, [v / 1e6 for v in values], label=label, ls="-" if key == "bytes_overlapped" else "--")
  traffic.set_ylabel("MB sent per worker and round")
  traffic.set_ylim(bottom=0)
  traffic.legend(loc="center right")
  for axis in (js, traffic):
    axis.set_xlabel("round")
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  for axis in (loss, consensus, js, traffic):
    axis.grid(alpha=0.3)
  path = os.path.join(workdir, FILE_NAME)
  figure.savefig(path, dpi=120)
  plt.close(figure)
  return path
