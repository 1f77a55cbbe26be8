"""A cluster in one thread: the pure cores of learners and syncers with a virtual clock, and a tiny model."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fgd_jax.decoupled.learner import Arrived, LearnerCore, Opened, Reseed
from fgd_jax.decoupled.merging import Merger
from fgd_jax.decoupled.options import Options
from fgd_jax.decoupled.programs import Programs
from fgd_jax.decoupled.syncer import Contribution, SyncerCore
from fgd_jax.methods.base import Outer
from fgd_jax.outer.merge import make_aggregator

OPTIONS = Options(policy="decoupled", learners=2, quorum=2, steps=8, inner_steps=4, fragments=2, syncers=1, shards=2,
                  overlap=0, blend=0.0, grace=0.0, grace_cap=60.0, silent_after=10.0, pace=0.0, dylu=True, batch_tokens=8,
                  aggregator=make_aggregator("mean"), outer=Outer(outer_lr=0.7, outer_momentum=0.9))


def options(**changes):
  merge = changes.pop("merge", None)
  outer = {k: changes.pop(k) for k in ("outer_lr", "outer_momentum", "codec", "error_feedback", "outer") if k in changes}
  if outer:
    base = {} if "outer" in outer else {"outer_lr": 0.7, "outer_momentum": 0.9}
    changes["outer"] = Outer(**{**base, **outer})
  if merge:
    changes["aggregator"] = make_aggregator(merge)
  return dataclasses.replace(OPTIONS, **changes)


def start(seed=0):
  """A linear model whose paths look like a language model's."""
  draw = np.random.default_rng(seed)
  size = lambda *shape: jnp.asarray(draw.normal(size=shape))
  return {"embed": {"embedding": size(5, 3)}, "layers_0": {"mlp": {"kernel": size(3, 4)}, "norm": {"scale": size(3)}},
          "layers_1": {"mlp": {"kernel": size(4, 2)}, "norm": {"scale": size(4)}}}


def loss(w, batch, rng):
  hidden = (batch["x"] @ w["embed"]["embedding"] * w["layers_0"]["norm"]["scale"]) @ w["layers_0"]["mlp"]["kernel"]
  out = (jnp.tanh(hidden) * w["layers_1"]["norm"]["scale"]) @ w["layers_1"]["mlp"]["kernel"]
  return jnp.mean((out - batch["y"]) ** 2)


def batch(learner, n):
  draw = np.random.default_rng([learner, n])
  return {"x": draw.normal(size=(3, 5)), "y": draw.normal(size=(3, 2))}


INNER = optax.adam(optax.linear_schedule(0.01, 0.05, 20))


_MADE = {}


def shared(kind, o, key, *args):
  """Programs or a merger, compiled once for all tests whose options differ in the rules only."""
  made = _MADE.setdefault((kind, key), None) or kind(o, *args)
  _MADE[kind, key] = made
  made = copy.copy(made)
  made.options = o
  return made


class Cluster:
  """Learners with a fixed step time each; messages take no time. `speeds`: seconds an inner step of each learner.

  Attributes:
    records: of all syncer steps. now: the virtual time.
  """

  def __init__(self, o, speeds=None, params=None, loss_fn=loss, optimizer=INNER, batches=batch):
    self.options, self.params, self.batches = o, start() if params is None else params, batches
    shapes = jax.eval_shape(lambda: self.params)
    self.programs = shared(Programs, o, (o.fragments, repr(o.outer.codec), o.outer.feeds_back, loss_fn), shapes, loss_fn,
                           optimizer)
    self.merger = shared(Merger, o, (o.fragments, o.on_arrival, repr(o.outer), repr(o.aggregator), loss_fn), shapes, 0)
    self.now = 0.0
    self.syncers = [SyncerCore(o, self.merger, {}, self.params, s) for s in range(o.syncers)]
    self.speeds, self.next, self.learners, self.records = {}, {}, {}, []
    self.closing = {}
    for m, speed in enumerate(speeds or [1.0] * o.learners):
      self.add(speed, m)

  def fetch(self, s, p):
    return self.syncers[s].version[p], self.merger.outgoing(p, self.syncers[s].theta[p])

  def everything(self):
    return {p: self.fetch(s, p) for s, core in enumerate(self.syncers) for p in core.owned}

  def add(self, speed, learner=None):
    learner = len(self.learners) if learner is None else learner
    for core in self.syncers:
      life, n = core.join(learner, {}, self.now)
    self.learners[learner] = LearnerCore(self.programs, learner, life, n, self.everything())
    self.speeds[learner], self.next[learner] = speed, self.now + speed
    return learner

  def deliver(self, m):
    core = self.learners[m]
    for s, syncer in enumerate(self.syncers):
      if syncer.members[m].sick:
        core.receive(Reseed(self.everything()))
        syncer.healed(m, self.now)
      for p in syncer.newer(m, {p: core.version[p] for p in syncer.owned}):
        core.receive(Arrived(p, *self.fetch(s, p), syncer.members[m].taped))
      core.receive(Opened(s, syncer.epoch, *syncer.opened(m)))
      core.taped(s, syncer.members[m].taped)

  def boundary(self, m):
    """Messages, contributions, and the merges that they complete, until nothing changes."""
    self.deliver(m)
    core = self.learners[m]
    for c in core.offers():
      c.payload, c.step_seconds = jax.device_get(c.payload), self.speeds[m]
      p = 0 if self.options.on_arrival else self.options.fragment(c.t)
      self.syncers[self.options.syncer_of(p)].offer(c, self.now)
      self.settle()

  def settle(self):
    for core in self.syncers:
      while core.due(self.now)[0]:
        closed = core.close(self.now)
        self.records.append(core.commit(closed, core.compute(closed), self.now, 0.0))

  def run(self, seconds):
    end = self.now + seconds
    while True:
      due = {m: t for m, t in self.next.items()}
      deadlines = [d for core in self.syncers if (d := core.due(self.now)[1]) is not None]
      self.now = max(self.now, min([*due.values(), *deadlines]))
      if self.now > end:
        self.now = end
        return
      self.settle()
      for m in sorted(m for m, t in due.items() if t <= self.now):
        core = self.learners[m]
        self.boundary(m)
        if not core.waiting():
          core.step(self.batches(m, core.n))
          for syncer in self.syncers:
            syncer.heard(m, core.life, self.now, core.n, self.speeds[m])
        self.next[m] = self.now + (self.speeds[m] if not core.waiting() else 0.01)

  def theta(self):
    """The global parameters, as the learners get them."""
    return self.programs.assemble({p: x for p, (_, x) in self.everything().items()})


def zeros(merger, p):
  return {k: np.zeros(x.shape, x.dtype) for k, x in merger.fragments.shape(p).items()}


def contribution(cluster, learner, life=1, **changes):
  usual = dict(learner=learner, life=life, t=1, n=4, seq=1, steps=4, tokens=32, full=True, loss=1.0, ops_from=0,
               ops=[["join", 0, {}, "fresh"], ["offer", 4, 1]], payload=zeros(cluster.merger, 0))
  return Contribution(**{**usual, **changes})
