"""One run from start to end: Ray, syncers, learners, and a loop that writes down what they do."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import shutil
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
from fgd_jax.decoupled import cluster
from fgd_jax.decoupled.cuts import Cuts
from fgd_jax.decoupled.learner import LearnerCore
from fgd_jax.decoupled.merging import Merger
from fgd_jax.decoupled.options import Options, check, make_options, refuse_other_run
from fgd_jax.decoupled.programs import Programs, make_model
from fgd_jax.decoupled.store import TAPE, Store, cut_tape, read_tape
from fgd_jax.decoupled.syncer import SyncerCore
from fgd_jax.decoupled.watched import TICK_SECONDS, Watched
from fgd_jax.export import first_params
from fgd_jax.folder import claimed, read_json, read_summary, write_config, write_json
from fgd_jax.quarantine import NonFiniteError
from fgd_jax.runlog import RunLog, read_lines

PyTree = Any
EVENTS = "events.jsonl"
CUT_SECONDS = 30.0  # that a learner may take to its next boundary before a checkpoint goes without it


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
    self._lives: dict[int, int] = {}  # of learners that were, at their end
    saved, shards, start = self._restore(model)
    self.options = make_options(config, shards)
    self.cuts = Cuts(os.path.join(self.workdir, "checkpoints"), config.checkpoint_keep, config, self.options.shards)
    os.makedirs(os.path.join(self.workdir, "syncer"), exist_ok=True)  # first: by it `recognise` knows a decoupled run
    write_config(config, self.workdir)
    self._events = open(os.path.join(self.workdir, EVENTS), "a", encoding="utf-8")
    cluster.connect(address, self.options.learners + self.options.syncers + 4, namespace_of(workdir))
    cluster.check_room(config, self.options, ray.cluster_resources())
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
    expected = (self.options.steps + self.options.fragments) * self.options.interval * self.options.batch_tokens
    done = lines[-1]["tokens"] if lines else 0
    self.log = RunLog(self.workdir, start, (done, max(done, expected * self.options.learners)), own_events=False)
    self._board = Dashboard()
    self._tokens = done
    self._loss = lines[-1]["train_loss"] if lines else math.log(corpus.vocab_size)

  # --- start ---------------------------------------------------------------------------------------------------------

  def _restore(self, model: models.Model) -> tuple[dict[int, dict[str, Any]], int | None, int]:
    """Puts the newest checkpoint back where syncers look for their state; what learners need of it, shards, step."""
    folder, options = os.path.join(self.workdir, "syncer"), self._programs.options
    cuts = Cuts(os.path.join(self.workdir, "checkpoints"), self.config.checkpoint_keep, self.config, options.shards)
    step = cuts.latest()
    if step is None:
      for old in glob.glob(os.path.join(glob.escape(folder), "*")):  # of an attempt that ended before its first checkpoint
        shutil.rmtree(old, ignore_errors=True)
      cuts.close()
      return {}, None, 0
    merger = Merger(options, self._programs.params, self.config.seed)
    params = first_params(self.config, model)
    cores = [SyncerCore(options, merger, {}, params, s) for s in range(options.syncers)]
    whole = {p: (0, x) for core in cores for p, x in core.theta.items()}
    like = LearnerCore(self._programs, 0, 1, 0, whole).snapshot(0)["arrays"]
    syncers, learners, shards = cuts.restore([(c.theta, c.outer) for c in cores], like)
    cuts.close()
    for m, state in learners.items():
      merged = [part["facts"]["members"].get(str(m), {}).get("taped", 0) for part in syncers]
      state["facts"].setdefault("merged", merged)  # a state that no learner has continued since keeps what it had
    for part in syncers:
      for m, member in part["facts"]["members"].items():
        self._lives[int(m)] = max(self._lives.get(int(m), 0), member["life"])
    for s, core in enumerate(cores):
      last = max(syncers[s]["facts"]["version"].values())
      cut_tape(os.path.join(folder, str(s), TAPE), last, options.syncers)
      store = Store(os.path.join(folder, str(s)))
      for p in core.owned:
        store.save(p, syncers[s]["theta"][p], syncers[s]["outer"][p], syncers[s]["facts"])
      for m, state in learners.items():
        now = {k: state["facts"][k] for k in ("learner", "life", "ops_from", "ops")}
        store.append({"time": time.time(), "actor": f"learner {m}", "event": "saved", "cause": f"checkpoint of step {step}",
                      "syncer_step": last + options.syncers, **now})
    logging.info("Resuming at step %d of %d, with the states of %d learners.", step, options.steps, len(learners))
    return learners, shards, step

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
      ValueError: all learners have failed, or too few have a place. NonFiniteError: the global parameters would not be
        finite, or no learner gets far from them.
    """
    while self.step < self.options.steps or self._lines:
      self.tick()
      time.sleep(TICK_SECONDS)

  def tick(self) -> None:
    """Looks once at every actor, writes what is new, evaluates and saves where that is due."""
    for s, watched in enumerate(self._watched_syncers):
      if (news := watched.look(self.note)) is not None:
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
      except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as e:
        self.note("run", "not_saved", "no checkpoint: " + " ".join(str(e).split())[:200])
    self._saving = self._pool.submit(self.save)

  def _due(self, step: int, every: int) -> bool:
    return bool(every) and step % every == 0

  def global_parameters(self) -> PyTree:
    """The global parameters now: a patchwork of fragments, each as last merged."""
    found: dict[int, Any] = {}
    for part in ray.get([s.parameters.remote() for s in self.syncers]):
      found |= {p: ray.get(ref) for p, (_, (ref,)) in part.items()}
    return self._programs.assemble(found)

  def evaluate(self) -> dict[str, float]:
    """eval_loss and eval_perplexity of the global parameters on the held-out batches."""
    while not self._closing:
      try:
        loss = float(self._evaluate(self.global_parameters()))
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}
      except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError):  # a syncer that starts again
        time.sleep(0.5)
    return {}

  # --- checkpoints and the end ---------------------------------------------------------------------------------------

  def save(self) -> int:
    """Takes a consistent cut and saves it; returns its step.

    Raises:
      NonFiniteError: the global parameters are not finite; earlier checkpoints stay.
    """
    number = int(time.time() * 1000)  # grows over restarts, too
    syncers = ray.get([s.cut.remote(number) for s in self.syncers], timeout=cluster.START_SECONDS)
    for part in syncers:
      for p, fragment in part["theta"].items():
        if not all(np.isfinite(x).all() for x in fragment.values()):
          raise NonFiniteError(f"The global fragment {p} is not finite. Nothing was saved over earlier checkpoints; try a "
                               "lower inner.lr or decoupled.outer_lr in a new --workdir.")
    placed = [w for w in self._watched_learners if w.last]  # who waits for a place cannot answer
    calls = [(w, w.handle.snapshot.remote(number, CUT_SECONDS)) for w in placed]
    learners = dict(self._unused)
    for watched, call in calls:
      try:
        state = ray.get(call, timeout=CUT_SECONDS + 5)
      except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        state = None
      if state is not None:
        self._unused.pop(state["facts"]["learner"], None)
      elif watched.last.get("started"):
        self.note(watched.name, "not_saved",
                  "it gave no state for the checkpoint; a resumed run starts it from the global parameters")
      if state is not None:
        learners[state["facts"]["learner"]] = state
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
    if self._saving is not None:
      wait([self._saving])
    end = time.monotonic() + cluster.START_SECONDS
    while True:
      try:
        step = self.save()
        self.cuts.wait()
        return step
      except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as e:  # a syncer that starts again
        if time.monotonic() > end:
          raise ValueError("The last checkpoint was not saved, because a syncer does not answer; the same command continues "
                           f"from the one before in {self.workdir}.") from e
        time.sleep(0.5)

  def close(self) -> None:
    """Ends all actors and files."""
    self._closing = True
    self._board.close()
    self.log.close()
    self._pool.shutdown(wait=True)
    self.cuts.close()
    for actor in [*self.learners, *self.syncers]:
      try:
        actor.stop.remote()
      except ray.exceptions.RayActorError:
        pass
    ray.shutdown()
    self._events.close()

  def note(self, actor: str, event: str, cause: str) -> None:
    """Writes an event that the run itself has seen."""
    self._write_event({"time": time.time(), "actor": actor, "event": event, "cause": cause, "syncer_step": self.step})

  def _write_event(self, event: dict[str, Any]) -> None:
    self._events.write(json.dumps({**event, "round": event["syncer_step"]}) + "\n")
    self._events.flush()
    tqdm.write(f"{event['actor']}: {event['event']} ({event['cause']})", file=sys.stderr)


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
        logging.info("The checkpoint of step %d is saved.", run.finish())
        raise
      run.finish()
      return summarise(run)
    finally:
      run.close()


