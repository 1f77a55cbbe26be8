"""The syncer: which contributions make a step, and when. Deterministic given its calls; knows no clock, thread or network.

    syncer step t merges fragment p = (t - 1) mod P
    open      learners contribute once they have taken H/P inner steps since their last contribution
    quorum    K such contributions are there: the grace window begins, and everybody is called to send what there is
    close     the window is over, or everyone in reach has contributed
    commit    merge, outer step; step t + S opens (S syncers share the fragments, syncer s has t = s + 1, s + 1 + S, ...)
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fgd_jax.decoupled.grace import Grace
from fgd_jax.decoupled.merging import Merger, Tree, token_weight
from fgd_jax.decoupled.options import DYLU_LEAST, Options, refuse_mismatch
from fgd_jax.quarantine import NonFiniteError
from fgd_jax.state import checksum

PyTree = Any
RESEEDS = 3  # of every learner without a merge in between, before the run gives up


@dataclasses.dataclass
class Contribution:
  """What a learner sends for syncer step t.

  Attributes:
    life: how often the learner has joined. n: its inner steps. seq: number of this contribution among its operations.
    steps, tokens: since it last received the fragment. full: whether it counts for the quorum.
    ops_from, ops: its operations that are not on the tape yet, up to this contribution; see `tape`.
    payload: the (encoded) outer gradient; the syncer keeps it decoded. nbytes: of it.
    loss, step_seconds, transfer: the learner's newest loss, and what an inner step and a contribution take it.
    lag: inner steps from its last contribution to the answer; what tau hopes to bound.
    epoch: of the syncer that it was made for; one that has started again since gets a new one.
  """

  learner: int
  life: int
  t: int
  n: int
  seq: int
  steps: int
  tokens: int
  full: bool
  loss: float
  ops_from: int
  ops: list[list[Any]]
  payload: dict[str, np.ndarray]
  nbytes: int = 0
  step_seconds: float = 0.0
  transfer: float = 0.0
  lag: int | None = None
  epoch: int = 0


@dataclasses.dataclass
class Member:
  """A learner as the syncer knows it.

  Attributes:
    life: how often it has joined. n: its inner steps. heard: when. reach: whether that was lately. sick: non-finite.
    trains: whether this life has reported yet; before, it loads and compiles, and nobody waits for it.
    step_seconds, transfer, loss: as it reports them. interval: its inner steps between contributions (DyLU).
    token, answer: with merges on arrival, how many of its contributions were merged, and the version that the last one made.
    taped: how many of its operations are on the tape; the last one of them is its newest contribution that was merged.
    reseeds: how often it was not finite since the last merge of its own.
  """

  life: int
  n: int
  heard: float
  reach: bool = False
  trains: bool = False
  sick: bool = False
  step_seconds: float = 0.0
  transfer: float = 0.0
  loss: float = float("nan")
  interval: int | None = None
  token: int = 0
  answer: int = 0
  taped: int = 0
  reseeds: int = 0


@dataclasses.dataclass
class Closed:
  """A step whose contributions are complete."""

  t: int
  p: int
  contributions: list[Contribution]
  quorum_seconds: float
  grace_seconds: float


class SyncerCore:
  """One syncer's part of the global state, and the rules by which it moves.

  Args:
    options, merger: of the run.
    keys: fingerprint of the run's config; learners with another one are refused.
    params: initial parameters (arrays).
    index: number of this syncer, from 0.

  Attributes:
    theta, outer, version: by fragment: parameters, outer optimizer state, the step that made them (0: initial).
    epoch: how often this syncer has started; learners contribute again to the open step when it changes.
    events: what happened to whom, {"time", "actor", "event", "cause"}; whoever reads them clears the list.
    trained: inner steps of all learners.
    failure: why the run cannot go on, None while it can.
  """

  def __init__(self, options: Options, merger: Merger, keys: Mapping[str, Any], params: PyTree, index: int = 0):
    self.options, self.merger, self.keys, self.index = options, merger, dict(keys), index
    self.owned = [p for p in range(options.fragments) if options.syncer_of(p) == index]
    self.theta: dict[int, Tree] = {}
    self.outer: dict[int, PyTree] = {}
    for p in self.owned:
      self.theta[p], self.outer[p] = merger.start(params, p)
    self.version = dict.fromkeys(self.owned, 0)
    self.members: dict[int, Member] = {}
    self.grace = Grace(options.grace, options.grace_cap, options.overlap)
    self.epoch = 0
    self.trained = 0
    self.failure: str | None = None
    self.events: list[dict[str, Any]] = []
    self._open(index + 1)

  def _open(self, t: int) -> None:
    self.t, self._closed = t, False
    self._in: dict[int, Contribution] = {}
    self._came: dict[int, float] = {}  # when
    self._quorum: float | None = None
    self._quorum_seconds = 0.0
    self._deadline = 0.0

  # --- learners ------------------------------------------------------------------------------------------------------

  @property
  def over(self) -> bool:
    """Whether the run's last step is behind this syncer."""
    return self.t > self.options.steps

  def join(self, learner: int, keys: Mapping[str, Any], now: float, life: int | None = None, least: int = 1
           ) -> tuple[int, int]:
    """A learner begins, again or for the first time.

    Args:
      life: as another syncer has counted it. One that died while it joined has been counted by some of them only.
      least: the number of a new life is not below it: lives that a checkpoint knows are over.

    Returns:
      Its life (counted from 1), and the inner step from which it counts: its own, or that of its peers.

    Raises:
      ValueError: its config is not the run's.
    """
    refuse_mismatch(self.keys, keys, f"Learner {learner}")
    old = self.members.get(learner)
    n = old.n if old else int(statistics.median([m.n for m in self.members.values()] or [0]))
    life = life or max(old.life + 1 if old else 1, least)
    self.members[learner] = Member(life=life, n=n, heard=now)
    self._drop(learner)
    # On the tape, since a syncer that is killed before its next step must not count this life again (`remember`).
    self.note(now, f"learner {learner}", "joined" if old is None else "rejoined", f"at inner step {n}", learner=learner,
              life=life, n=n)
    return life, n

  def remember(self, event: Mapping[str, Any], now: float) -> None:
    """A line of the tape, after `recall`: a learner that joined since the last step is known."""
    if event.get("event") in ("joined", "rejoined") and "life" in event:
      old = self.members.get(event["learner"])
      if old is None or old.life < event["life"]:
        self.members[event["learner"]] = Member(life=event["life"], n=event["n"], heard=now)

  def _drop(self, learner: int) -> None:
    """Forgets a learner's contribution to the open step."""
    self._in.pop(learner, None)
    self._came.pop(learner, None)

  def heard(self, learner: int, life: int, now: float, n: int, step_seconds: float = 0.0, transfer: float = 0.0,
            loss: float = float("nan")) -> bool:
    """A sign of life; False where that life is over (the learner must join again)."""
    member = self.members.get(learner)
    if self.epoch and (member is None or member.life < life):  # it joined between our last step and our end
      member = self.members[learner] = Member(life=life, n=n, heard=now)
    if member is None or member.life != life:
      return False
    self.trained += max(0, n - member.n)
    member.n, member.heard, member.step_seconds, member.transfer = max(n, member.n), now, step_seconds, transfer
    member.loss = loss
    if not member.reach:
      event = ("back", "it answers again") if member.trains else ("trains", f"from inner step {n}")
      self.note(now, f"learner {learner}", *event)
    member.reach = member.trains = True
    return True

  def ill(self, learner: int, now: float, cause: str) -> None:
    """A learner with non-finite numbers: what it sends is ignored until `healed`, it is to start from the global model."""
    member = self.members[learner]
    if not member.sick:
      member.sick = True
      member.reseeds += 1
      self._drop(learner)
      self.note(now, f"learner {learner}", "non_finite", cause + "; excluded and re-seeded from the global parameters")
      # Who is silent has no say; who has not trained yet may still do better.
      if all(m.reseeds > RESEEDS for m in self.members.values() if m.reach or not m.trains):
        self.failure = (f"Every learner was not finite {RESEEDS + 1} times without a merge in between, also from the global "
                        "parameters; try a lower inner.lr, or another init_from, in a new --workdir.")

  def healed(self, learner: int, now: float) -> None:
    """The learner has the global parameters again."""
    member = self.members[learner]
    if member.sick:
      member.sick = False
      self.note(now, f"learner {learner}", "reseeded", "it starts from the global parameters")

  def opened(self, learner: int) -> tuple[int, bool, int]:
    """For one learner: the step that it may contribute to, whether all are called, inner steps between contributions."""
    member = self.members[learner]
    interval = self.options.interval * self.options.syncers
    if self.options.on_arrival:
      return member.token + 1, False, member.interval or interval
    return self.t, self._quorum is not None, interval

  def newer(self, learner: int, have: Mapping[int, int]) -> list[int]:
    """The fragments that a learner with these versions lacks; on arrival only what its own contribution made."""
    if self.options.on_arrival and have:
      answer = self.members[learner].answer
      return [p for p in self.owned if answer > have.get(p, -1)]
    return [p for p in self.owned if self.version[p] > have.get(p, -1)]

  # --- a step --------------------------------------------------------------------------------------------------------

  def offer(self, c: Contribution, now: float) -> str:
    """Takes a contribution: "taken", or why not: "life" (over), "late" (its step or epoch is), "sick", "non_finite".

    One that comes twice, because its answer was lost, counts once.
    """
    member = self.members.get(c.learner)
    if member is None or member.life != c.life:
      return "life"
    self.heard(c.learner, c.life, now, c.n, c.step_seconds, c.transfer, c.loss)
    closed = self._closed and not self.options.on_arrival
    if closed or c.epoch != self.epoch or c.t != self.opened(c.learner)[0]:
      return "late"
    if (old := self._in.get(c.learner)) is not None and c.seq <= old.seq:
      return "taken"
    if member.sick:
      return "sick"
    c.nbytes = sum(x.nbytes for x in c.payload.values())
    p = self.options.fragment(1 if self.options.on_arrival else c.t)
    c.payload = self.merger.decode(p, c.payload)
    if not all(np.isfinite(x).all() for x in c.payload.values()):
      self.ill(c.learner, now, f"its fragment {p} at inner step {c.n} is not finite")
      return "non_finite"
    self._in[c.learner] = c
    self._came.setdefault(c.learner, now)
    self._check_quorum(now)
    return "taken"

  def _enough(self) -> bool:
    return sum(c.full for c in self._in.values()) >= self.options.quorum

  def _check_quorum(self, now: float) -> None:
    if self._quorum is None and self._enough():
      self._quorum = now
      self._quorum_seconds = now - min(self._came.values())
      self.grace.observe(quorum=self._quorum_seconds)
      slowest = max((m.step_seconds for m in self.members.values() if m.reach), default=0.0)
      self.grace.observe(step=slowest)
      self._deadline = now + (0.0 if self.options.on_arrival else self.grace.window())

  def due(self, now: float) -> tuple[bool, float | None]:
    """Whether the step can close, and if not, when to ask again at the latest (None: after the next contribution)."""
    for number, member in self.members.items():
      if member.reach and now - member.heard > self.options.silent_after:
        member.reach = False
        self.note(now, f"learner {number}", "silent", f"no sign of life for {now - member.heard:.1f} s; not waited for")
    if self._quorum is not None and not self._enough():  # some who made the quorum have gone since
      self._quorum = None
    if self._quorum is None:
      return False, None
    missing = [m for m, member in self.members.items() if member.reach and not member.sick and m not in self._in]
    if not missing or self.options.on_arrival or now >= self._deadline:
      return True, None
    return False, self._deadline

  def close(self, now: float) -> Closed:
    """Ends the wait: later contributions to this step are late."""
    assert self._quorum is not None
    self._closed = True
    p = self.owned[0] if self.options.on_arrival else self.options.fragment(self.t)
    contributions = [self._in[m] for m in sorted(self._in)]
    if self.options.on_arrival:  # one at a time, in the order of arrival
      contributions = [next(iter(self._in.values()))]
    return Closed(self.t, p, contributions, self._quorum_seconds, now - self._quorum)

  def compute(self, closed: Closed) -> tuple[Tree, PyTree, float]:
    """Merge and outer step; changes nothing.

    Raises:
      NonFiniteError: the result is not finite, and is not to be committed.
    """
    stack = self.merger.stack([c.payload for c in closed.contributions], self._slots(closed))
    weights = self.merger.weights(weights_of([vars(c) for c in closed.contributions]), stack)
    out = self.merger.step(self.theta[closed.p], self.outer[closed.p], stack, weights, np.int32(closed.t))
    theta, outer, norm = jax.device_get(out)
    if not (np.isfinite(norm) and all(np.isfinite(x).all() for x in theta.values())):
      raise NonFiniteError(f"Step {closed.t} would make the global fragment {closed.p} not finite, so it was not taken; try "
                           "a lower inner.lr or decoupled.outer_lr in a new --workdir.")
    return theta, outer, float(norm)

  def _slots(self, closed: Closed) -> int:
    """Rows of the stack that is merged: of all learners, so that one program serves any number of contributions."""
    return 1 if self.options.on_arrival else max(self.options.learners, len(closed.contributions))

  def commit(self, closed: Closed, result: tuple[Tree, PyTree, float], now: float, sync_seconds: float) -> dict[str, Any]:
    """Adopts the result, opens the next step and returns the step's record, a line of the tape."""
    p, t = closed.p, closed.t
    self.theta[p], self.outer[p], norm = result
    self.version[p] = t
    # `transfer` is what a learner measured for sending a contribution; bringing the fragment back takes about as long.
    transfer = max(c.transfer for c in closed.contributions)
    self.grace.observe(sync=sync_seconds + 2 * transfer)
    weights = weights_of([vars(c) for c in closed.contributions])
    lines = []
    for c, weight in zip(closed.contributions, weights):
      line: dict[str, Any] = {"learner": c.learner, "life": c.life, "n": c.n, "seq": c.seq, "steps": c.steps,
                              "tokens": c.tokens, "full": c.full, "weight": weight / sum(weights), "loss": c.loss,
                              "lag": c.lag, "ops_from": c.ops_from, "ops": c.ops}
      member = self.members.get(c.learner)
      if member is not None and member.life == c.life:
        member.reseeds = 0
        member.taped = c.seq + 1
        if self.options.on_arrival:
          member.token, member.answer = member.token + 1, t
          member.interval = self._dynamic_interval(member)
      lines.append(line)
    rest = [c for c in self._in.values() if c not in closed.contributions] if self.options.on_arrival else []
    record = {
        "step": t, "fragment": p, "time": now, "contributions": lines, "checksum": checksum(self.theta[p]),
        "learners": sum(m.reach for m in self.members.values()), "inner_steps": {m: x.n for m, x in self.members.items()},
        "tokens": self.trained * self.options.batch_tokens, "quorum_seconds": closed.quorum_seconds,
        "grace_seconds": closed.grace_seconds, "sync_seconds": sync_seconds, "outer_gradient_norm": norm,
        "bytes_received": sum(c.nbytes for c in closed.contributions), "slots": self._slots(closed),
        "bound": self.options.learners, "shards": self.options.shards}
    self._open(t + self.options.syncers)
    for c in rest:
      self._in[c.learner], self._came[c.learner] = c, now
    self._check_quorum(now)
    return record

  def _dynamic_interval(self, member: Member) -> int:
    """DyLU: H_i = max(floor(H v_i / v_max), 5), v = inner steps a second (arXiv 2401.09135)."""
    speeds = [1 / m.step_seconds for m in self.members.values() if m.reach and m.step_seconds > 0]
    full = self.options.interval
    if not self.options.dylu or not speeds or member.step_seconds <= 0:
      return full
    ratio = (1 / member.step_seconds) / max(speeds)
    return min(full, max(int(full * ratio), DYLU_LEAST))

  # --- memory --------------------------------------------------------------------------------------------------------

  def facts(self) -> dict[str, Any]:
    """All that is to be remembered besides the fragments, as JSON has it."""
    kept = ("life", "n", "token", "answer", "taped", "interval")
    return {"version": {str(p): t for p, t in self.version.items()}, "trained": self.trained,
            "members": {str(m): {k: getattr(x, k) for k in kept} for m, x in self.members.items()}}

  def recall(self, facts: Mapping[str, Any], theta: Mapping[int, Tree], outer: Mapping[int, PyTree], epoch: int, now: float
             ) -> None:
    """Continues from remembered facts and fragments."""
    self.theta, self.outer, self.epoch = dict(theta), dict(outer), epoch
    self.version = {int(p): int(t) for p, t in facts["version"].items()}
    self.trained = facts["trained"]
    self.members = {int(m): Member(heard=now, reach=True, trains=True, **x) for m, x in facts["members"].items()}
    last = max(self.version.values())
    self._open(last + self.options.syncers if last else self.index + 1)

  def note(self, now: float, actor: str, event: str, cause: str, **more: Any) -> None:
    """Writes down an event."""
    self.events.append({"time": now, "actor": actor, "event": event, "cause": cause, "syncer_step": self.t, **more})


def weights_of(contributions: Sequence[Mapping[str, Any]]) -> list[float]:
  """The token weights of contributions that have `tokens` and `steps`."""
  return [token_weight(c["tokens"], c["steps"]) for c in contributions]
