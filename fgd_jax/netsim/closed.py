"""Closed forms beside the simulation (methods-core.md, 4.6, and geometric retries of 4.7)."""

from __future__ import annotations

import math

from fgd_jax.netsim.failures import Drops
from fgd_jax.netsim.links import Links
from fgd_jax.netsim.plan import Exchange, Plan


def seconds(e: Exchange, links: Links) -> float | None:
  """Time of one exchange that has the links to itself; None where links differ."""
  rate = links.uniform
  if rate is None:
    return None
  price = e.cost
  return (price.path if links.rates.ndim == 1 else price.edge) * e.nbytes * 8 / rate + price.hops * links.latency


def round_seconds(plan: Plan, links: Links, step_seconds: float, drops: Drops | None = None) -> float | None:
  """Expected time of a round where workers, steps and links are all equal; None where there is no closed form.

      round = sum over stretches between dues of  max(compute, transfer in flight)  +  sum of blocking transfers

  Every overlapped transfer must be due before the next one departs. A collective is repeated until it succeeds: its
  attempts are geometric, each of them costs the whole transfer (half of it on average, where failures are noticed at any
  point). A pair's swap is not repeated. An overlapped mean that failed is given up when it is due ("skip", whose first
  attempt is always waited for) or waited for. What is late shares a link with what blocks then, which is the same time in
  all where both use the same link; with latencies, or links by pair, it is left to the simulation.
  """
  drops = drops or Drops()
  p_round = drops.unit == "round" and drops.probability > 0
  if plan.own_steps is not None:
    return None
  if p_round and (drops.at != "end" or len(plan.exchanges) > 1 and any(not e.blocking for e in plan.exchanges)):
    return None
  total, busy_until = plan.steps * step_seconds, 0
  for e in sorted(plan.exchanges, key=lambda e: e.start):
    alone = seconds(e, links)
    if alone is None:
      return None
    p, window = drops.of(plan.workers if e.mean else 2), step_seconds * (e.due - e.start)
    waits = bool(p) and e.mean and drops.late_mix1 == "wait"  # for repetitions, however short one attempt is
    if ((links.latency or links.rates.ndim == 2) and not e.blocking and (alone > window or waits)
        and any(other.blocking and other.start == e.due for other in plan.exchanges)):
      return None
    if p and drops.at == "uniform" and (not e.mean or not e.blocking and (alone > window or drops.late_mix1 == "wait")):
      return None  # how long it takes depends on the draw, and the longest of several counts
    if e.blocking:
      total += alone * (_attempts_cost(p, drops) if e.mean else 1)
      continue
    if e.start < busy_until:
      return None
    busy_until = e.due
    total += _late(alone, window, p if e.mean else 0.0, drops)
  return total


def _attempts_cost(p: float, drops: Drops) -> float:
  """Expected transfers that a blocking collective costs, in multiples of one that succeeds."""
  failed = 1.0 if drops.at == "end" else 0.5
  return 1 + failed * (p if drops.unit == "round" else p / (1 - p))


def _late(alone: float, window: float, p: float, drops: Drops) -> float:
  """Expected time for which an overlapped exchange is waited for after its window."""
  if not p or not alone or drops.late_mix1 == "skip":
    return max(alone - window, 0.0)
  if drops.unit == "round":
    return (1 - p) * max(alone - window, 0.0) + p * max(2 * alone - window, 0.0)
  fits = math.floor(window / alone + 1e-12)  # attempts in the window; E max(n alone - window, 0) for n geometric:
  return p**fits * ((fits + 1) * alone - window + alone * p / (1 - p))


def utilization(plan: Plan, links: Links, step_seconds: float, drops: Drops | None = None) -> float | None:
  """Compute time over the expected time of a round."""
  total = round_seconds(plan, links, step_seconds, drops)
  return None if total is None else plan.steps * step_seconds / total
