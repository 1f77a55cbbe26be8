"""A learner: inner steps, contributions at step boundaries, global fragments as they arrive. No clock, thread or network.

Everything happens at boundaries between inner steps, in this order: messages in the order of their arrival, then
contributions, then the next step. What a learner did, besides stepping, is a list of operations ([kind, inner step, ...]),
which travels with its contributions to the tape (see `tape`):

    ["join", n, {fragment: version}, "fresh"] it began, from the global parameters
    ["join", n, {...}, number, merged]        it began, from that checkpoint; `merged`: see `LearnerCore`
    ["apply", n, t]                           the fragment of step t was blended in
    ["offer", n, t]                           it contributed to step t
    ["retract", n, t]                         what it had contributed to step t is not part of it
    ["reseed", n, {fragment: version}]        it took all global parameters and a fresh inner optimizer state
    ["cut", n, number]                        its state at this boundary went into a checkpoint
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fgd_jax.decoupled.merging import Tree
from fgd_jax.decoupled.programs import Programs
from fgd_jax.decoupled.syncer import Contribution

PyTree = Any


class Opened(NamedTuple):
  """Message: a syncer's open step; `called`: its quorum is there; `interval`: inner steps between contributions."""

  syncer: int
  epoch: int
  t: int
  called: bool
  interval: int


class Arrived(NamedTuple):
  """Message: the global fragment of step t; `taped`: operations of this learner on its syncer's tape.

  The last one of them is the newest contribution that was merged, by which the learner knows whether its own was. None in a
  replay: the tape has what was retracted.
  """

  p: int
  t: int
  fragment: Tree
  taped: int | None = None


class Reseed(NamedTuple):
  """Message: all global fragments, {p: (t, fragment)}; the learner's own state is to be forgotten."""

  fragments: dict[int, tuple[int, Tree]]


class Sent(NamedTuple):
  """A contribution whose step is not over: that step, the inner step, the error feedback before it, and its operation."""

  t: int
  n: int
  error: PyTree
  seq: int


@dataclasses.dataclass
class Channel:
  """What a learner knows of one syncer; `due`: inner step of its next contribution, `answered`: step it contributed to."""

  due: int
  interval: int
  epoch: int = 0
  open: int | None = None
  called: bool = False
  answered: int | None = None
  taped: int = 0


