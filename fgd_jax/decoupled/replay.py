"""Replay: a run computed once more from its tapes, merge by merge, in one process and without Ray, clocks or threads.

A tape says which contributions made each step, and with each contribution what its learner had done since the one before
(see `learner`). That is all there is to a race: learners are brought, in turn, to the operations that a merge needs, and the
checksum of every merged fragment is compared. With the same versions, hardware and environment it is the same bit for bit.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from fgd_jax import data
from fgd_jax.decoupled.learner import Arrived, LearnerCore, Reseed
from fgd_jax.decoupled.merging import Merger, Tree
from fgd_jax.decoupled.options import check, make_options, refuse_other_run
from fgd_jax.decoupled.programs import Programs, make_model, make_programs
from fgd_jax.decoupled.store import TAPE, read_tape
from fgd_jax.decoupled.syncer import weights_of
from fgd_jax.export import first_params
from fgd_jax.folder import read_json
from fgd_jax.state import checksum

PyTree = Any


class Replay:
  """The learners and the global state of a run, as far as its tapes have been played.

  Args:
    programs, merger: of the run. params: initial parameters.
    batches: (learner) -> its batches by inner step.
    lines: of all tapes.
  """

  def __init__(self, programs: Programs, merger: Merger, params: PyTree, batches: Any, lines: list[dict[str, Any]]):
    self._programs, self._merger, self._batches = programs, merger, batches
    self._mergers: dict[int, Merger] = {}  # by the number of learners that a step was bound to
    self._ops: dict[tuple[int, int], dict[int, list[Any]]] = {}
    self._steps: dict[int, dict[str, Any]] = {}
    for line in lines:
      for part in line.get("contributions", [line] if "ops" in line else []):
        ops = self._ops.setdefault((part["learner"], part["life"]), {})
        ops.update(enumerate(part.get("ops", []), part.get("ops_from", 0)))
      if "step" in line:
        self._steps[line["step"]] = line
    self.theta: dict[int, Tree] = {}
    self._outer: dict[int, PyTree] = {}
    for p in range(programs.options.fragments):
      self.theta[p], self._outer[p] = merger.start(params, p)
    self._sent: dict[tuple[int, int], Tree] = {(p, 0): merger.outgoing(p, x) for p, x in self.theta.items()}
    self._cores: dict[tuple[int, int], LearnerCore] = {}
    self._done: dict[tuple[int, int], int] = {}
    self._cuts: dict[tuple[int, int], dict[str, Any]] = {}
    self._wanted = {(c["learner"], c["life"], c["seq"]) for line in self._steps.values() for c in line["contributions"]}
    self._payloads: dict[tuple[int, int, int], Tree] = {}
    self.compared: list[tuple[int, bool]] = []

  def play(self) -> list[tuple[int, bool]]:
    """Plays everything; for each step whether its merged fragment is bitwise what it was."""
    for step in sorted(self._steps.values(), key=lambda line: line["time"]):
      self._merged(step["step"])
    return self.compared

  def _merged(self, t: int) -> None:
    """Makes sure that step t has been merged."""
    line = self._steps.pop(t, None)
    if line is None:
      return
    p = line["fragment"]
    payloads = [self._merger.decode(p, self._contribution(c)) for c in line["contributions"]]
    stack = self._merger.stack(payloads, line["slots"])
    weights = self._merger.weights(weights_of(line["contributions"]), stack)
    learners = line.get("bound", self._merger.options.learners)
    if learners not in self._mergers:
      self._mergers[learners] = self._merger.bound(learners)
    theta, self._outer[p], _ = jax.device_get(
        self._mergers[learners].step(self.theta[p], self._outer[p], stack, weights, np.int32(t)))
    self.theta[p] = theta
    self._sent[p, t] = self._merger.outgoing(p, theta)
    self.compared.append((t, checksum(theta) == line["checksum"]))

  def _global(self, p: int, t: int) -> tuple[int, Tree]:
    self._merged(t)
    return t, self._sent[p, t]

  def _contribution(self, c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Brings a learner to one of its contributions and returns that."""
    life = (c["learner"], c["life"])
    while self._done.get(life, 0) <= c["seq"]:
      self._operate(life)
    return jax.device_get(self._payloads.pop((*life, c["seq"])))

  def _operate(self, life: tuple[int, int]) -> None:
    """The next operation of a learner's life."""
    seq = self._done.get(life, 0)
    if seq not in self._ops[life]:
      raise ValueError(f"The tape lacks operation {seq} of learner {life[0]} in its life {life[1]}, so the run cannot be "
                       "replayed from here; its folder was changed, or a syncer was restarted without it.")
    kind, n, *what = self._ops[life][seq]
    self._done[life] = seq + 1
    if kind == "join":
      versions, start, *merged = what
      fragments = {int(p): self._global(int(p), t) for p, t in versions.items()}
      saved = None
      if start != "fresh":
        saved = self._cut_of(life, start)
        saved = {**saved, "facts": {**saved["facts"], "merged": merged[0]}}
      self._cores[life] = LearnerCore(self._programs, *life, n, fragments, saved)
      return
    core = self._cores[life]
    while core.n < n:
      core.step(self._batches(life[0])[core.n])
    if kind == "apply":
      core.receive(Arrived(self._fragment(what[0]), *self._global(self._fragment(what[0]), what[0])))
    elif kind == "offer":
      payload = core.offer(self._fragment(what[0]), what[0])
      if (*life, seq) in self._wanted:
        self._payloads[*life, seq] = payload
    elif kind == "retract":
      core.retract(self._fragment(what[0]))
    elif kind == "reseed":
      core.receive(Reseed({int(p): self._global(int(p), t) for p, t in what[0].items()}))
    elif kind == "cut":
      self._cuts[life[0], what[0]] = core.snapshot(what[0])

  def _fragment(self, t: int) -> int:
    return 0 if self._programs.options.on_arrival else self._programs.options.fragment(t)

  def _cut_of(self, life: tuple[int, int], number: int) -> dict[str, Any]:
    """A learner's state in a checkpoint, by playing the life that it was taken from up to there."""
    for before in sorted((x for x in self._ops if x[0] == life[0] and x < life), reverse=True):
      at = next((seq for seq, op in self._ops[before].items() if op[0] == "cut" and op[2] == number), None)
      while at is not None and self._done.get(before, 0) <= at:
        self._operate(before)
      if (life[0], number) in self._cuts:
        return self._cuts[life[0], number]
    raise ValueError(f"The tape lacks the checkpoint {number} from which learner {life[0]} continued.")


