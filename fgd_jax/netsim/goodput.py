"""Goodput of millions of chips that fail, after Decoupled DiLoCo's chaos simulator (arXiv 2604.21428).

A learner is a data-parallel job on its share of the chips. Chips fail independently, once a year each (published). A failure
stalls the whole learner:

  rigid     (no elasticity) until the chip is replaced and the job restarted: `restart` seconds
  elastic   twice: for `scale_down` seconds it is put together again without the slice that holds the chip, and trains on
            with fewer chips; once slices are back, it stalls for `scale_up` seconds to take them in. It does so at most once
            in `gather` seconds, with all slices that are back by then.

What fails during a stall is dealt with in that stall. Learners never wait for each other (quorum 1), so the goodput of M
learners is the mean over them; with a `barrier` they do, as the workers of DiLoCo or of a global Mix1: after so many seconds
of computing everybody waits for the last one. With failures at rate F a second, and elastic ones counted without the slices
that are away,

  rigid     goodput = 1 / (1 + F restart)
  elastic   goodput ~ (1 - scale_up / (1/F + gather + scale_up)) / (1 + F scale_down)

Published: one failure per chip and year, recovery delays that are exponentiated-Weibull, and a table (methods-core.md, 8.6).
Not published, so fitted to all 18 cells of that table (least largest error of the formulas, benchmarks/netsim_fit.py; other
values of the last three do as well): restart 76 s, scale_down 13 s, scale_up 20 s, gather 100 s. Ours without a fit: slices
of 64 chips, away for 600 s on average; with them 0.1 % of the chips are missing.

Events are merged: the failures of N chips that each fail at a constant rate are one Poisson process of N times the rate, so
the cost grows with the number of failures, not of chips. Other lifetimes (Weibull) are drawn chip by chip in one array.
"""

from __future__ import annotations

import bisect
import dataclasses
import math

import numpy as np

from fgd_jax.netsim.failures import LEAST_SHAPE, MOST_SHAPE

DAY = 86400.0
WEEK, YEAR = 7 * DAY, 365.25 * DAY
AWAY_SHAPE = 1.5  # k of the exponentiated Weibull law (1 - exp(-(x/s)^k))^2 of the time for which a slice is away
MOST_FAILURES = 5_000_000  # of a learner: some seconds
MOST_BARRIERS = 100_000


@dataclasses.dataclass(frozen=True)
class ChipFailures:
  """How chips fail and learners recover; seconds.

  Attributes:
    mean_time: between failures of one chip.
    shape: of the Weibull distribution of its lifetimes (1: exponential). All chips are new when the simulation begins.
    restart: stall of a rigid learner. scale_down, scale_up, gather: of an elastic one.
    slice_chips: that are away together after a failure.
    away: mean time for which a slice is away; its distribution is exponentiated Weibull.
  """

  mean_time: float = YEAR
  shape: float = 1.0
  restart: float = 76.0
  scale_down: float = 13.0
  scale_up: float = 20.0
  gather: float = 100.0
  slice_chips: int = 64
  away: float = 600.0

  def __post_init__(self):
    for key in ("mean_time", "shape", "slice_chips", "away"):
      if not 0 < getattr(self, key) < math.inf:
        raise ValueError(f"{key}={getattr(self, key):g} must be positive and finite.")
    if not LEAST_SHAPE <= self.shape <= MOST_SHAPE:
      raise ValueError(f"shape={self.shape:g} of chips' lifetimes must be from {LEAST_SHAPE:g} to {MOST_SHAPE:g}.")
    for key in ("restart", "scale_down", "scale_up", "gather"):
      if not 0 <= getattr(self, key) < math.inf:
        raise ValueError(f"{key}={getattr(self, key):g} must be a number of seconds, at least 0.")

  def failures(self, rng: np.random.Generator, chips: int, seconds: float) -> np.ndarray:
    """Sorted times of the failures of all chips."""
    expected = chips * seconds / self.mean_time
    if self.shape == 1:
      refuse_many(expected)
      return np.sort(rng.uniform(0, seconds, rng.poisson(expected)))
    scale = self.mean_time / math.gamma(1 + 1 / self.shape)
    ages, found, count = scale * rng.weibull(self.shape, chips), [], 0
    while len(ages := ages[ages < seconds]):
      count += len(ages)
      refuse_many(count)
      found.append(ages)
      ages = ages + scale * rng.weibull(self.shape, len(ages))
    return np.sort(np.concatenate(found)) if found else np.empty(0)

  def absences(self, rng: np.random.Generator, count: int) -> np.ndarray:
    """Seconds for which slices are away [count]."""
    inverse = 1 / AWAY_SHAPE
    mean = math.gamma(1 + inverse) * (2 - 0.5**inverse)
    return self.away / mean * (-np.log1p(-np.sqrt(rng.uniform(size=count)))) ** inverse


def refuse_many(failures: float) -> None:
  """Raises ValueError for more failures of a learner than can be simulated."""
  if failures > MOST_FAILURES:
    raise ValueError(f"A learner's chips fail {failures:.3g} times in the simulated time, more than the {MOST_FAILURES:,} "
                     "that can be simulated; take fewer chips, fewer days or a longer time between failures.")


@dataclasses.dataclass
class Goodput:
  """Attributes:
    goodput: share of the chips' time in which they did work that counts.
    uptime: share of the time in which at least one learner did not stall.
    closed_form: of the goodput, from the formulas above (NaN: with barriers, or lifetimes that are not exponential).
    failures: of chips in the simulated time. stalls: of all learners, that began in it.
  """

  goodput: float
  uptime: float
  closed_form: float
  failures: int
  stalls: int
  learner_goodput: list[float]


