"""Runs that differ in the seed alone, and their mean and spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fgd_jax.config import FREE_KEYS, flat
from fgd_jax.default_config import get_config as default
from fgd_jax.report.runs import Run

SEEDS = ("seed", "faults.seed")


class Group(NamedTuple):
  """Runs of one config.

  Attributes:
    label: the method, and what else tells the group from the others.
    runs: its runs with records, one for each seed.
  """

  label: str
  runs: list[Run]

  @property
  def averaged(self) -> list[Run]:
    """The runs of which means are taken: the finished ones, all where none is."""
    return [run for run in self.runs if run.finished] or self.runs


class Curve(NamedTuple):
  """Mean over seeds and standard deviation (0 for one run) at the points that all runs have.

  Attributes:
    x, mean, deviation: float64 [points].
    runs: how many.
  """

  x: np.ndarray
  mean: np.ndarray
  deviation: np.ndarray
  runs: int


def differing(runs: Sequence[Run]) -> list[str]:
  """Config keys whose values are not the same in all runs with a config, without the seed and what computes nothing."""
  usual = flat(default())  # what a key meant before it was there
  configs = [{**usual, **run.config} for run in runs if run.config]
  keys = sorted({key for config in configs for key in config})
  return [key for key in keys if key not in FREE_KEYS + SEEDS and len({repr(c.get(key)) for c in configs}) > 1]


def group(runs: Sequence[Run]) -> list[Group]:
  """Runs with records, put together where nothing but the seed differs; in the order of their first run."""
  usable = [run for run in runs if run.config and run.records]
  keys, usual = differing(usable), flat(default())
  members: dict[str, list[Run]] = {}
  for run in usable:
    members.setdefault(repr([run.config.get(key, usual.get(key)) for key in keys]), []).append(run)
  return [Group(label, found) for label, found in zip(_labels([found[0] for found in members.values()], keys),
                                                      members.values())]


def _labels(firsts: Sequence[Run], keys: Sequence[str]) -> list[str]:
  """Methods, and, where these are not all different, the keys in which runs of the same method differ."""
  labels = []
  for run in firsts:
    method = str(run.config.get("method.name"))
    same = [other for other in firsts if other.config.get("method.name") == method]
    words = [f"{key.removeprefix('method.')}={run.config.get(key)}" for key in keys if key != "method.name"
             and len({repr(other.config.get(key)) for other in same}) > 1]
    labels.append(", ".join([method, *words]))
  return labels


def curve(runs: Sequence[Run], x: Callable[[dict[str, Any]], float | None], y: Callable[[dict[str, Any]], float | None]
          ) -> Curve | None:
  """y against x over the rounds that all runs have; None without any."""
  series = []
  for run in runs:
    points = {r["round"]: (x(r), y(r)) for r in run.records}
    series.append({number: (a, b) for number, (a, b) in points.items() if a is not None and b is not None})
  rounds = sorted(set.intersection(*map(set, series))) if series else []
  if not rounds:
    return None
  values = np.array([[points[number] for number in rounds] for points in series], np.float64)  # [runs, points, 2]
  deviation = values[..., 1].std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(len(rounds))
  return Curve(values[..., 0].mean(axis=0), values[..., 1].mean(axis=0), deviation, len(runs))


def key(name: str) -> Callable[[dict[str, Any]], Any]:
  """A record's value under `name`."""
  return lambda record: record.get(name)


def mean_and_deviation(values: Sequence[Any]) -> tuple[float | None, float | None]:
  """Of the values that are there."""
  known = [float(v) for v in values if v is not None]
  return (float(np.mean(known)) if known else None), (float(np.std(known, ddof=1)) if len(known) > 1 else None)