def replay(config: ConfigDict, workdir: str) -> dict[str, Any]:
  """Replays the run in `workdir`.

  Returns:
    {"steps": replayed, "equal": steps whose fragment is bitwise the same, "first_difference": step or None}.

  Raises:
    ValueError: no run there, another config, or the replay differs.
  """
  check(config)
  if not os.path.exists(os.path.join(workdir, "config.json")):
    raise ValueError(f"--workdir={workdir} holds no run to replay.")
  refuse_other_run(config, read_json(os.path.join(workdir, "config.json")), f"the run in {workdir}")
  lines = [line for s in range(config.decoupled.syncers)
           for line in read_tape(os.path.join(workdir, "syncer", str(s), TAPE))]
  steps = [line for line in lines if "step" in line]
  if not steps:
    raise ValueError(f"The tapes in --workdir={workdir} hold no step to replay.")
  corpus = data.load(config.data, config.seq_len, config.seed)
  options = make_options(config, steps[0]["shards"])
  model, shapes = make_model(config, corpus.vocab_size)
  programs = make_programs(config, options, corpus.vocab_size)
  player = Replay(programs, Merger(options, shapes, config.seed), first_params(config, model),
                  lambda m: data.worker_batches(corpus.train, m, options.shards, config.batch_size, config.seed), lines)
  compared = player.play()
  first = next((t for t, same in compared if not same), None)
  if first is not None:
    raise ValueError(f"The replay differs from the run at step {first} ({sum(s for _, s in compared)} of {len(compared)} "
                     "steps are equal); versions, hardware and XLA flags must be those of the run.")
  logging.info("Replayed %d steps; every merged fragment is bitwise what it was.", len(compared))
  return {"steps": len(compared), "equal": len(compared), "first_difference": None}
