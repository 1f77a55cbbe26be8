"""Checkpoints of a run: a consistent cut of syncers and learners, one atomic orbax step each.

A cut holds, of every syncer: fragments, outer optimizer states, who its learners are; of every learner that was in reach:
parameters, inner optimizer state, the global fragments that it had, error feedback, counters, and the inner step that is its
position in its data. No learner's state in it contains a fragment that the syncer's state lacks, and no syncer's state a
contribution that the learner's state has still to make (markers, `actors.Syncer.cut`). Contributions under way are not kept:
learners send them again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from fgd_jax.checkpoint import ConfigMismatchError
from fgd_jax.config import flat
from fgd_jax.decoupled.options import refuse_other_run

PyTree = Any


def _numbered(tree: PyTree) -> dict[str, np.ndarray]:
  """The leaves of a tree by number, in its own order."""
  return {f"{i:06d}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(tree))}


def _like(numbered: Mapping[str, Any], tree: PyTree) -> PyTree:
  """The tree of which `_numbered` made this; `tree` has its structure."""
  treedef: Any = jax.tree.structure(tree)
  return jax.tree.unflatten(treedef, [np.asarray(numbered[f"{i:06d}"]) for i in range(treedef.num_leaves)])


def _silence_readers() -> None:
  """Keeps reads that were under way when one of them failed from printing a traceback each when they end."""
  before = sys.excepthook
  late = lambda e: isinstance(e, RuntimeError) and str(e) == "Event loop is closed"
  sys.excepthook = lambda kind, e, trace: None if late(e) else before(kind, e, trace)


class Cuts:
  """The checkpoints in one run's folder, by syncer step.

  Args:
    folder: made if missing. keep: how many of the newest stay. config: of the run. shards: of its data.
  """

  def __init__(self, folder: str, keep: int, config: ConfigDict, shards: int):
    self._config, self.shards = config, shards
    self._manager = ocp.CheckpointManager(os.path.abspath(folder), options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, create=True))

  def latest(self) -> int | None:
    """The newest complete step on disk."""
    return self._manager.latest_step()

  def save(self, step: int, syncers: list[dict[str, Any]], learners: Mapping[int, dict[str, Any] | None]) -> None:
    """Saves what `Syncer.cut` and `Learner.snapshot` returned; learners without a state are left out."""
    if step == self.latest():
      return
    there = {m: x for m, x in learners.items() if x is not None}
    facts = {"syncers": [s["facts"] for s in syncers], "learners": {str(m): x["facts"] for m, x in there.items()},
             "shards": self.shards}
    arrays = {"syncers": {str(i): _numbered((s["theta"], s["outer"])) for i, s in enumerate(syncers)},
              "learners": {str(m): _numbered(x["arrays"]) for m, x in there.items()}}
    if not arrays["learners"]:
      del arrays["learners"]
    self._manager.save(step, args=ocp.args.Composite(
        state=ocp.args.StandardSave(arrays), facts=ocp.args.JsonSave(facts), config=ocp.args.JsonSave(flat(self._config))))

  def restore(self, syncers: list[PyTree], learner: PyTree) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]], int]:
    """The newest cut.

    Args:
      syncers: (theta, outer) of each syncer, for their structure. learner: the arrays of a snapshot, likewise.

    Returns:
      What was given to `save`, and the number of shards of the data.

    Raises:
      ConfigMismatchError: a config that contradicts the checkpoint's.
      ValueError: a checkpoint that cannot be read.
    """
    step = self.latest()
    try:
      saved = self._manager.restore(step, args=ocp.args.Composite(
          config=ocp.args.JsonRestore(), facts=ocp.args.JsonRestore(), state=ocp.args.StandardRestore()))
      refuse_other_run(self._config, saved["config"], f"the checkpoint of step {step}")
      facts, arrays = saved["facts"], saved["state"]
      made = []
      for i, like in enumerate(syncers):
        theta, outer = _like(arrays["syncers"][str(i)], like)
        made.append({"facts": facts["syncers"][i], "theta": theta, "outer": outer})
      learners = {int(m): {"facts": x, "arrays": _like(arrays["learners"][m], learner)}
                  for m, x in facts["learners"].items()}
    except ConfigMismatchError:
      raise
    except Exception as e:  # orbax and tensorstore raise what they please for damaged files
      _silence_readers()
      reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:300]
      raise ValueError(f"The checkpoint {self._manager.directory}/{step} cannot be read ({reason}). Move it away to resume "
                       "from the one before, or choose another --workdir.") from e
    return made, learners, facts["shards"]

  def wait(self) -> None:
    """Until saves under way are on disk; raises what they raised."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for saves under way; raises what they raised."""
    self._manager.wait_until_finished()
    self._manager.close()
