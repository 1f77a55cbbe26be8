"""Rounds of M workers as events: inner steps, exchanges that share links with each other, failures, crashes, stragglers.

A worker does its inner steps up to the next point at which something departs or is due. There, what blocks departs and
what is due is waited for, and then what overlaps departs: so a Mix1 that is late shares the link with Mix2. A collective
begins when all its members are there, a message when both ends are; nothing else couples workers, so a slow link or worker
holds up only those that exchange with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np

from fgd_jax.netsim.events import Event, Network, Simulator
from fgd_jax.netsim.failures import Attempts, Drops, Interruptions, StepTimes, stream
from fgd_jax.netsim.links import Links, cost
from fgd_jax.netsim.plan import Exchange, Plan

LEAST_CHANCE = 1e-4  # of an attempt at a mean, or at the steps between two exchanges, to get through
MOST_INTERRUPTIONS = 10_000  # of a worker in a round


class Span(NamedTuple):
  """What a worker did (compute, wait, down) or what was in flight, in a timeline; seconds."""

  lane: str
  what: str
  start: float
  end: float


class Failure(NamedTuple):
  """An exchange that did not happen: a swap that failed, or an overlapped mean that was given up.

  `exchange` is the plan's name of it, such as "mix2"; `members` are the workers concerned, who keep their own values.
  """

  round: int
  exchange: str
  members: tuple[int, ...]


@dataclasses.dataclass
class Result:
  """What a simulation shows; seconds, bytes that one worker sends, averages over workers and rounds.

  Attributes:
    compute_utilization: share of the elapsed time in which workers did inner steps that count.
    round_seconds, compute_seconds, down_seconds, stall_seconds: of a round; the first is the sum of the others.
    worker_utilization: of each worker, while it ran.
    round_ends: [rounds], when the last worker finished each round (NaN: nobody did, all were down).
    round_utilization: [rounds], share of the time since a worker's last round that it computed, over those that finished.
    retries: attempts that failed and were repeated, a round. skipped: overlapped means that were given up, a round.
    lost_pairs: swaps that failed, a round.
    events: that were simulated.
    failures: what did not happen, by round.
    finished: [rounds][M], whether a worker finished the round (it was not down).
  """

  compute_utilization: float
  round_seconds: float
  compute_seconds: float
  stall_seconds: float
  down_seconds: float
  bytes_overlapped: float
  bytes_blocking: float
  worker_utilization: list[float]
  round_ends: list[float]
  round_utilization: list[float]
  rounds: int
  retries: float
  skipped: float
  lost_pairs: float
  events: int
  failures: list[Failure]
  finished: list[list[bool]]
  timeline: list[Span]


class _Meeting:
  """One exchange of one round: a collective, or the messages between two workers."""

  def __init__(self, exchange: Exchange, r: int, members: tuple[int, ...], directions: tuple[tuple[int, int], ...]):
    self.exchange, self.round, self.members, self.directions = exchange, r, members, directions
    self.there: set[int] = set()
    self.wanted: set[int] = set()  # workers that wait for it although it overlaps
    self.started = self.failed = False
    self.began = 0.0
    self.attempts = Attempts(None, 0.0, "end", False)
    self.flight = Event()
    self.end = Event()


class _Fleet:
  """The state of a simulation."""

  def __init__(self, plan: Plan, links: Links, times: StepTimes, drops: Drops, crashes: Interruptions,
               pauses: Interruptions, on_crash: str, rounds: int, seed: int, traced: int):
    self.plan, self.links, self.times, self.drops = plan, links, times, drops
    self.crashes, self.pauses, self.on_crash, self.rounds, self.seed = crashes, pauses, on_crash, rounds, seed
    self.sim = Simulator()
    self.net = Network(self.sim, links.capacity())
    m = plan.workers
    self.down, self.ended = np.zeros(m), np.zeros(m)
    self.useful, self.ends = np.zeros((rounds, m)), np.full((rounds, m), np.nan)  # of the rounds that a worker finished
    self.current = [0] * m
    self.active = [True] * m
    self.absent_until = [0.0] * m  # rounds below it go without the worker
    self.meetings: dict[Any, _Meeting] = {}
    self.begun: dict[int, Event] = {}
    self.pairs: dict[tuple[str, int], list[list[tuple]]] = {}
    self.retries = self.skipped = self.lost = 0
    self.failures: list[Failure] = []
    self.traced, self.timeline = traced, []  # type: ignore[var-annotated]
    self.fault_rng = [stream(seed, 4, worker) for worker in range(m)]
    self.until_crash = [crashes.gap(rng) for rng in self.fault_rng]
    self.until_pause = [pauses.gap(rng) for rng in self.fault_rng]
    events: dict[int, tuple[list, list, list]] = {plan.steps: ([], [], [])}
    for e in plan.exchanges:
      for step in (e.start, e.due):
        events.setdefault(step, ([], [], []))
      if e.blocking:
        events[e.start][0].append(e)
      else:
        events[e.due][1].append(e)
        events[e.start][2].append(e)
    self.points = sorted(events.items())

  # --- a worker ------------------------------------------------------------------------------------------------------

  def worker(self, m: int) -> Generator[Any, Any, None]:
    r = 0
    while r < self.rounds:
      self.current[m] = r
      self._begun(r).fire()
      done, crashed = 0, False
      flying: dict[str, Event] = {}
      steps = self.times.draw(self.seed, m, r, self.plan.steps)
      if self.plan.own_steps is not None:
        steps[self.plan.own_steps[m]:] = 0
      for point, (blocking, due, departing) in self.points:
        if point > done:
          crashed = yield from self._compute(m, r, float(steps[done:point].sum()))
          if crashed and self.on_crash == "proceed":
            break
          done = point
        waited = [self._join(e, m, r) for e in blocking]
        waited += [self._due(e, flying.pop(e.name), r, m) for e in due]
        began = self.sim.now
        yield _all(waited)
        self._trace(m, r, "wait", began)
        for e in departing:
          flying[e.name] = self._join(e, m, r)
      if crashed and self.on_crash == "proceed":
        self.down[m] += float(steps[:done].sum())  # what it had done of this round is lost
        r = yield from self._rejoin(m)
        continue
      self.useful[r, m] = steps.sum()
      self.ends[r, m] = self.ended[m] = self.sim.now
      r += 1
    self.active[m], self.absent_until[m] = False, math.inf
    self._recheck()

  def _compute(self, m: int, r: int, seconds: float) -> Generator[Any, Any, bool]:
    """Inner steps, with what interrupts them; True after a crash (whose steps are repeated where others wait)."""
    left, crashed, pause = seconds, False, self.until_pause
    while True:
      began, gap = self.sim.now, min(left, self.until_crash[m], pause[m])
      if gap > 0:
        yield gap
        self._trace(m, r, "compute", began)
      left -= gap
      self.until_crash[m] -= gap
      pause[m] -= gap
      if left <= 0:
        return crashed
      began = self.sim.now
      if self.until_crash[m] <= 0:
        self.until_crash[m] = self.crashes.gap(self.fault_rng[m])
        lost, crashed = seconds - left, True
        if self.on_crash == "proceed":
          self.active[m], self.absent_until[m] = False, math.inf
          self._recheck()
        yield self.crashes.length(self.fault_rng[m])
        self.down[m] += self.sim.now - began + lost
        self._trace(m, r, "down", began)
        if self.on_crash == "proceed":
          return True
        left = seconds  # from the last point at which others had heard of it
      else:
        self.until_pause[m] = self.pauses.gap(self.fault_rng[m])
        yield self.pauses.length(self.fault_rng[m])
        self.down[m] += self.sim.now - began
        self._trace(m, r, "down", began)

  def _rejoin(self, m: int) -> Generator[Any, Any, int]:
    """After a crash without which the others went on: the round in which the worker takes part again."""
    others = [self.current[i] for i in range(self.plan.workers) if self.active[i]]
    r = max(others) + 1 if others else max(self.current) + 1
    self.absent_until[m] = r
    began = self.sim.now
    if others and r < self.rounds:
      yield self._begun(r)
    self.active[m] = True
    self.down[m] += self.sim.now - began
    self.ended[m] = self.sim.now
    return r

  def _begun(self, r: int) -> Event:
    return self.begun.setdefault(r, Event())

  # --- exchanges -----------------------------------------------------------------------------------------------------

  def _join(self, e: Exchange, m: int, r: int) -> Event:
    """Worker m is there for exchange e of round r; the event is the end of all its parts that concern m."""
    if e.mean:
      return self._arrive(e, r, tuple(range(self.plan.workers)), (), m)
    return _all([self._arrive(e, r, pair, ways, m) for pair, ways in self._pairs(e, r)[m]])

  def _pairs(self, e: Exchange, r: int) -> list[list[tuple]]:
    """For each worker, the pairs of round r to which it belongs, with the directions (from, to) of their messages."""
    choice = e.topology.choice(r)
    known = self.pairs.get((e.name, choice))
    if known is not None:
      return known
    ways: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for _, source in e.topology.bank[choice].terms:
      for i, j in enumerate(np.asarray(source).tolist()):
        if i != j:
          ways.setdefault((min(i, j), max(i, j)), set()).add((j, i))
    out: list[list[tuple]] = [[] for _ in range(self.plan.workers)]
    for pair, both in sorted(ways.items()):
      for m in pair:
        out[m].append((pair, tuple(sorted(both))))
    if len(self.pairs) >= 64:  # of large banks only the latest patterns are kept
      self.pairs.clear()
    self.pairs[e.name, choice] = out
    return out

  def _arrive(self, e: Exchange, r: int, members: tuple[int, ...], ways: tuple, m: int) -> Event:
    key = (e.name, r, members)
    meeting = self.meetings.get(key)
    if meeting is None:
      meeting = self.meetings[key] = _Meeting(e, r, members, ways)
    meeting.there.add(m)
    self._try(meeting)
    return meeting.end

  def _recheck(self) -> None:
    """A worker has left: exchanges may begin without it."""
    for meeting in list(self.meetings.values()):
      self._try(meeting)

  def _try(self, meeting: _Meeting) -> None:
    """Begins the exchange once everybody is there who is not away."""
    absent = [m for m in meeting.members if m not in meeting.there and meeting.round < self.absent_until[m]]
    if meeting.started or len(meeting.there) + len(absent) < len(meeting.members):
      return
    meeting.started, meeting.began = True, self.sim.now
    meeting.attempts = self.drops.attempts(self.seed, meeting.exchange.name, meeting.round, tuple(sorted(meeting.there)))
    if len(meeting.there) == 1:  # all others are away: nothing to exchange
      self._over(meeting)
    elif meeting.exchange.mean:
      self._attempt(meeting)
    else:
      failed = meeting.attempts.next()
      if failed is not None:
        self.lost += 1
        self._failed(meeting)
      nbytes = meeting.exchange.nbytes * (1.0 if failed is None else failed)
      sends = [self.net.send(self.links.message(j, i), nbytes, self.links.latency) for j, i in meeting.directions]
      _all(sends).then(lambda: self._over(meeting))

  def _attempt(self, meeting: _Meeting) -> None:
    """One attempt of a collective; after a failure the next one, or none where it is late and may be skipped."""
    e, there, failed = meeting.exchange, sorted(meeting.there), meeting.attempts.next()
    price = cost(e.kind, len(there))
    path = price.path if self.links.rates.ndim == 1 else price.edge
    share = 1.0 if failed is None else failed
    meeting.flight = self.net.send(self.links.collective(e.kind, there), share * path * e.nbytes,
                                   price.hops * self.links.latency)

    def landed() -> None:
      if failed is None:
        self._over(meeting)
        return
      meeting.failed = True
      if not self._given_up(meeting):
        self.retries += 1
        self._attempt(meeting)

    meeting.flight.then(landed)

  def _due(self, e: Exchange, end: Event, r: int, m: int) -> Event:
    """Worker m wants an overlapped exchange now."""
    meeting = self.meetings.get((e.name, r, tuple(range(self.plan.workers)))) if e.mean else None
    if meeting is not None:
      meeting.wanted.add(m)
      self._given_up(meeting)
    return end

  def _given_up(self, meeting: _Meeting) -> bool:
    """Gives up a collective of which an attempt failed, once everybody waits for it; whether it was."""
    if (self.drops.late_mix1 != "skip" or not meeting.failed or meeting.exchange.blocking
        or len(meeting.wanted) < len(meeting.there)):
      return False
    self.skipped += 1
    self._failed(meeting)
    self.net.cancel(meeting.flight)
    self._over(meeting)
    return True

  def _over(self, meeting: _Meeting) -> None:
    del self.meetings[meeting.exchange.name, meeting.round, meeting.members]
    self._span(meeting.round, "links", meeting.exchange.name, meeting.began)
    meeting.end.fire()

  # --- records -------------------------------------------------------------------------------------------------------

  def _failed(self, meeting: _Meeting) -> None:
    self.failures.append(Failure(meeting.round, meeting.exchange.name, tuple(sorted(meeting.there))))

  def _trace(self, m: int, r: int, what: str, began: float) -> None:
    if self.sim.now > began:
      self._span(r, f"worker {m}", what, began)

  def _span(self, r: int, lane: str, what: str, began: float) -> None:
    if r < self.traced:
      self.timeline.append(Span(lane, what, began, self.sim.now))


def _all(events: list[Event]) -> Event:
  """Happens when all have happened."""
  both, left = Event(), len(events)

  def one() -> None:
    nonlocal left
    left -= 1
    if left <= 0:
      both.fire()

  if not events:
    both.fire()
  for event in events:
    event.then(one)
  return both


def _shares(useful: np.ndarray, ends: np.ndarray) -> list[float]:
  """Of each round [R], computing over elapsed seconds of the workers that finished it; useful, ends: [R, M]."""
  finished = np.isfinite(ends)
  latest = np.maximum.accumulate(np.where(finished, ends, 0), axis=0)  # end of a worker's last round so far
  took = np.where(finished, np.diff(latest, axis=0, prepend=0), 0).sum(axis=1)
  return np.where(took > 0, useful.sum(axis=1) / np.where(took > 0, took, 1), np.nan).tolist()


def _refuse_endless(plan: Plan, times: StepTimes, drops: Drops, crashes: Interruptions | None, pauses: Interruptions | None,
                    on_crash: str) -> None:
  """Raises ValueError where failures come so often that a simulation would hardly ever end."""
  repeated = any(e.mean and (e.blocking or drops.late_mix1 == "wait") for e in plan.exchanges)
  if repeated and drops.unit != "round" and 1 - drops.of(plan.workers) < LEAST_CHANCE:
    raise ValueError(f"drop={drops.probability!r} for each {drops.unit}: a mean over {plan.workers} workers would succeed "
                     f"once in {1 / max(1 - drops.of(plan.workers), 1e-18):.2g} attempts; take a smaller probability.")
  points = sorted({0, plan.steps, *(step for e in plan.exchanges for step in (e.start, e.due))})
  stretch = max(times.seconds) * max(b - a for a, b in zip(points, points[1:]))
  if crashes is not None and on_crash == "wait" and crashes.free_of(stretch) < LEAST_CHANCE:
    raise ValueError(f"Crashes every {crashes.every:g} s: a worker that repeats its steps after each would hardly ever get "
                     f"through the {stretch:g} s between two exchanges; take rarer crashes, or on_crash=proceed.")
  for what in (crashes, pauses):
    if what is not None and what.every and plan.steps * max(times.seconds) / what.every > MOST_INTERRUPTIONS:
      raise ValueError(f"Interruptions every {what.every:g} s are more than {MOST_INTERRUPTIONS:,} in a round of "
                       f"{plan.steps * max(times.seconds):g} s of computing; take rarer ones.")


def simulate(plan: Plan, links: Links, times: StepTimes, drops: Drops | None = None, crashes: Interruptions | None = None,
             pauses: Interruptions | None = None, on_crash: str = "wait", rounds: int = 10, seed: int = 0,
             traced_rounds: int = 1) -> Result:
  """Simulates rounds of all workers.

  Args:
    plan: of the method. links: of the workers. times: of inner steps.
    drops: exchanges that fail. crashes, pauses: of workers.
    on_crash: "wait": everybody waits for the worker, which repeats the steps since it last exchanged anything; "proceed":
      the others go on without it, and it takes part again from the next round on.
    rounds: that are simulated. seed: of all draws; the same seed gives the same run.
    traced_rounds: rounds that the timeline covers.

  Raises:
    ValueError: numbers of workers that differ, or an unknown on_crash.
  """
  if links.workers != plan.workers:
    raise ValueError(f"There are links for {links.workers} workers, and {plan.workers} workers.")
  if len(times.seconds) not in (1, plan.workers):
    raise ValueError(f"step_seconds holds {len(times.seconds)} values for {plan.workers} workers; give one, or one for "
                     "each.")
  if on_crash not in ("wait", "proceed"):
    raise ValueError(f"on_crash={on_crash!r} must be 'wait' or 'proceed'.")
  if rounds < 1:
    raise ValueError(f"rounds={rounds} must be at least 1.")
  _refuse_endless(plan, times, drops or Drops(), crashes, pauses, on_crash)
  none = Interruptions()
  fleet = _Fleet(plan, links, times, drops or Drops(), crashes or none, pauses or none, on_crash, rounds, seed,
                 traced_rounds)
  for m in range(plan.workers):
    fleet.sim.start(fleet.worker(m))
  fleet.sim.run()
  if any(fleet.active):
    stuck = [m for m, on in enumerate(fleet.active) if on]
    raise RuntimeError(f"Workers {stuck} still wait for something after all events.")
  elapsed = np.maximum(fleet.ended, 1e-300)
  finished = np.isfinite(fleet.ends)
  total, done = float(elapsed.sum()), max(int(finished.sum()), 1)
  useful, down = float(fleet.useful.sum()), float(fleet.down.sum())
  stall = total - useful - down
  round_ends = np.where(finished.any(axis=1), np.where(finished, fleet.ends, 0).max(axis=1), np.nan)
  return Result(
      compute_utilization=useful / total, round_seconds=total / done, compute_seconds=useful / done,
      stall_seconds=stall / done if stall > 1e-12 * total else 0.0, down_seconds=down / done,
      bytes_overlapped=plan.bytes_overlapped, bytes_blocking=plan.bytes_blocking,
      worker_utilization=(fleet.useful.sum(axis=0) / elapsed).tolist(), round_ends=round_ends.tolist(),
      round_utilization=_shares(fleet.useful, fleet.ends), rounds=rounds, retries=fleet.retries / rounds,
      skipped=fleet.skipped / rounds, lost_pairs=fleet.lost / rounds, events=fleet.sim.count,
      failures=sorted(fleet.failures), finished=finished.tolist(),
      timeline=sorted(fleet.timeline, key=lambda s: (s.start, s.lane)))

