"""What is in the folders of runs, also of empty, damaged and unfinished ones."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from fgd_jax.runlog import read_lines


class Run(NamedTuple):
  """One run's folder.

  Attributes:
    name: the folder, as short as it stays unique.
    folder: its path.
    config: its keys, flat; empty where it cannot be read.
    records, events: lines of metrics.jsonl and events.jsonl.
    status: "finished", "round 3 of 10", or one sentence about what is wrong.
    finished: whether its last round is recorded.
  """

  name: str
  folder: str
  config: dict[str, Any]
  records: list[dict[str, Any]]
  events: list[dict[str, Any]]
  status: str
  finished: bool

  def last(self, key: str) -> Any:
    """The newest recorded value, None without any."""
    return next((r[key] for r in reversed(self.records) if r.get(key) is not None), None)

  @property
  def workers(self) -> int | str | None:
    """How many; "4, then 3" where the number changed."""
    changes = [e for e in self.events if e.get("event") == "workers"]
    if not changes:
      return self.config.get("workers")
    return ", then ".join(str(n) for n in [changes[0].get("before"), *[e.get("now") for e in changes]])


def find(folders: Sequence[str]) -> list[Run]:
  """The runs in `folders`, each a run's folder or one that has runs somewhere below it.

  Raises:
    ValueError: a path that is not a folder, or without any run.
  """
  paths: list[str] = []
  for folder in folders:
    if not os.path.isdir(folder):
      raise ValueError(f"{folder} is not a folder; give folders of runs.")
    found = _below(folder)
    if not found:
      raise ValueError(f"{folder} holds no run (a folder with config.json); give the --workdir of a run, or a folder of "
                       "them.")
    paths.extend(path for path in map(os.path.abspath, found) if path not in paths)
  return [read(path, name) for path, name in zip(paths, short_names(paths))]


def _below(folder: str) -> list[str]:
  """The runs in a folder, in order; what is inside a run is not looked at."""
  found = []
  for path, subfolders, _ in os.walk(folder):
    if _is_run(path):
      found.append(path)
      subfolders.clear()
  return sorted(found)


def _is_run(folder: str) -> bool:
  there = lambda name: os.path.isfile(os.path.join(folder, name))
  return there("metrics.jsonl") or there("config.json") and not there("model.safetensors")  # the latter: an exported model


def short_names(paths: Sequence[str]) -> list[str]:
  """Paths without the folders that all have in common."""
  common = os.path.commonpath([os.path.dirname(path) for path in paths])
  return [os.path.relpath(path, common) for path in paths]


def read(folder: str, name: str) -> Run:
  """One run; what is wrong with it becomes its status."""
  config, records, events, problem = {}, [], [], None
  try:
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
      config = json.load(f)
    if not isinstance(config, dict):
      raise ValueError("it holds no keys")
  except (OSError, ValueError) as e:
    config, problem = {}, f"config.json is missing or damaged ({type(e).__name__}), so the run is left out of the figures."
  try:
    records = read_lines(os.path.join(folder, "metrics.jsonl"))
    events = read_lines(os.path.join(folder, "events.jsonl"))
  except ValueError as e:
    problem = problem or f"{e}"
  decoupled = os.path.isdir(os.path.join(folder, "syncer"))
  if decoupled:  # a round in its records is a syncer step; there is no SPMD round to simulate
    policy = config.get("decoupled.policy")
    config = {**config, "method.name": "decoupled" if policy == "decoupled" else f"decoupled/{policy}"}
  rounds = config.get("steps" if decoupled else "rounds")
  done = records[-1]["round"] if records else 0
  if problem is None and not records:
    problem = "No round is recorded yet."
  finished = problem is None and done == rounds
  return Run(name, folder, config, records, events, problem or ("finished" if finished else f"round {done} of {rounds}"),
             finished)