class LearnerCore:
  """One learner's state and rules.

  Args:
    programs: compiled computations.
    learner, life: as the syncer numbers it.
    n: inner steps so far; also the position in its data and in the learning rate's schedule.
    fragments: all global fragments, {p: (version, fragment)}.
    saved: the state of a checkpoint instead of a fresh one, see `snapshot`, whose facts have "merged" by now: for each
      syncer, how many operations of this learner its tape has at that checkpoint.

  Attributes:
    w, opt: parameters and inner optimizer state. n: inner steps.
    steps, tokens: by fragment, since it was received (c_steps, c_tokens).
    version: of the fragments that were received. lags: inner steps between contributions and their answers, newest last.
    sick: whether it waits for a re-seed.
  """

  def __init__(self, programs: Programs, learner: int, life: int, n: int, fragments: Mapping[int, tuple[int, Tree]],
               saved: Mapping[str, Any] | None = None):
    self.programs, self.options = programs, programs.options
    self.learner, self.life, self.n = learner, life, n
    self.ops: list[list[Any]] = []
    self.ops_from = 0
    self.sick = False
    self.lags: list[int] = []
    if saved is None:
      self._begin(fragments)
    else:
      self._continue(saved, {p: t for p, (t, _) in fragments.items()})
    start = ["fresh"] if saved is None else [saved["facts"]["cut"], saved["facts"]["merged"]]
    self._did("join", {str(p): t for p, (t, _) in fragments.items()}, *start)
    if saved is not None:
      for p, (t, fragment) in fragments.items():
        self.receive(Arrived(p, t, fragment))

  def _begin(self, fragments: Mapping[int, tuple[int, Tree]]) -> None:
    o = self.options
    self._sent: dict[int, Sent] = {}  # by fragment
    self.w = self.programs.assemble({p: fragment for p, (_, fragment) in fragments.items()})
    self.opt = self.programs.fresh_optimizer(self.w, self.n)
    self.anchors = {p: self.programs.anchor(p, fragment) for p, (_, fragment) in fragments.items()}
    self.version = {p: t for p, (t, _) in fragments.items()}
    self.steps = dict.fromkeys(range(o.fragments), 0)
    self.tokens = dict.fromkeys(range(o.fragments), 0)
    self.errors = {p: self.programs.no_error(p) for p in range(o.fragments)}
    stride = o.interval * o.syncers
    # The first fragment goes out after H steps, the next ones H/P steps apart, as in Streaming DiLoCo.
    self.channels = {s: Channel(due=self.n + o.inner_steps + s * o.interval, interval=stride) for s in range(o.syncers)}

  def _did(self, kind: str, *what: Any) -> int:
    self.ops.append([kind, self.n, *what])
    return self.ops_from + len(self.ops) - 1

  # --- a boundary ----------------------------------------------------------------------------------------------------

  def receive(self, message: Opened | Arrived | Reseed) -> None:
    """Takes one message, in the order of arrival."""
    if isinstance(message, Opened):
      self._opened(message)
    elif isinstance(message, Reseed):
      before = self.channels
      self._begin(message.fragments)
      for s, c in before.items():  # what it knows of the syncers stays
        # The step that was open may be part of what has come; the syncer says anew which one is.
        self.channels[s] = dataclasses.replace(c, due=self.channels[s].due, answered=None, open=None, called=False)
      self.sick = False
      self._did("reseed", {str(p): t for p, t in self.version.items()})
    elif message.t > self.version[message.p]:
      p, o = message.p, self.options
      if p in self._sent and message.taped not in (None, self._sent[p].seq + 1):
        self.retract(p)
      # Blending is for those who had the version before; who missed one takes the global value.
      missed = message.t - self.version[p] > o.fragments if self.version[p] else message.t > o.fragments
      alpha = 0.0 if missed and not o.on_arrival else o.blend
      anchor = self.programs.anchor(p, message.fragment)
      self.w = self.programs.blend(p, self.w, anchor, alpha)
      self.anchors[p], self.version[p] = anchor, message.t
      self.steps[p] = self.tokens[p] = 0
      if p in self._sent:
        self.lags = [*self.lags[-31:], self.n - self._sent.pop(p).n]
      self._did("apply", message.t)

  def _opened(self, message: Opened) -> None:
    channel = self.channels[message.syncer]
    if message.epoch != channel.epoch:
      if channel.answered is not None and channel.answered == message.t:  # what we sent was lost with the syncer
        channel.answered, channel.due = None, min(channel.due, self.n)
        self.retract(0 if self.options.on_arrival else self.options.fragment(message.t))
      channel.epoch = message.epoch
    if message.interval != channel.interval:
      channel.due += message.interval - channel.interval
    channel.open, channel.called, channel.interval = message.t, message.called, message.interval

  def offers(self) -> list[Contribution]:
    """The contributions that are due at this boundary; their payloads are still on the device."""
    if self.sick:
      return []
    return [self._offer(s, channel) for s, channel in self.channels.items() if self._is_due(channel)]

  def _is_due(self, channel: Channel) -> bool:
    if channel.open is None or channel.answered == channel.open:
      return False
    p = 0 if self.options.on_arrival else self.options.fragment(channel.open)
    return self.steps[p] > 0 and (self.n >= channel.due or channel.called)

  def _offer(self, syncer: int, channel: Channel) -> Contribution:
    assert channel.open is not None
    t, full = channel.open, self.n >= channel.due
    p = 0 if self.options.on_arrival else self.options.fragment(t)
    payload = self.offer(p, t)
    seq = self._sent[p].seq
    channel.answered, channel.due = t, self.n + channel.interval
    since = max(channel.taped, self.ops_from)
    return Contribution(self.learner, self.life, t, self.n, seq, self.steps[p], self.tokens[p], full, float("nan"), since,
                        self.ops[since - self.ops_from:], payload, lag=self.lags[-1] if self.lags else None,
                        epoch=channel.epoch)

  def offer(self, p: int, t: int) -> Tree:
    """The payload of a contribution to step t, which also moves the error feedback."""
    self._sent[p] = Sent(t, self.n, self.errors[p], self._did("offer", t))
    payload, self.errors[p] = self.programs.delta(p, self.w, self.anchors[p], self.errors[p], np.int32(self.learner),
                                                  np.int32(self.n))
    return payload

  def retract(self, p: int) -> None:
    """Takes back the contribution of fragment p, which was not merged: error feedback is what it was before."""
    if p in self._sent:
      sent = self._sent.pop(p)
      self.errors[p] = sent.error
      self._did("retract", sent.t)

  def waiting(self) -> bool:
    """Whether the next step has to wait: for an answer, or for word of the step that a contribution is due to.

    That is with overlap 0 and with merges on arrival only.
    """
    return self.options.waits and not self.sick and any(
        self.n >= c.due if c.open is None else c.answered == c.open for c in self.channels.values())

  def taped(self, syncer: int, count: int) -> None:
    """A syncer has the first `count` operations on its tape."""
    self.channels[syncer].taped = max(self.channels[syncer].taped, count)
    done = min(c.taped for c in self.channels.values())
    if done > self.ops_from:
      self.ops, self.ops_from = self.ops[done - self.ops_from:], done

  def step(self, batch: PyTree) -> jax.Array:
    """One inner step; returns its loss, on the device."""
    self.w, self.opt, loss = self.programs.step(self.w, self.opt, batch, self.learner, self.n)
    self.n += 1
    for p in self.steps:
      self.steps[p] += 1
      self.tokens[p] += self.options.batch_tokens
    return loss

  def warm(self, batch: PyTree) -> None:
    """Compiles everything, so that nothing stalls later; changes nothing."""
    programs, zero = self.programs, np.int32(0)
    w, opt = programs.place(*jax.device_get((self.w, self.opt)))
    for p in range(self.options.fragments):
      programs.delta(p, w, self.anchors[p], self.errors[p], zero, zero)
      programs.blend(p, w, self.anchors[p], self.options.blend)
    jax.block_until_ready(programs.step(w, opt, batch, 0, 0))

  # --- checkpoints ---------------------------------------------------------------------------------------------------

  def snapshot(self, cut: int) -> dict[str, Any]:
    """The state at this boundary on the host: {"arrays": pytree, "facts": what JSON can hold}, for `saved`."""
    every = range(self.options.fragments)
    arrays = {"w": self.w, "opt": self.opt, "anchors": [self.anchors[p] for p in every],
              "errors": [self.errors[p] for p in every],
              "errors_before": [self._sent[p].error if p in self._sent else self.errors[p] for p in every]}
    facts = {"learner": self.learner, "life": self.life, "n": self.n, "version": [self.version[p] for p in every],
             "steps": [self.steps[p] for p in every], "tokens": [self.tokens[p] for p in every],
             "sent": {str(p): [sent.t, sent.seq] for p, sent in self._sent.items()},
             "channels": [[c.due, c.interval] for c in self.channels.values()], "cut": cut}
    self._did("cut", cut)
    facts |= {"ops_from": self.ops_from, "ops": list(self.ops)}  # which no tape has, if the run continues from here
    return {"arrays": jax.device_get(arrays), "facts": facts}

  def _continue(self, saved: Mapping[str, Any], there: Mapping[int, int]) -> None:
    """From a snapshot; `there`: the syncers' versions, which tell whether the step of what was under way is over."""
    arrays, facts = saved["arrays"], saved["facts"]
    self.n = facts["n"]
    self.w, self.opt = self.programs.place(arrays["w"], arrays["opt"])
    self.anchors = {p: self.programs.anchor(p, x) for p, x in enumerate(arrays["anchors"])}
    self.errors = {p: jax.tree.map(jnp.asarray, x) for p, x in enumerate(arrays["errors"])}
    self.version, self.steps, self.tokens = (dict(enumerate(facts[k])) for k in ("version", "steps", "tokens"))
    self._sent = {}
    self.channels = {s: Channel(due=due, interval=interval) for s, (due, interval) in enumerate(facts["channels"])}
    for p, (t, seq) in ((int(p), sent) for p, sent in facts["sent"].items()):
      s = self.options.syncer_of(p)
      if facts["merged"][s] != seq + 1:
        self.errors[p] = jax.tree.map(jnp.asarray, arrays["errors_before"][p])
        if there[p] < t or self.options.on_arrival:  # it never arrived: it is sent again
          self.channels[s].due = min(self.channels[s].due, self.n)
