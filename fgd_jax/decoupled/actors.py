"""Ray actors: thin shells that give the cores a clock, threads and messages.

Learners call, the syncer answers: `join`, then `poll` in a loop (it returns at once when there is news, else after a moment)
and `offer` for a contribution. The syncer never calls anyone, so that no learner, dead or paused, can hold it up. Global
fragments travel through Ray's object store: put once, fetched by every learner.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import ray
from absl import logging
from ml_collections import ConfigDict

from fgd_jax import data
from fgd_jax.decoupled.healing import Inbox
from fgd_jax.decoupled.learner import Arrived, LearnerCore, Opened, Reseed
from fgd_jax.decoupled.merging import Merger
from fgd_jax.decoupled.options import fingerprint, make_options, refuse_mismatch
from fgd_jax.decoupled.processes import end_process, use_compilation_cache
from fgd_jax.decoupled.programs import Programs, make_model, make_programs
from fgd_jax.decoupled.store import TAPE, Store, read_tape
from fgd_jax.decoupled.syncer import Contribution, SyncerCore
from fgd_jax.export import first_params
from fgd_jax.quarantine import NonFiniteError

POLL_SECONDS = 0.5  # how long a poll without news may take
CALL_SECONDS = 30.0  # after which a call counts as lost
RETRY_SECONDS = 0.2  # between attempts to reach a syncer that does not answer
CLOCK = time.time


class Cut(NamedTuple):
  """Message to a learner: a checkpoint is taken."""

  number: int


class Taped(NamedTuple):
  """Message to a learner: the syncer has so many of its operations on its tape."""

  syncer: int
  operations: int


class Syncer:
  """The actor of a syncer. It starts from what its folder holds.

  Args:
    config: of the run. vocab_size: of the data. shards: of the data. workdir: the run's folder. index: number of the syncer.
  """

  def __init__(self, config: ConfigDict, vocab_size: int, shards: int, workdir: str, index: int):
    use_compilation_cache(workdir)
    model, shapes = make_model(config, vocab_size)
    options = make_options(config, shards)
    merger = Merger(options, shapes, config.seed)
    params = first_params(config, model)
    self.core = SyncerCore(options, merger, fingerprint(config), params, index)
    self.folder = os.path.join(workdir, "syncer", str(index))
    self.store = Store(self.folder)
    self.store.load(self.core, CLOCK())
    self.lock = threading.Condition()
    self.refs = {p: (self.core.version[p], ray.put(merger.outgoing(p, self.core.theta[p]))) for p in self.core.owned}
    # Both grow over restarts, so that a reader's place in them stays what it is.
    lines = list(read_tape(os.path.join(self.folder, TAPE)))
    self.records = [line for line in lines if "step" in line]
    self.events = [line for line in lines if "event" in line]
    self.cut_number = 0  # of the newest checkpoint that this syncer is part of
    self.cut_state: dict[str, Any] = {}
    self.stopped = False
    self.failure: str | None = None
    self.disk: str | None = None  # why nothing more can be written
    self._write_events()
    self._warm()
    threading.Thread(target=self._work, name="merge", daemon=True).start()

  def _warm(self) -> None:
    """Compiles the merges before the first one is needed."""
    core = self.core
    for p in core.owned:
      stack = core.merger.stack([core.theta[p]], 1 if core.options.on_arrival else core.options.learners)
      jax.block_until_ready(core.merger.step(core.theta[p], core.outer[p], stack, core.merger.weights([1.0], stack),
                                             np.int32(0)))

  def _work(self) -> None:
    try:
      self._merge_steps()
    except NonFiniteError as e:  # a new start would compute the same
      self.failure = str(e)
    except OSError as e:  # a full disk, on which a new start could not write either
      self._full(e)
    except Exception:  # no memory: without this thread the run would hang
      end_process()

  def _full(self, e: OSError) -> None:
    logging.error("%s", traceback.format_exc())
    self.disk = self.disk or f"{self.folder} cannot be written ({e}); make room there."

  def _merge_steps(self) -> None:
    """Closes, merges and commits steps; the computation is outside the lock, so that polls are answered meanwhile."""
    writing = 0.0
    while not (self.stopped or self.disk):
      with self.lock:
        ready, wake = self.core.due(CLOCK())
        self._write_events()
        if not ready or self.core.over:
          self.lock.wait(POLL_SECONDS if wake is None else max(0.0, min(wake - CLOCK(), POLL_SECONDS)))
          continue
        closed = self.core.close(CLOCK())
      began = time.monotonic()
      result = self.core.compute(closed)
      with self.lock:
        done = time.monotonic()
        record = self.core.commit(closed, result, CLOCK(), done - began + writing)  # the writing of the step before
        p = closed.p
        self.store.append(record)
        self.store.save(p, self.core.theta[p], self.core.outer[p], self.core.facts())
        writing = time.monotonic() - done
        self.refs[p] = (closed.t, ray.put(self.core.merger.outgoing(p, self.core.theta[p])))
        self.records.append(record)
        self._write_events()
        self.lock.notify_all()

  def _write_events(self) -> None:
    try:
      for event in [] if self.disk else self.core.events:
        self.store.append(event)
        self.events.append(event)
    except OSError as e:
      self._full(e)
    self.core.events.clear()

  # --- learners ------------------------------------------------------------------------------------------------------

  def join(self, learner: int, keys: Mapping[str, Any], life: int | None = None, least: int = 1) -> dict[str, Any]:
    """A learner begins; see `SyncerCore.join`. Returns its life, inner step and all fragments."""
    with self.lock:
      life, n = self.core.join(learner, keys, CLOCK(), life, least)
      self._write_events()
      return {"life": life, "n": n, "cut": self.cut_number,
              "fragments": {p: (t, [ref]) for p, (t, ref) in self.refs.items()}}

  def poll(self, report: Mapping[str, Any]) -> dict[str, Any]:
    """A learner reports and hears what is new to it."""
    end = time.monotonic() + POLL_SECONDS
    learner, life = report["learner"], report["life"]
    with self.lock:
      if not self.core.heard(learner, life, CLOCK(), *(report[k] for k in ("n", "step_seconds", "transfer", "loss"))):
        return {"rejoin": True}
      if report["sick"]:
        self.core.ill(learner, CLOCK(), f"its loss at inner step {report['n']} is not finite")
      while True:
        reply = self._news(learner, report)
        if reply is not None or self.stopped:
          return reply or {"stop": True}
        left = end - time.monotonic()
        if left <= 0:
          return {}
        self.lock.wait(left)
        if (member := self.core.members.get(learner)) is None or member.life != life:
          return {"rejoin": True}

  def _news(self, learner: int, report: Mapping[str, Any]) -> dict[str, Any] | None:
    core, wanted = self.core, {}
    if core.members[learner].sick:
      wanted = {p: (t, [ref]) for p, (t, ref) in self.refs.items()}
      core.healed(learner, CLOCK())
      self._write_events()
      return {"reseed": wanted, "cut": self.cut_number}
    for p in core.newer(learner, report["have"]):
      t, ref = self.refs[p]
      wanted[p] = (t, [ref])
    opened = None if core.over else (core.epoch, *core.opened(learner))
    if not wanted and opened == report["opened"] and self.cut_number <= report["cut"]:
      return None
    return {"fragments": wanted, "opened": opened, "cut": self.cut_number, "taped": core.members[learner].taped}

  def offer(self, contribution: Contribution, cut: int) -> str:
    """A contribution; see `SyncerCore.offer`. `cut`: the checkpoint that the learner has taken part in."""
    with self.lock:
      self._cut(cut)  # the learner's state in that checkpoint is from before this contribution, so ours has to be
      if self.core.over:
        return "over"
      answer = self.core.offer(contribution, CLOCK())
      self.lock.notify_all()
      return answer

  # --- the run -------------------------------------------------------------------------------------------------------

  def news(self, steps: int, events: int) -> dict[str, Any]:
    """Records after the first `steps` of this syncer, events after the first `events`, and why it cannot go on, if so."""
    with self.lock:
      return {"records": self.records[steps:], "events": self.events[events:], "pid": os.getpid(), "disk": self.disk,
              "failure": self.failure or self.core.failure}

  def invite(self, keys: Mapping[str, Any], token: str, **request: Any) -> None:
    """Asks the run, by an event that it reads, for more learners; once for each token. `request`: see `joining.join`."""
    refuse_mismatch(self.core.keys, keys, "--join")
    with self.lock:
      if all(event.get("token") != token for event in self.events):
        self.core.note(CLOCK(), "run", "invited", f"--join={request['count']}", token=token, **request)
        self._write_events()

  def started(self) -> int:
    """How often it has been started before; a part of a checkpoint says the same."""
    return self.core.epoch

  def parameters(self) -> dict[int, Any]:
    """All fragments, {p: (version, [reference])}."""
    with self.lock:
      return {p: (t, [ref]) for p, (t, ref) in self.refs.items()}

  def cut(self, number: int) -> dict[str, Any]:
    """This syncer's part of a consistent cut (Chandy and Lamport's markers: every later answer carries its number)."""
    with self.lock:
      self._cut(number)
      return self.cut_state

  def _cut(self, number: int) -> None:
    if number <= self.cut_number:
      return
    core, self.cut_number = self.core, number
    self.cut_state = {"facts": core.facts(), "epoch": core.epoch, "theta": {p: dict(x) for p, x in core.theta.items()},
                      "outer": dict(core.outer)}
    self.lock.notify_all()

  def stop(self) -> None:
    with self.lock:
      self.stopped = True
      self.lock.notify_all()


class Learner:
  """The actor of a learner: one thread trains, and for each syncer one listens and one sends.

  Args:
    config, vocab_size, shards, workdir: as for `Syncer`.
    namespace: of the run, in which the syncers have their names.
    number: of the learner.
    resumes: the life that begins with a checkpoint's state, which `give` brings; 0: none.
  """

  def __init__(self, config: ConfigDict, vocab_size: int, shards: int, workdir: str, namespace: str, number: int,
               resumes: int):
    use_compilation_cache(workdir)
    self.config, self.vocab_size, self.number = config, vocab_size, number
    self.syncers = [ray.get_actor(f"syncer {s}", namespace) for s in range(config.decoupled.syncers)]
    self.resumes, self.given = resumes, queue.Queue(1)  # type: int, queue.Queue[Any]
    self.options = make_options(config, shards)
    self.pace = self.options.pace
    self.inbox = Inbox(len(self.syncers))
    self.outboxes = [ThreadPoolExecutor(1, thread_name_prefix=f"send {s}") for s in range(len(self.syncers))]
    self.core: LearnerCore | None = None
    self.stopped = False
    self.failure: str | None = None
    self.cut_number, self.cut_done = 0, threading.Condition()
    self.cut_state: dict[str, Any] | None = None
    self.loss, self.step_seconds, self.transfer, self.answers = float("nan"), 0.0, 0.0, {}  # type: float, float, float, dict
    self.poisoned = False
    threading.Thread(target=self._live, name="train", daemon=True).start()

  # --- training ------------------------------------------------------------------------------------------------------

  def _live(self) -> None:
    try:
      programs = make_programs(self.config, self.options, self.vocab_size)
      train = data.load(self.config.data, self.config.seq_len, self.config.seed).train
      while not self.stopped:
        self._life(programs, train)
    except Exception as e:
      self._fail(e)

  def _fail(self, e: Exception) -> None:
    """Ends this learner: for good where it is refused or cannot even start, else until Ray has started it again."""
    if self.core is not None and not isinstance(e, ValueError):
      end_process()
    logging.error("%s", traceback.format_exc())
    self.failure = " ".join((str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}").split())[:500]
    self.stopped = True  # nothing more is heard from it, so that nobody waits for it

  def _life(self, programs: Programs, train: Any) -> None:
    """From joining to the end, or until the syncer says that this life is over."""
    life, n, fragments = self._join()
    core = LearnerCore(programs, self.number, life, n, fragments, self._given(life))
    batches = data.worker_batches(train, core.learner, self.options.shards, self.config.batch_size, self.config.seed)
    core.warm(batches[core.n])
    self.inbox, self.over = Inbox(len(self.syncers)), threading.Event()
    self.have = [{p: t for p, t in core.version.items() if self.options.syncer_of(p) == s} for s in range(len(self.syncers))]
    self.core = core
    for s in range(len(self.syncers)):
      threading.Thread(target=self._listen, args=(s, core, self.over), name=f"listen {s}", daemon=True).start()
    pending, due = None, time.monotonic()
    while not (self.stopped or self.over.is_set()):
      began = time.monotonic()
      if self._receive(core, block=False):
        pending = None
      self._offer(core)
      while core.waiting() and not (self.stopped or self.over.is_set()):
        if self._receive(core, block=True):
          pending = None
        self._offer(core)
        began = time.monotonic()
      if self.poisoned:
        core.w = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), core.w)
        self.poisoned = False
      loss = core.step(batches[core.n])
      if pending is not None:
        self.loss = float(pending)  # one step behind, so that the device always has work
        if not np.isfinite(self.loss) and not self.inbox.healing:
          core.sick = True
      pending = loss
      due = max(due + self.pace, time.monotonic() - self.pace)  # makes up for one late step, not for a pause
      if self.pace and due > time.monotonic():
        time.sleep(due - time.monotonic())
      seconds = time.monotonic() - began
      self.step_seconds = 0.8 * self.step_seconds + 0.2 * seconds if self.step_seconds else seconds

  def _given(self, life: int) -> dict[str, Any] | None:
    """The checkpoint's state, for this process's first life; one that Ray has started again is not given it."""
    if self.core is not None or not self.resumes:
      return None
    try:  # another life than was to be: the answer to a first attempt to join was lost, or Ray has started this again
      return self.given.get(timeout=CALL_SECONDS if life == self.resumes else POLL_SECONDS)
    except queue.Empty:
      if life == self.resumes:
        logging.warning("The checkpoint's state did not arrive; starting from the global parameters.")
      return None

  def _offer(self, core: LearnerCore) -> None:
    for c in core.offers():
      p = 0 if self.options.on_arrival else self.options.fragment(c.t)
      s = self.options.syncer_of(p)  # one that does not answer holds up its own contributions only
      self.outboxes[s].submit(self._send, c, core, self.cut_number, s)

  def _receive(self, core: LearnerCore, block: bool) -> bool:
    """Takes the messages that are there, or waits a moment for one; True after a re-seed."""
    healed = False
    try:
      while True:
        for message in self.inbox.get(block, POLL_SECONDS):
          if isinstance(message, Cut):
            self._take_part(core, message.number)
          elif isinstance(message, Taped):
            core.taped(*message)
          else:
            core.receive(message)
          if isinstance(message, Reseed):
            self.inbox.healing, self.loss, healed = False, float("nan"), True
        block = False
    except queue.Empty:
      return healed

  def _take_part(self, core: LearnerCore, number: int) -> None:
    """Saves the state at this boundary for a checkpoint, once; a sick learner has none to save."""
    if number > self.cut_number:
      with self.cut_done:
        self.cut_number, self.cut_state = number, None if core.sick else core.snapshot(number)
        self.cut_done.notify_all()

  # --- messages ------------------------------------------------------------------------------------------------------

  def _join(self) -> tuple[int, int, dict[int, Any]]:
    """Joins all syncers, however long that takes; their word on life and inner step is the first syncer's."""
    keys, first = fingerprint(self.config), None
    fragments: dict[int, Any] = {}
    for syncer in self.syncers:
      while True:
        try:
          life = None if first is None else first[0]
          reply: Any = ray.get(syncer.join.remote(self.number, keys, life, max(1, self.resumes)), timeout=CALL_SECONDS)
          fragments |= {p: (t, ray.get(ref)) for p, (t, (ref,)) in reply["fragments"].items()}
          break
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, ray.exceptions.ObjectLostError):
          time.sleep(RETRY_SECONDS)
        except ray.exceptions.RayTaskError as e:
          raise e.cause from None  # a refusal, in a sentence of its own
      first = first or (reply["life"], reply["n"])
      with self.cut_done:  # the state of an earlier life is not what a checkpoint wants of this one
        self.cut_number, self.cut_state = max(self.cut_number, reply["cut"]), None
        self.cut_done.notify_all()
    assert first is not None
    return *first, fragments

  def _listen(self, s: int, core: LearnerCore, over: threading.Event) -> None:
    try:
      self._hear(s, core, over)
    except Exception as e:
      self._fail(e)

  def _hear(self, s: int, core: LearnerCore, over: threading.Event) -> None:
    """Polls one syncer and puts what it says in the inbox, in order."""
    opened, cut, inbox = None, self.cut_number, self.inbox
    while not (self.stopped or over.is_set()):
      report = {"learner": core.learner, "life": core.life, "n": core.n, "step_seconds": self.step_seconds,
                "transfer": self.transfer, "loss": self.loss, "have": self.have[s], "opened": opened, "cut": cut,
                "sick": inbox.wants(s, core)}
      try:
        reply: Any = ray.get(self.syncers[s].poll.remote(report), timeout=CALL_SECONDS)
        fragments = {p: (t, ray.get(ref)) for p, (t, (ref,)) in reply.get("fragments", reply.get("reseed", {})).items()}
      except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, ray.exceptions.ObjectLostError):
        time.sleep(RETRY_SECONDS)
        continue
      if reply.get("rejoin"):
        over.set()
      if reply.get("stop"):
        time.sleep(RETRY_SECONDS)
      if reply.get("cut", 0) > cut:
        cut = reply["cut"]
        inbox.mark(Cut(cut))
      if "reseed" in reply:
        core.sick = True
        self.have[s] = {p: t for p, (t, _) in fragments.items()}
        inbox.heal(s, fragments)
        opened = None
      elif "fragments" in reply:
        taped, opened = reply["taped"], reply["opened"]
        arrived = [Arrived(p, t, x, taped) for p, (t, x) in sorted(fragments.items(), key=lambda item: item[1][0])]
        # Together: who has a fragment without word of the next step would contribute to the old one again.
        inbox.put(s, [*arrived, Taped(s, taped), *([] if opened is None else [Opened(s, *opened)])])
        self.have[s] = self.have[s] | {p: t for p, (t, _) in fragments.items()}

  def _send(self, c: Contribution, core: LearnerCore, cut: int, s: int) -> None:
    try:
      self._bring(c, core, cut, s)
    except Exception as e:
      self._fail(e)

  def _bring(self, c: Contribution, core: LearnerCore, cut: int, s: int) -> None:
    """Brings a contribution to the host and to syncer s, the same one until it is answered: it counts once."""
    c.payload = jax.device_get(c.payload)
    c.loss, c.step_seconds, c.transfer = self.loss, self.step_seconds, self.transfer
    answer: Any = "lost"
    while answer == "lost" and self.core is core and not self.stopped:
      began = time.monotonic()
      try:
        answer = ray.get(self.syncers[s].offer.remote(c, cut), timeout=CALL_SECONDS)
        seconds = time.monotonic() - began
        self.transfer = 0.8 * self.transfer + 0.2 * seconds if self.transfer else seconds
      except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        time.sleep(RETRY_SECONDS)
      self.answers[answer] = self.answers.get(answer, 0) + 1

  # --- the run -------------------------------------------------------------------------------------------------------

  def give(self, saved: Mapping[str, Any]) -> None:
    """The checkpoint's state that the constructor announced."""
    self.given.put(saved)

  def status(self) -> dict[str, Any]:
    """How it goes: number, life, n, loss, seconds a step, inner steps until answers, answers to contributions."""
    core = self.core
    return {"learner": self.number, "life": core.life if core else 0, "n": core.n if core else 0, "loss": self.loss,
            "step_seconds": self.step_seconds, "lag": float(np.mean(core.lags)) if core and core.lags else None,
            "answers": dict(self.answers), "pid": os.getpid(), "failure": self.failure, "started": core is not None}

  def snapshot(self, number: int, seconds: float) -> dict[str, Any] | None:
    """The state that a checkpoint has of this learner; None where it has none within so many seconds."""
    with self.cut_done:
      self.cut_done.wait_for(lambda: self.cut_number >= number or self.stopped or self.failure or self.core is None, seconds)
      return self.cut_state if self.cut_number == number else None

  def set_pace(self, seconds: float) -> None:
    """Makes inner steps take at least so long; for experiments with slow learners."""
    self.pace = seconds

  def poison(self) -> None:
    """Makes the parameters NaN before the next step; for experiments with failures."""
    self.poisoned = True

  def stop(self) -> None:
    self.stopped = True
