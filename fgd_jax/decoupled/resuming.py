"""The way back from a checkpoint: a run's syncers and learners as its newest one has them."""

from __future__ import annotations

import glob
import os
import shutil
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import logging
from ml_collections import ConfigDict

from fgd_jax import models
from fgd_jax.decoupled.cuts import Cuts
from fgd_jax.decoupled.learner import LearnerCore
from fgd_jax.decoupled.merging import Merger
from fgd_jax.decoupled.programs import Programs
from fgd_jax.decoupled.store import TAPE, Store, cut_tape
from fgd_jax.decoupled.syncer import SyncerCore
from fgd_jax.export import first_params


class Resumed(NamedTuple):
  """What a checkpoint says of the learners.

  Attributes:
    states: of learners, by number. lives: of learners that were, the last life that any syncer has counted.
    shards: of the data, None in a new run. step: of the checkpoint, 0 without one.
  """

  states: dict[int, dict[str, Any]]
  lives: dict[int, int]
  shards: int | None
  step: int


def resume(config: ConfigDict, workdir: str, model: models.Model, programs: Programs) -> Resumed:
  """Puts the newest checkpoint back where syncers look for their state."""
  folder, options = os.path.join(workdir, "syncer"), programs.options
  cuts = Cuts(os.path.join(workdir, "checkpoints"), config.checkpoint_keep, config, options.shards)
  try:
    if (step := cuts.latest()) is None:
      for old in glob.glob(os.path.join(glob.escape(folder), "*")):  # of an attempt that ended before its first checkpoint
        shutil.rmtree(old, ignore_errors=True)
      return Resumed({}, {}, None, 0)
    params = first_params(config, model)
    merger = Merger(options, programs.params, config.seed)
    cores = [SyncerCore(options, merger, {}, params, s) for s in range(options.syncers)]
    whole = {p: (0, x) for core in cores for p, x in core.theta.items()}
    like = LearnerCore(programs, 0, 1, 0, whole).snapshot(0)["arrays"]
    parts, states, shards = cuts.restore([(c.theta, c.outer) for c in cores], like)
  finally:
    cuts.close()
  lives = put_back(folder, parts, states, step)
  logging.info("Resuming at step %d of %d, with the states of %d learners.", step, options.steps, len(states))
  return Resumed(states, lives, shards, step)


def put_back(folder: str, parts: list[dict[str, Any]], states: Mapping[int, dict[str, Any]], step: int) -> dict[int, int]:
  """Makes the syncers' folders what they were at a checkpoint; returns the lives, and settles what learners had under way.

  Args:
    folder: of all syncers. parts, states: what the checkpoint has of syncers and learners. step: its step.
  """
  settle(states, parts)
  lives: dict[int, int] = {}
  for s, part in enumerate(parts):
    last = max(part["facts"]["version"].values())
    lines = cut_tape(os.path.join(folder, str(s), TAPE), last, len(parts))
    store = Store(os.path.join(folder, str(s)))
    for p, theta in part["theta"].items():
      store.save(p, theta, part["outer"][p], part["facts"])
    for m, state in states.items():
      now = {k: state["facts"][k] for k in ("learner", "life", "ops_from", "ops")}
      store.append({"time": time.time(), "actor": f"learner {m}", "event": "saved", "cause": f"checkpoint of step {step}",
                    "syncer_step": last + len(parts), **now})
    counted = [(int(m), member["life"]) for m, member in part["facts"]["members"].items()]
    counted += [(x["learner"], x["life"]) for x in lines if "life" in x]  # after the checkpoint, in the step that was open
    for m, life in counted:
      lives[m] = max(lives.get(m, 0), life)
  return lives


def settle(states: Mapping[int, dict[str, Any]], parts: list[dict[str, Any]]) -> None:
  """Writes into states what each syncer had merged of the life that they are from; see `LearnerCore`.

  States that no learner has continued since an earlier checkpoint have that already.
  """
  for m, state in states.items():
    members = [part["facts"]["members"].get(str(m)) for part in parts]
    state["facts"].setdefault("merged", [x["taped"] if x and x["life"] == state["facts"]["life"] else 0 for x in members])


def still_holds(number: int, ended: int, parts: list[dict[str, Any]]) -> bool:
  """Whether a learner's state of an earlier checkpoint belongs to these parts of syncers: nothing of it was merged since.

  Args:
    number: of the learner. ended: its last life at that checkpoint; the next one is the first that may have continued it.
  """
  members = [part["facts"]["members"].get(str(number)) for part in parts]
  return all(x is None or x["life"] <= ended or x["life"] == ended + 1 and not x["taped"] for x in members)
