"""A small discrete-event kernel: a clock, processes written as generators, and links whose flows share them equally."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from typing import Any

SETTLED = 1e-9  # share of a flow's bytes below which it counts as done: rounding of sums of rates


class Event:
  """Something that happens once; processes wait for it by yielding it."""

  def __init__(self) -> None:
    self.done = False
    self._waiting: list[Callable[[], None]] = []

  def then(self, callback: Callable[[], None]) -> None:
    """Calls back when it happens, at once where it has happened already."""
    if self.done:
      callback()
    else:
      self._waiting.append(callback)

  def fire(self) -> None:
    """Happens; a second time is without effect."""
    if self.done:
      return
    self.done = True
    for callback in self._waiting:
      callback()
    self._waiting = []


Process = Generator[Any, Any, None]


class Simulator:
  """The clock (`now`, in seconds) and what is still to come."""

  def __init__(self) -> None:
    self.now = 0.0
    self.count = 0  # events so far
    self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
    self._order = itertools.count()

  def at(self, time: float, callback: Callable[[], None], late: bool = False) -> None:
    """Calls back at `time`; `late`: after everything else that happens then."""
    heapq.heappush(self._heap, (time, int(late), next(self._order), callback))

  def start(self, process: Process) -> None:
    """Runs a generator that yields seconds to sleep or Events to wait for."""

    def step() -> None:
      try:
        wanted = next(process)
      except StopIteration:
        return
      if isinstance(wanted, Event):
        wanted.then(step)
      else:
        self.at(self.now + wanted, step)

    self.at(self.now, step)

  def run(self) -> None:
    """Until nothing is left to come."""
    while self._heap:
      self.now, _, _, callback = heapq.heappop(self._heap)
      self.count += 1
      callback()


class _Flow:
  __slots__ = ("links", "nbytes", "left", "rate", "end")

  def __init__(self, links: tuple[Hashable, ...], nbytes: float):
    self.links, self.nbytes, self.left, self.rate, self.end = links, nbytes, nbytes, 0.0, Event()


class Network:
  """Links with capacities in bytes a second. The flows on a link get equal shares of it (processor sharing).

  A flow that uses several links (a ring of all workers, a message's uplink and downlink) goes at the smallest of its
  shares; what it leaves unused on the others is not given to anybody, which is exact where all links are equal.
  """

  def __init__(self, sim: Simulator, capacity: Mapping[Hashable, float]):
    self.sim, self._capacity = sim, capacity
    self._flows: dict[_Flow, None] = {}
    self._users: dict[Hashable, int] = {}
    self._since, self._version, self._stale = 0.0, 0, False

  def send(self, links: Iterable[Hashable], nbytes: float, latency: float = 0.0) -> Event:
    """Starts a flow after `latency` seconds; the event is its arrival."""
    flow = _Flow(tuple(links), nbytes)
    self.sim.at(self.sim.now + latency, lambda: self._enter(flow))
    return flow.end

  def cancel(self, end: Event) -> None:
    """Takes a flow from its links; its event never happens."""
    end.done = True
    for flow in [flow for flow in self._flows if flow.end is end]:
      self._advance()
      self._leave(flow)
      self._touch()

  def _leave(self, flow: _Flow) -> None:
    del self._flows[flow]
    for link in flow.links:
      self._users[link] -= 1

  def _enter(self, flow: _Flow) -> None:
    if flow.end.done:
      return  # cancelled before it began
    if flow.nbytes <= 0 or not flow.links:
      flow.end.fire()
      return
    self._flows[flow] = None
    for link in flow.links:
      self._users[link] = self._users.get(link, 0) + 1
    self._touch()

  def _touch(self) -> None:
    """Rates change, once for everything that happens at this time."""
    if not self._stale:
      self._stale = True
      self.sim.at(self.sim.now, self._share, late=True)

  def _share(self) -> None:
    self._stale = False
    self._advance()
    users, capacity = self._users, self._capacity
    soonest = float("inf")
    for flow in self._flows:
      flow.rate = min(capacity[link] / users[link] for link in flow.links)
      soonest = min(soonest, flow.left / flow.rate)
    self._version += 1
    version = self._version
    if self._flows:
      self.sim.at(self.sim.now + soonest, lambda: self._arrivals(version))

  def _advance(self) -> None:
    passed, self._since = self.sim.now - self._since, self.sim.now
    if passed > 0:
      for flow in self._flows:
        flow.left -= flow.rate * passed

  def _arrivals(self, version: int) -> None:
    if version != self._version:
      return  # rates have changed since
    self._advance()
    done = [flow for flow in self._flows if flow.left <= SETTLED * flow.nbytes]
    if not done:  # the time left is below the clock's resolution
      done = [min(self._flows, key=lambda flow: flow.left / flow.rate)]
    for flow in done:
      self._leave(flow)
    self._touch()
    for flow in done:
      flow.end.fire()
