"""Decoupled DiLoCo in random orders of events: messages late, lost and doubled, processes killed, re-seeds, resumes.

An inner step counts at most once in a fragment, error feedback is what merged contributions left out, and the tape replays
bit for bit. Cores, inbox, store and resume are the real ones; actors, threads and Ray are left out.
"""

import copy
import random

import jax
import numpy as np
import pytest
from decoupled_helpers import Cluster, batch, options, zeros
from test_decoupled_orders import replayed

from fgd_jax.decoupled.healing import Inbox
from fgd_jax.decoupled.learner import Arrived, LearnerCore, Opened, Reseed
from fgd_jax.decoupled.resuming import put_back
from fgd_jax.decoupled.store import TAPE, Store, read_tape
from fgd_jax.decoupled.syncer import Contribution, SyncerCore

EVENTS = {"step": 40, "hear": 40, "send": 25, "work": 30, "mark": 1.0, "resume": 0.7}


class World(Cluster):
  """A cluster with a disk, a network and a fate.

  `books` have, by (lineage, fragment), what merged contributions left out, and the inner steps in them.
  """

  def __init__(self, seed, folder, o):
    super().__init__(o)
    self.draw, self.folder, self.now, self.lineages = random.Random(seed), folder, 1.0, 0
    self.stores, self.books, self.made = {}, {}, {}
    for s in range(o.syncers):
      self.start_syncer(s)
    for m in range(o.learners):
      self.start_learner(m)

  def start_syncer(self, s):
    self.cut = None  # as `Run.save` drops one whose parts do not belong together
    self.syncers[s], self.stores[s] = SyncerCore(self.options, self.merger, {}, self.params, s), Store(f"{self.folder}/{s}")
    self.stores[s].load(self.syncers[s], self.now)

  def start_learner(self, m, saved=None, books=None, least=1):
    life = None
    for syncer in self.syncers:
      life, n = syncer.join(m, {}, self.now, life, least)
    core = self.learners[m] = LearnerCore(self.programs, m, life, n, self.everything(), saved)
    core.inbox, core.outbox, core.state, core.have = Inbox(len(self.syncers)), [], None, dict(core.version)
    core.told = core.marked = self.cut  # to which a learner that has just begun gives no state
    self.descend(core, books)

  def descend(self, core, books=None):
    self.lineages += 1
    core.lineage = self.lineages
    self.books |= {(core.lineage, p): books[p] if books else (zeros(self.merger, p), []) for p in core.version}

  def event(self, kind):
    self.now += self.draw.random() * 0.3
    getattr(self, kind)(self.learners[self.draw.randrange(self.options.learners)], self.draw.randrange(len(self.syncers)))
    for s, syncer in enumerate(self.syncers):
      while syncer.events:
        self.stores[s].append(syncer.events.pop(0))

  def step(self, core, s):
    while not core.inbox._queue.empty():
      for message in core.inbox.get(False, 0):
        if isinstance(message, dict):
          core.marked, core.state = message, None if core.sick else (core.snapshot(message["number"]), core.lineage)
        elif isinstance(message, list):
          core.taped(*message)
        else:
          core.receive(message)
        if isinstance(message, Reseed):
          core.inbox.healing = False
          self.descend(core)
    for c in core.offers():
      c.payload, p = jax.device_get(c.payload), self.options.fragment(c.t)
      w, got = self.programs.fragments.take(core.w, p), self.merger.decode(p, c.payload)
      left = {k: np.asarray(x - w[k]) - got[k] for k, x in core.anchors[p].items()}
      self.made[c.learner, c.life, c.seq] = core.lineage, left
      core.outbox.append((c, core.marked))
    core.step(batch(core.learner, core.n))
    for p in set(core.version) - set(core._sent) if not core.sick else ():  # nothing in doubt
      for k, x in self.books[core.lineage, p][0].items():
        np.testing.assert_allclose(core.errors[p][k], x, atol=1e-9)
    core.sick = core.sick or self.draw.random() < 0.01

  def hear(self, core, s):
    syncer, m = self.syncers[s], core.learner
    if self.draw.random() < 0.02 or not syncer.heard(m, core.life, self.now, core.n):
      return self.start_learner(m)
    if core.inbox.wants(s, core):
      syncer.ill(m, self.now, "")
    heal, taped, opened = syncer.members[m].sick, syncer.members[m].taped, Opened(s, syncer.epoch, *syncer.opened(m))
    newer = syncer.owned if heal else syncer.newer(m, {p: core.have[p] for p in syncer.owned})
    wanted = {p: self.fetch(s, p) for p in newer}
    syncer.healed(m, self.now)
    if self.draw.random() < 0.05:  # the answer is lost
      return
    if self.cut and s in self.cut["parts"] and core.told is not self.cut:
      core.told = self.cut
      core.inbox.mark(self.cut)
    core.have |= {p: t for p, (t, _) in wanted.items()}
    if heal:
      core.sick = True
      return core.inbox.heal(s, wanted)
    arrived = sorted((Arrived(p, *x, taped) for p, x in wanted.items()), key=lambda message: message.t)
    core.inbox.put(s, [*arrived, [s, taped], opened])

  def send(self, core, s):
    if core.outbox:
      c, marked = core.outbox[0]
      s = self.options.syncer_of(self.options.fragment(c.t))
      if marked is not None and marked is self.cut:
        self.mark(core, s)
      self.syncers[s].offer(Contribution(**vars(c)), self.now)
      if self.draw.random() < 0.8:  # else the answer is lost, and it comes again
        core.outbox.pop(0)

  def work(self, core, s):
    syncer, killed = self.syncers[s], self.draw.random()
    if killed < 0.02 or not syncer.due(self.now)[0]:
      return self.start_syncer(s) if killed < 0.02 else None
    closed = syncer.close(self.now)
    self.stores[s].append(syncer.commit(closed, syncer.compute(closed), self.now, 0.0))
    if killed < 0.08:  # between the tape and the fragment
      return self.start_syncer(s)
    self.stores[s].save(closed.p, syncer.theta[closed.p], syncer.outer[closed.p], syncer.facts())
    for c in closed.contributions:
      lineage, left = self.made[c.learner, c.life, c.seq]
      sums, spans = self.books[lineage, closed.p]
      assert all(max(a, c.n - c.steps) >= min(b, c.n) for a, b in spans), "an inner step counts twice"
      self.books[lineage, closed.p] = {k: x + left[k] for k, x in sums.items()}, [*spans, (c.n - c.steps, c.n)]

  def mark(self, core, s):
    x, self.cut = self.syncers[s], self.cut or {"number": self.draw.getrandbits(40), "parts": {}, "books": {}}
    if s not in self.cut["parts"]:
      self.cut["parts"][s] = copy.deepcopy({"facts": x.facts(), "theta": x.theta, "outer": x.outer})
      self.cut["books"] |= {k: x for k, x in self.books.items() if self.options.syncer_of(k[1]) == s}

  def resume(self, core, s):
    cut = self.cut
    versions = [t for x in cut["parts"].values() for t in x["facts"]["version"].values()] if cut else []
    if len(versions) == self.options.fragments and any(versions):
      states = {m: copy.deepcopy(x.state) for m, x in self.learners.items() if x.marked is cut and x.state}
      lives = put_back(self.folder, [x for _, x in sorted(cut["parts"].items())], {m: x for m, (x, _) in states.items()}, 0)
      for s in cut["parts"]:
        self.start_syncer(s)
      for m in self.learners:
        state, lineage = states.get(m, (None, None))
        books = {p: cut["books"].get((lineage, p), (zeros(self.merger, p), [])) for p in core.version}
        self.start_learner(m, state, books, lives[m] + 1)


@pytest.mark.parametrize("changes", [{}, {"syncers": 2}, {"fragments": 1, "quorum": 2}])
def test_any_order_counts_each_inner_step_once_and_is_replayed(x64, tmp_path, changes):
  o = options(**{"learners": 3, "quorum": 1, "steps": 10**9, "overlap": 2, "merge": "rda", "grace": 0.9, "grace_cap": 3.0,
                 "silent_after": 20.0, "codec": "topk", "error_feedback": True, **changes})
  steps = 0
  for seed in range(12):
    world = World(seed, str(tmp_path / str(seed)), o)
    for kind in world.draw.choices(list(EVENTS), list(EVENTS.values()), k=600):
      world.event(kind)
    done = replayed(world, [line for s in range(o.syncers) for line in read_tape(f"{world.folder}/{s}/{TAPE}")])
    assert all(same for _, same in done), (seed, done)
    steps += len(done)
  assert steps > 50