def recognise(config: ConfigDict, workdir: str) -> dict[str, Any] | None:
  """The summary of a run that is finished; None for a new one, and for one that is to be continued.

  Raises:
    ValueError: a damaged run, another kind of run, or one whose config contradicts this one.
  """
  path = os.path.join(workdir, "config.json")
  if not os.path.exists(path):
    return None
  if not os.path.isdir(os.path.join(workdir, "syncer")):
    raise ValueError(f"--workdir={workdir} holds a run of fgd_jax.train; choose another folder.")
  refuse_other_run(config, read_json(path), f"the run in {workdir}")
  summary = read_summary(workdir)
  return summary if summary is not None and summary.get("steps", 0) >= config.steps else None


def summarise(run: Run) -> dict[str, Any]:
  """Writes summary.json."""
  last = read_lines(os.path.join(run.workdir, "metrics.jsonl"))[-1]
  if "eval_loss" not in last:  # as after a resume with fewer steps than were done
    last |= run.evaluate()
  summary = {"steps": run.step, "rounds": run.step, "method": run.options.policy, "learners": run.options.learners,
             **{k: last[k] for k in ("eval_loss", "eval_perplexity", "train_loss", "tokens")},
             "parameters": run.parameters, "unigram_loss": run.unigram, "jax": jax.__version__, "ray": ray.__version__}
  write_json(os.path.join(run.workdir, "summary.json"), summary)
  return summary
