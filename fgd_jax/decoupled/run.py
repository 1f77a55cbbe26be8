"""One run from start to end: Ray, syncers, learners, and a loop that writes down what they do."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray
from absl import logging
from ml_collections import ConfigDict
from tqdm import tqdm

from fgd_jax import config as configs
from fgd_jax import data, models
from fgd_jax.decoupled import address as addresses
from fgd_jax.decoupled import cluster
from fgd_jax.decoupled.cuts import Cuts
from fgd_jax.decoupled.options import check, make_options, refuse_other_run
from fgd_jax.decoupled.programs import Programs, make_model
from fgd_jax.decoupled.resuming import resume, settle, still_holds
from fgd_jax.decoupled.shown import Dashboard, metrics
from fgd_jax.decoupled.store import TAPE, checkpoints, read_tape
from fgd_jax.decoupled.watched import TICK_SECONDS, Watched
from fgd_jax.folder import claimed, read_json, read_summary, write_config, write_json
from fgd_jax.quarantine import NonFiniteError
from fgd_jax.runlog import RunLog, read_lines

PyTree = Any
EVENTS = "events.jsonl"
CUT_SECONDS = 30.0  # that a learner may take to its next boundary before a checkpoint goes without it
SLICE_SECONDS = 1.0  # after which a thread that waits looks whether the run closes


class CutLostError(Exception):
  """A checkpoint whose parts do not belong together."""


UNSAVED = (CutLostError, ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError)  # by which one fails


def namespace_of(workdir: str) -> str:
  """The name of a run in its Ray cluster."""
  path = os.path.realpath(workdir)
  return f"fgd_jax {os.path.basename(path)} {hashlib.sha256(path.encode()).hexdigest()[:8]}"


class Run:
  """A run that goes on. `loop` runs it to its end; tests and experiments may look and interfere between its `tick`s.

  Args:
    config: passed by `check`. workdir: the run's folder, claimed. address: of a Ray cluster, None for a local one.
    platforms: JAX_PLATFORMS of the learners.
  """

  def __init__(self, config: ConfigDict, workdir: str, address: str | None = None, platforms: str = "cpu"):
    self.config, self.workdir, self.platforms = config, os.path.abspath(workdir), platforms
    corpus = data.load(config.data, config.seq_len, config.seed)
    data.worker_batches(corpus.train, 0, config.learners, config.batch_size, config.seed)  # refuses too little text
    heldout = data.heldout_batches(corpus.heldout, config.eval_batch_size, config.eval_batches)["tokens"]
    model, shapes = make_model(config, corpus.vocab_size)
    self.vocab_size, self.parameters, self.unigram = corpus.vocab_size, models.count_params(shapes), corpus.unigram_loss
    self._programs = Programs(make_options(config), shapes, model.loss, configs.make_inner_optimizer(config))
    self._evaluate = jax.jit(lambda w: jnp.mean(jax.lax.map(lambda b: model.loss(w, {"tokens": b}, None), heldout)))
    saved, self._lives, shards, start = resume(config, self.workdir, model, self._programs)
    self.options = make_options(config, shards)
    self.cuts = Cuts(os.path.join(self.workdir, "checkpoints"), config.checkpoint_keep, config, self.options.shards)
    os.makedirs(os.path.join(self.workdir, "syncer"), exist_ok=True)  # first: by it `recognise` knows a decoupled run
    write_config(config, self.workdir)
    self._events = open(os.path.join(self.workdir, EVENTS), "a", encoding="utf-8")
    cluster.connect(address, self.options.learners + self.options.syncers + 4, namespace_of(workdir))
    cluster.check_room(config, self.options, ray.cluster_resources())
    known = address if address and "://" in address else ray.get_runtime_context().gcs_address
    addresses.record(self.workdir, known)
    tapes = [os.path.join(self.workdir, "syncer", str(s), TAPE) for s in range(self.options.syncers)]
    old = [sum("event" in line for line in read_tape(tape)) for tape in tapes]  # events that events.jsonl has
    self.syncers = cluster.start_syncers(config, self.options, corpus.vocab_size, self.workdir)
    self.learners: list[Any] = []
    self._unused = dict(saved)  # states whose learner does not train yet
    self._watched_learners: list[Watched] = []
    self._next = max([self.options.learners - 1, *self._lives]) + 1  # number of the next new learner
    self._numbers: set[int] = set()  # of those that have actors
    for m in range(self.options.learners):
      self.add_learner(m)
    self._start: float | None = time.monotonic() + cluster.START_SECONDS  # until when enough learners have to have a place
    self._known = [[0, count] for count in old]  # records and events that were read
    ask = lambda s: lambda handle: handle.news.remote(*self._known[s])
    self._watched_syncers = [Watched(f"syncer {s}", handle, ask(s)) for s, handle in enumerate(self.syncers)]
    lines = [r for r in read_lines(os.path.join(self.workdir, "metrics.jsonl")) if r["round"] <= start]
    self.step = lines[-1]["round"] if lines else 0  # the last one that is in metrics.jsonl; the tape has the others
    self._lines: dict[int, dict[str, Any]] = {}  # records that wait for the ones before them, or for an evaluation
    self._evaluation: tuple[int, Future] | None = None
    self._pool = ThreadPoolExecutor(2, thread_name_prefix="evaluate or save")
    self._saving: Future | None = None
    self._closing = False
    done = lines[-1]["tokens"] if lines else 0
    self.log = RunLog(self.workdir, start, (self.step, max(self.step, self.options.steps)), own_events=False, counts="step")
    self._board = Dashboard()
    self._tokens = done
    self._loss = lines[-1]["train_loss"] if lines else math.log(corpus.vocab_size)

  # --- learners ------------------------------------------------------------------------------------------------------

  def add_learner(self, number: int | None = None, config: ConfigDict | None = None, platforms: str | None = None,
                  name: str | None = None) -> Any:
    """Starts one more learner, from its state in the checkpoint where there is one; returns its actor.

    Args:
      number: None: of a learner in the checkpoint that nobody has continued, or the next one.
      config, platforms: of the learner; None: the run's. name: of the actor.
    """
    if number is None:
      number = min(set(self._unused) - self._numbers, default=self._next)
      self._next = max(self._next, number + 1)
    self._numbers.add(number)
    saved = self._unused.get(number)
    handle = cluster.start_learner(config or self.config, self.options.shards, self.vocab_size, self.workdir,
                                   namespace_of(self.workdir), self.platforms if platforms is None else platforms, number,
                                   0 if saved is None else self._lives.get(number, 0) + 1, name)
    if saved is not None:
      handle.give.remote(saved)
    self.learners.append(handle)
    self._watched_learners.append(Watched(f"learner {number}", handle, lambda h: h.status.remote()))
    return handle

  def _admit(self, event: dict[str, Any]) -> None:
    """Starts the learners that `joining.join` has asked for."""
    config = self.config.copy_and_resolve_references()
    with config.unlocked():
      config.update_from_flattened_dict(event["own"])
    for i in range(event["count"]):
      self.add_learner(None, config, event["platforms"], f"{event['token']} {i}")

  # --- the loop ------------------------------------------------------------------------------------------------------

  @property
  def tokens(self) -> int:
    """That all learners have trained on, as of the last step that was written."""
    return self._tokens

  def statuses(self) -> list[dict[str, Any]]:
    """What each learner last said of itself, see `actors.Learner.status`; empty before it first did."""
    return [watched.last for watched in self._watched_learners]

  def loop(self) -> None:
    """Until the last step.

    Raises:
      ValueError: all learners have failed, too few have a place, or a syncer does not answer. OSError: a disk is full.
      NonFiniteError: the global parameters would not be finite, or no learner gets far from them.
    """
    while self.step < self.options.steps or self._lines:
      self.tick()
      time.sleep(TICK_SECONDS)

  def tick(self) -> None:
    """Looks once at every actor, writes what is new, evaluates and saves where that is due."""
    for s, watched in enumerate(self._watched_syncers):
      if (news := watched.look(self.note, self.options.silent_after)) is not None:
        if news["disk"]:
          raise OSError(f"{news['disk']} The same command continues from the last checkpoint in {self.workdir}.")
        if news["failure"]:
          raise NonFiniteError(news["failure"])
        for event in news["events"]:
          self._write_event(event)
          if event["event"] == "invited":
            self._admit(event)
        for record in news["records"]:
          if record["step"] > self.step:
            self._lines[record["step"]] = record
        self._known[s][0] += len(news["records"])
        self._known[s][1] += len(news["events"])
      if watched.down is not None and time.monotonic() - watched.down[0] > cluster.START_SECONDS:
        raise ValueError(f"The {watched.name} has died and did not start again within {cluster.START_SECONDS:.0f} s "
                         f"({watched.down[1]}); the same command continues from the last checkpoint in {self.workdir}.")
      if (waited := watched.waited()) and 0 < self.config.limits.stall < waited:
        raise ValueError(f"The {watched.name} (process {watched.last.get('pid')}) has not answered for {waited:.0f} s; "
                         f"limits.stall={self.config.limits.stall:g}. Look whether it is paused; the same command continues "
                         f"from the last checkpoint in {self.workdir}.")
    for watched in self._watched_learners:
      before = watched.last.get("failure")
      status = watched.look(self.note)
      if status is not None:
        self._board.show(watched.name, status, self.options)
        if status["failure"] and status["failure"] != before:
          self.note(watched.name, "failed", status["failure"])
    if self._start is not None:
      placed = sum(bool(w.last) for w in self._watched_learners)
      if placed >= self.options.quorum:
        self._start = None
      elif time.monotonic() > self._start:
        raise ValueError(f"Ray has started {placed} learners within {cluster.START_SECONDS:.0f} s, and "
                         f"quorum={self.options.quorum} have to run; `ray status` shows what has no place: lower "
                         "decoupled.resources, or add machines to the cluster.")
    failures = [w.last.get("failure") for w in self._watched_learners if w.last]
    if failures and len(failures) == len(self._watched_learners) and all(failures):
      raise ValueError(f"All learners have failed; the first one says: {failures[0]}")
    self._write_lines()

  def _write_lines(self) -> None:
    while self.step + 1 in self._lines:
      step = self.step + 1
      line = metrics(self._lines[step], self._loss)
      line["tokens"] = max(self._tokens, line["tokens"])  # each syncer counts what it has heard of
      self._loss = line["train_loss"]
      if self._due(step, self.config.eval_every) and self.config.eval_every or step == self.options.steps:
        if self._evaluation is None:
          self._evaluation = step, self._pool.submit(self.evaluate)
        if not self._evaluation[1].done():
          return
        line |= self._evaluation[1].result()
        self._evaluation = None
      line["tokens_per_second"] = self.log.speed(line["tokens"] - self._tokens)
      self._tokens = line["tokens"]
      self.log.write(line)
      del self._lines[step]
      self.step = step
      if self.config.checkpoint_every and step % self.config.checkpoint_every == 0 and step < self.options.steps:
        self._save_beside()

  def _save_beside(self) -> None:
    """Starts a checkpoint, unless one is still under way; one that a dying syncer prevented is left to the next time."""
    if self._saving is not None:
      if not self._saving.done():
        return
      try:
        self._saving.result()
      except UNSAVED as e:
        self.note("run", "not_saved", "no checkpoint: " + " ".join(str(e).split())[:200])
    self._saving = self._pool.submit(self.save)

  def _due(self, step: int, every: int) -> bool:
    return bool(every) and step % every == 0

  def global_parameters(self) -> PyTree:
    """The global parameters now: a patchwork of fragments, each as last merged."""
    found: dict[int, Any] = {}
    for part in self._answers([s.parameters.remote() for s in self.syncers], cluster.START_SECONDS):
      found |= {p: self._answers(ref, cluster.START_SECONDS) for p, (_, (ref,)) in part.items()}
    return self._programs.assemble(found)

  def evaluate(self) -> dict[str, float]:
    """eval_loss and eval_perplexity of the global parameters on the held-out batches."""
    while not self._closing:
      try:
        loss = float(self._evaluate(self.global_parameters()))
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}
      except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
        time.sleep(0.5)  # a syncer that starts again, or is paused
    return {}

  def _answers(self, calls: Any, seconds: float) -> Any:
    """What actors answer within so many seconds; raises GetTimeoutError then, and soon where the run closes."""
    end = time.monotonic() + seconds
    while True:
      try:
        return ray.get(calls, timeout=max(0.0, min(SLICE_SECONDS, end - time.monotonic())))
      except ray.exceptions.GetTimeoutError:
        if self._closing or time.monotonic() >= end:
          raise

  # --- checkpoints and the end ---------------------------------------------------------------------------------------

  def save(self) -> int:
    """Takes a consistent cut and saves it; returns its step.

    Raises:
      NonFiniteError: the global parameters are not finite; earlier checkpoints stay.
      CutLostError, RayActorError, GetTimeoutError: a syncer died or did not answer; another try may succeed.
    """
    number = int(time.time() * 1000)  # grows over restarts, too
    syncers = self._answers([s.cut.remote(number) for s in self.syncers], cluster.START_SECONDS)
    for part in syncers:
      for p, fragment in part["theta"].items():
        if not all(np.isfinite(x).all() for x in fragment.values()):
          raise NonFiniteError(f"The global fragment {p} is not finite. Nothing was saved over earlier checkpoints; try a "
                               "lower inner.lr or decoupled.outer_lr in a new --workdir.")
    placed = [w for w in self._watched_learners if w.last]  # who waits for a place cannot answer
    calls = [(w, w.handle.snapshot.remote(number, CUT_SECONDS)) for w in placed]
    self._unused = {m: x for m, x in self._unused.items() if still_holds(m, self._lives.get(m, 0), syncers)}
    learners = {}
    for watched, call in calls:
      try:
        state = self._answers(call, CUT_SECONDS + 5)
      except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        state = None
      if state is not None:
        learners[state["facts"]["learner"]] = state
      elif watched.last.get("started"):
        kept = watched.last["learner"] in self._unused
        self.note(watched.name, "not_saved", "it gave no state for the checkpoint; a resumed run starts it from "
                  + ("its state in the one before, of which nothing was merged since" if kept else "the global parameters"))
    now = self._answers([s.started.remote() for s in self.syncers], cluster.START_SECONDS)
    if now != [part["epoch"] for part in syncers]:  # learners may have what a syncer has merged after its part
      raise CutLostError("a syncer was started again after it had given its part")
    settle(learners, syncers)
    self._unused = {m: x for m, x in self._unused.items() if m not in learners}
    learners = {**self._unused, **learners}
    step = max(t for part in syncers for t in part["facts"]["version"].values())
    if step == 0:  # nothing was merged yet: a new start is the same
      return step
    self.cuts.save(step, syncers, learners)
    return step

  def finish(self) -> int:
    """The last checkpoint, after one that is still under way; returns its step when it is on disk.

    Raises:
      ValueError: a syncer did not answer for START_SECONDS.
    """
    end = time.monotonic() + cluster.START_SECONDS
    for watched in self._watched_syncers:
      if watched.waited() > TICK_SECONDS * 10:
        logging.warning("The %s does not answer; it is waited for, up to %.0f s.", watched.name, cluster.START_SECONDS)
    if self._saving is not None:
      wait([self._saving], cluster.START_SECONDS)
    while True:
      try:
        step = self.save()
        self.cuts.wait()
        return step
      except UNSAVED as e:  # a syncer that starts again
        if time.monotonic() > end:
          raise ValueError("The last checkpoint was not saved, because a syncer does not answer; the same command continues "
                           f"from the one before in {self.workdir}.") from e
        time.sleep(0.5)

  def close(self) -> None:
    """Ends all actors and files."""
    self._closing = True
    self._board.close()
    try:
      self.log.close()
    except OSError as e:  # a full disk: processes are to end all the same
      logging.error("%s", e)
    self._pool.shutdown(wait=True)
    self.cuts.close()
    for actor in [*self.learners, *self.syncers]:
      try:
        actor.stop.remote()
      except ray.exceptions.RayActorError:
        pass
    ray.shutdown()
    addresses.forget(self.workdir)
    self._events.close()

  def note(self, actor: str, event: str, cause: str) -> None:
    """Writes an event that the run itself has seen."""
    self._write_event({"time": time.time(), "actor": actor, "event": event, "cause": cause, "syncer_step": self.step})

  def _write_event(self, event: dict[str, Any]) -> None:
    self._events.write(json.dumps({**event, "round": event["syncer_step"]}) + "\n")
    self._events.flush()
    tqdm.write(f"{event['actor']}: {event['event']} ({event['cause']})", file=sys.stderr)


def decoupled(config: ConfigDict, workdir: str, address: str | None = None, platforms: str = "cpu") -> dict[str, Any]:
  """Runs `config` in the folder `workdir` to its last syncer step, resuming what is there; returns the summary.

  Raises:
    ValueError, FileNotFoundError: what cannot work, in one sentence, before the first step.
    NonFiniteError: the global parameters are not finite.
    KeyboardInterrupt: after a checkpoint was saved.
  """
  options = check(config)
  with claimed(workdir):
    if (summary := recognise(config, workdir)) is not None:
      logging.info("The run in %s is finished (%d steps, held-out loss %.4f); nothing to do. For a longer run choose "
                   "another --workdir.", workdir, summary["steps"], summary["eval_loss"])
      return summary
    run = Run(config, workdir, address, platforms)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has put its own; a preempted job saves its state
    try:
      logging.info("%s parameters, %d learners, quorum %d, %d fragments, %d syncer steps (unigram loss %.3f).",
                   f"{run.parameters:,}", options.learners, options.quorum, options.fragments, options.steps, run.unigram)
      try:
        run.loop()
      except KeyboardInterrupt:
        logging.info("Interrupted at step %d; saving a checkpoint ...", run.step)
        if step := run.finish():
          logging.info("The checkpoint of step %d is saved.", step)
        raise
      run.finish()
      return summarise(run)
    finally:
      run.close()


def recognise(config: ConfigDict, workdir: str) -> dict[str, Any] | None:
  """The summary of a run that is finished; None for one that is new, to be continued, or ended before its first step.

  Raises:
    ValueError: a damaged run, another kind of run, or one whose config contradicts this one.
  """
  path = os.path.join(workdir, "config.json")
  if not os.path.exists(path):
    return None
  if not os.path.isdir(os.path.join(workdir, "syncer")):
    raise ValueError(f"--workdir={workdir} holds a run of fgd_jax.train; choose another folder.")
  if not checkpoints(workdir) and not read_lines(os.path.join(workdir, "metrics.jsonl")):
    return None  # it may have been refused for its config, which is not to bind another one
  refuse_other_run(config, read_json(path), f"the run in {workdir}")
  summary = read_summary(workdir)
  return summary if summary is not None and summary.get("steps", 0) >= config.steps else None


def summarise(run: Run) -> dict[str, Any]:
  """Writes summary.json."""
  last = read_lines(os.path.join(run.workdir, "metrics.jsonl"))[-1]
  if "eval_loss" not in last:  # as after a resume with fewer steps than were done
    last |= run.evaluate()
  tapes = [read_tape(os.path.join(run.workdir, "syncer", str(s), TAPE)) for s in range(run.options.syncers)]
  trained = {c["learner"] for tape in tapes for line in tape for c in line.get("contributions", [])}
  summary = {"steps": run.step, "rounds": run.step, "method": run.options.policy, "learners": run.options.learners,
             "learners_trained": len(trained), "learners_joined": sum(m >= run.options.shards for m in trained),
             **{k: last[k] for k in ("eval_loss", "eval_perplexity", "train_loss", "tokens")},
             "parameters": run.parameters, "unigram_loss": run.unigram, "jax": jax.__version__, "ray": ray.__version__}
  write_json(os.path.join(run.workdir, "summary.json"), summary)
  return summary