def _stalls(model: ChipFailures, failures: np.ndarray, back: np.ndarray, elastic: bool, seconds: float
            ) -> list[tuple[float, float]]:
  """Begin and end of a learner's stalls that begin before `seconds`, in order; `back`: times at which slices are back."""
  spans: list[tuple[float, float]] = []
  free, waiting = 0.0, back.tolist()  # end of the last stall; slices that are not taken in again
  taken = 0
  for t in [*failures.tolist(), seconds]:
    while elastic and taken < len(waiting) and (begin := max(waiting[taken] + model.gather, free)) < t:
      free = begin + model.scale_up
      spans.append((begin, free))
      taken = bisect.bisect_right(waiting, begin, taken)
    if free <= t < seconds:
      free = t + (model.scale_down if elastic else model.restart)
      spans.append((t, free))
  return spans


def simulate_goodput(learners: int, chips: int, model: ChipFailures | None = None, elastic: bool = True,
                     seconds: float = WEEK, seed: int = 0, barrier: float = 0.0) -> Goodput:
  """Simulates `learners` on `chips` chips in all; 1 elastic learner is elastic data parallelism.

  Args:
    seconds: that are simulated. seed: of all draws.
    barrier: seconds of computing after which all learners wait for each other (0: never). Time they wait is lost.

  Raises:
    ValueError: fewer chips than learners, or a time that is not positive.
  """
  model = model or ChipFailures()
  if learners < 1 or chips < learners:
    raise ValueError(f"chips={chips} must be at least learners={learners}, which must be at least 1.")
  if not 0 < seconds < math.inf:
    raise ValueError(f"seconds={seconds:g} must be positive.")
  if barrier and not seconds / MOST_BARRIERS <= barrier <= seconds:
    raise ValueError(f"barrier={barrier:g} must be 0, or a number of seconds from {seconds / MOST_BARRIERS:g} to the "
                     f"{seconds:g} that are simulated.")
  per, all_failures, all_stalls = chips // learners, 0, 0
  present, computing, changes = [], [], []
  for learner in range(learners):
    rng = np.random.default_rng([seed, learner])
    failures = model.failures(rng, per, seconds)
    away = model.absences(rng, len(failures)) if elastic else np.zeros(len(failures))
    spans = np.array(_stalls(model, failures, np.sort(failures + away), elastic, seconds)).reshape(-1, 2)
    spans = np.minimum(spans, seconds)
    computing.append(seconds - float((spans[:, 1] - spans[:, 0]).sum()))
    missing = float((np.minimum(failures + away, seconds) - failures).sum()) * min(model.slice_chips, per) / per
    present.append(max(1 - missing / seconds, 0.0))
    all_failures, all_stalls = all_failures + len(failures), all_stalls + len(spans)
    changes.append(spans)
  if barrier:
    computing = [_with_barriers(changes, seconds, barrier)] * learners
  goodputs = [time / seconds * share for time, share in zip(computing, present)]
  known = model.shape == 1 and (not barrier or learners == 1)
  return Goodput(goodput=float(np.mean(goodputs)), uptime=1 - _all_stalled(changes, seconds),
                 closed_form=closed_form(per, model, elastic) if known else math.nan, failures=all_failures,
                 stalls=all_stalls, learner_goodput=[float(g) for g in goodputs])


def _with_barriers(stalls: list[np.ndarray], seconds: float, barrier: float) -> float:
  """Seconds of computing of each learner when all wait for the last one after every `barrier` seconds of it."""
  curves = []  # wall clock and computing time at every change
  for spans in stalls:
    wall = np.concatenate([[0.0], spans.ravel(), [seconds]])
    curves.append((wall, np.concatenate([[0.0], np.cumsum(np.diff(wall) * (np.arange(len(wall) - 1) % 2 == 0))])))
  now, rounds = 0.0, 0
  while True:
    ends = []
    for wall, done in curves:
      wanted = float(np.interp(now, wall, done)) + barrier
      if wanted > done[-1]:  # the last round is cut off: what the slowest has done of it counts
        return rounds * barrier + min(float(d[-1] - np.interp(now, w, d)) for w, d in curves)
      at = int(np.searchsorted(done, wanted))  # the first change at which so much is done
      ends.append(float(wall[at] - (done[at] - wanted)))
    now, rounds = max(ends), rounds + 1


def _all_stalled(spans: list[np.ndarray], seconds: float) -> float:
  """Share of the time in which every learner stalls."""
  begins, ends = (np.concatenate([s[:, side] for s in spans]) for side in (0, 1))
  times = np.concatenate([begins, ends])
  steps = np.concatenate([np.ones(len(begins)), -np.ones(len(ends))])
  order = np.argsort(times, kind="stable")
  level = np.cumsum(steps[order])
  lasts = np.diff(np.append(times[order], seconds))
  return float(lasts[level >= len(spans)].sum() / seconds)


def closed_form(chips: int, model: ChipFailures, elastic: bool = True) -> float:
  """Goodput of one learner, from the formulas above (lifetimes exponential)."""
  rate = chips / model.mean_time
  if not elastic:
    return 1 / (1 + rate * model.restart)
  ups = 1 / (1 / rate + model.gather + model.scale_up)  # a second
  missing = model.away * model.slice_chips / model.mean_time
  return (1 - min(missing, 1.0)) * (1 - ups * model.scale_up) / (1 + rate * model.scale_down)
