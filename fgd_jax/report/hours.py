"""How long a run would take on links of a chosen bandwidth, by the network simulator."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fgd_jax import netsim
from fgd_jax.config import unflat
from fgd_jax.export.trained import read_tokenizer
from fgd_jax.report.groups import Group
from fgd_jax.report.runs import Run

_ROUNDS = 20  # simulated; the first ones, in which nothing arrives yet, hardly count


class Pace(NamedTuple):
  """Of one group on one link.

  Attributes:
    round_seconds: of a round.
    compute_utilization: share of the time in which workers compute.
  """

  round_seconds: float
  compute_utilization: float


def measured_step_seconds(runs: list[Run]) -> float | None:
  """The median over runs of the seconds that an inner step took where they were trained; None without measurements."""
  seconds = []
  for run in runs:
    rounds = [b["tokens"] - a["tokens"] for a, b in zip(run.records, run.records[1:]) if "tokens" in a and "tokens" in b]
    speeds = [r["tokens_per_second"] for r in run.records if r.get("tokens_per_second")]
    if rounds and speeds:
      seconds.append(float(np.median(rounds)) / float(np.median(speeds)) / run.config["inner_steps"])
  return float(np.median(seconds)) if seconds else None


def pace(group: Group, bandwidth: str, step_seconds: float) -> Pace:
  """Simulates some rounds of the group's config, without failures.

  Args:
    group: of runs with records.
    bandwidth: of every worker's link, such as "100Mbps".
    step_seconds: of an inner step.

  Raises:
    ValueError: a config that cannot be simulated, or a bad bandwidth.
  """
  config = unflat(group.averaged[0].config)
  if config.model.vocab_size is None:
    config.model.vocab_size = _vocabulary(config)
  plan, _ = netsim.plan_of_config(config)
  links = netsim.read_links(bandwidth, plan.workers)
  result = netsim.simulate(plan, links, netsim.StepTimes((step_seconds,)), rounds=_ROUNDS)
  return Pace(result.round_seconds, result.compute_utilization)


def _vocabulary(config: ConfigDict) -> int:
  """That of the data, of which the size of the model depends."""
  if config.data.source == "synthetic":
    return config.data.vocab_size
  if (found := read_tokenizer(config)) is None:
    raise ValueError("its tokenizer is gone, so the size of its vocabulary is unknown.")
  return found.vocab_size
