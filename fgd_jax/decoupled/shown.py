"""What a run shows of itself: a line of metrics.jsonl for each step, and a line a learner on a terminal."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from tqdm import tqdm

from fgd_jax.decoupled.options import Options


def metrics(record: dict[str, Any], loss: float) -> dict[str, Any]:
  """A line of metrics.jsonl from a record of the tape; `step` is the most inner steps of a learner.

  Learners report losses one step late; until the first one, `loss` stands for it.
  """
  losses = [c["loss"] for c in record["contributions"] if c["loss"] is not None and math.isfinite(c["loss"])]
  kept = ("fragment", "learners", "quorum_seconds", "grace_seconds", "sync_seconds", "outer_gradient_norm", "bytes_received",
          "tokens")
  lags = [c["lag"] for c in record["contributions"] if c["lag"] is not None]
  return {"round": record["step"], "step": max(record["inner_steps"].values()), **{k: record[k] for k in kept},
          "contributions": len(record["contributions"]), "train_loss": float(np.mean(losses)) if losses else loss,
          "overlap_steps": float(np.mean(lags)) if lags else None}


class Dashboard:
  """One line a learner on a terminal; elsewhere nothing, as the syncer's line says how it goes."""

  def __init__(self) -> None:
    self._bars: dict[str, tqdm] = {}

  def show(self, name: str, status: dict[str, Any], options: Options) -> None:
    """The newest status of a learner."""
    if not sys.stderr.isatty():
      return
    if name not in self._bars:
      self._bars[name] = tqdm(desc=name, unit="step", position=len(self._bars) + 1, dynamic_ncols=True, file=sys.stderr)
    bar = self._bars[name]
    bar.n = status["n"]
    lag = "" if status["lag"] is None else f"{status['lag']:.1f}"
    bar.set_postfix({"loss": f"{status['loss']:.3f}", "s/step": f"{status['step_seconds']:.3f}", "lag": lag,
                     "life": status["life"]}, refresh=True)

  def close(self) -> None:
    for bar in self._bars.values():
      bar.close()
