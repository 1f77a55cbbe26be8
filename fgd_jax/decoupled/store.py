"""What a syncer has on disk: the tape of its steps, and the newest state of every fragment, written before anyone sees it.

A syncer that is killed continues from here without losing a step. Written in this order: the tape's line, the fragment; so
the tape may be one line ahead, which is cut when the syncer starts again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fgd_jax.decoupled.syncer import SyncerCore, Tree

PyTree = Any
TAPE = "tape.jsonl"
STEP_KEYS = {"step", "fragment", "time", "contributions", "checksum", "slots", "shards"}  # without which there is no replay


class Store:
  """The folder of one syncer.

  Args:
    folder: made if it is not there.
  """

  def __init__(self, folder: str):
    self.folder = folder
    os.makedirs(folder, exist_ok=True)
    self._tape = os.path.join(folder, TAPE)
    self._file = open(self._tape, "a", encoding="utf-8")

  def append(self, line: Mapping[str, Any]) -> None:
    """One line on the tape: a step's record, or an event."""
    self._file.write(json.dumps(line) + "\n")
    self._file.flush()

  def save(self, p: int, theta: Tree, outer: PyTree, facts: Mapping[str, Any]) -> None:
    """The state of fragment p and the syncer's facts after the step that made it; whole or not at all."""
    path = self._path(p)
    arrays = {f"theta:{k}": np.asarray(x) for k, x in theta.items()}
    arrays |= {f"outer:{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(outer))}
    with open(path + ".tmp", "wb") as f:
      np.savez(f, facts=np.asarray(json.dumps(facts)), **arrays)  # type: ignore[arg-type]
    os.replace(path + ".tmp", path)

  def load(self, core: SyncerCore, now: float) -> None:
    """Brings a fresh core to the newest step on disk, and the tape with it; counts how often the syncer has started."""
    theta, outer, newest = dict(core.theta), dict(core.outer), None
    for p in core.owned:
      if not os.path.exists(self._path(p)):
        continue
      with np.load(self._path(p)) as saved:
        theta[p] = {k: saved[f"theta:{k}"] for k in theta[p]}
        leaves, treedef = jax.tree.flatten(outer[p])
        outer[p] = jax.tree.unflatten(treedef, [saved[f"outer:{i}"] for i in range(len(leaves))])
        facts = json.loads(str(saved["facts"]))
      if newest is None or max(facts["version"].values()) >= max(newest["version"].values()):
        newest = facts
    starts = sum(line.get("event") == "started" for line in read_tape(self._tape))
    self._file.close()
    lines = cut_tape(self._tape, max(newest["version"].values()) if newest else 0, core.options.syncers)
    self._file = open(self._tape, "a", encoding="utf-8")
    if newest is not None:
      core.recall(newest, theta, outer, starts, now)
    else:
      core.epoch = starts
    for line in lines:
      core.remember(line, now)
    core.note(now, f"syncer {core.index}", "started", f"at step {core.t}")

  def _path(self, p: int) -> str:
    return os.path.join(self.folder, f"fragment_{p}.npz")


def checkpoints(workdir: str) -> list[int]:
  """The steps of which a run's folder has a checkpoint."""
  folder = os.path.join(workdir, "checkpoints")
  return sorted(int(name) for name in os.listdir(folder) if name.isdigit()) if os.path.isdir(folder) else []


def read_tape(path: str) -> Iterator[dict[str, Any]]:
  """The lines of a tape; a torn last one (the process was killed) is left out.

  Raises:
    ValueError: another line is neither a step nor an event; it names file and line.
  """
  if not os.path.exists(path):
    return
  with open(path, encoding="utf-8", errors="replace") as f:
    for number, text in enumerate(f, 1):
      if not text.endswith("\n"):
        return
      try:
        line = json.loads(text)
        whole = STEP_KEYS <= line.keys() if "step" in line else {"event", "syncer_step"} <= line.keys()
      except (ValueError, TypeError, AttributeError):
        whole = False
      if not whole:
        raise ValueError(f"{path} is damaged in line {number}; restore the file, or move it away: the run continues without "
                         "it, and cannot be replayed.")
      yield line


def cut_tape(path: str, last: int, stride: int) -> list[dict[str, Any]]:
  """Keeps whole lines, which it returns: steps up to `last` (0: none), and events up to the step that is open then.

  Args:
    stride: number of syncers: that many steps lie between two of one syncer.
  """
  kept = [line for line in read_tape(path) if line.get("step", line.get("syncer_step", 0) - stride) <= last]
  with open(path + ".tmp", "w", encoding="utf-8") as f:
    f.writelines(json.dumps(line) + "\n" for line in kept)
  os.replace(path + ".tmp", path)
  return kept
