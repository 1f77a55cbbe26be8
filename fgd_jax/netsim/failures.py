"""What goes wrong: exchanges that fail, workers that crash and come back or pause, inner steps of uneven length."""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import NamedTuple

import numpy as np

UNITS = ("link", "message", "round")
LEAST_SHAPE, MOST_SHAPE = 0.1, 100.0  # of Weibull distributions; below, most gaps are shorter than a clock shows
LEAST_JITTER, MOST_JITTER = 1e-6, 10.0
MOST_SECONDS = 1e9  # of anything that takes time: some thirty years


def stream(*words: int | str) -> np.random.Generator:
  """Random numbers that depend on `words` alone, not on the order in which things happen."""
  return np.random.default_rng([zlib.crc32(w.encode()) if isinstance(w, str) else int(w) for w in words])


@dataclasses.dataclass(frozen=True)
class Drops:
  """Exchanges that fail (methods-core.md, 4.7: the FGD paper's 5 % leaves open of what, and what a restart costs).

  Attributes:
    probability: p.
    unit: "message": every attempt of an exchange fails with p, be it a collective or the swap of a pair;
      "link": every worker's link fails with p, so that an exchange of n workers fails with 1 - (1-p)^n, a swap with n = 2;
      "round": with p a round is bad, and in it the first attempt of every exchange fails.
    at: when a failure is noticed: "end", after the whole transfer, or "uniform", at any point of it.
    late_mix1: "skip": an overlapped mean of which an attempt failed is given up if it is not there when it is due;
      "wait": it is waited for.
  """

  probability: float = 0.0
  unit: str = "message"
  at: str = "end"
  late_mix1: str = "skip"

  def __post_init__(self):
    if not 0 <= self.probability < 1:
      raise ValueError(f"drop={self.probability!r} must be a probability, at least 0 and below 1.")
    for key, value, known in (("drop_unit", self.unit, UNITS), ("drop_at", self.at, ("end", "uniform")),
                              ("late_mix1", self.late_mix1, ("skip", "wait"))):
      if value not in known:
        raise ValueError(f"{key}={value!r} must be one of {', '.join(known)}.")

  def of(self, members: int) -> float:
    """Probability that one attempt of an exchange of `members` workers fails (unit "round": that of a first attempt)."""
    return 1 - (1 - self.probability) ** members if self.unit == "link" else self.probability

  def attempts(self, seed: int, name: str, r: int, members: tuple[int, ...]) -> "Attempts":
    """The fate of an exchange in round r; it depends on the arguments alone."""
    if not self.probability:
      return Attempts(None, 0.0, "end", False)
    if self.unit == "round":
      bad = bool(stream(seed, 1, r).random() < self.probability)
      return Attempts(stream(seed, 2, name, r, *members), 0.0, self.at, bad)
    return Attempts(stream(seed, 2, name, r, *members), self.of(len(members)), self.at, False)


@dataclasses.dataclass
class Attempts:
  """Draws whether attempts fail, one after the other."""

  rng: np.random.Generator | None
  probability: float
  at: str
  first_fails: bool

  def next(self) -> float | None:
    """None: this attempt succeeds; otherwise the share of the transfer after which it fails."""
    if self.rng is None:
      return None
    fails = self.rng.random() < self.probability or self.first_fails
    self.first_fails = False
    return (1.0 if self.at == "end" else float(self.rng.uniform())) if fails else None


@dataclasses.dataclass(frozen=True)
class Interruptions:
  """Crashes or pauses of a worker while it computes.

  Attributes:
    every: mean seconds of computing between two of them (0: never).
    seconds: mean time until the worker is back.
    shape: of the Weibull distribution of the time between them (1: exponential, a Poisson process).
    fixed: `seconds` is always the same; otherwise exponential.
  """

  every: float = 0.0
  seconds: float = 0.0
  shape: float = 1.0
  fixed: bool = True

  def __post_init__(self):
    if not (0 <= self.every <= MOST_SECONDS and 0 <= self.seconds <= MOST_SECONDS
            and LEAST_SHAPE <= self.shape <= MOST_SHAPE):
      raise ValueError(f"Interruptions every {self.every:g} s for {self.seconds:g} s with Weibull shape {self.shape:g}: "
                       f"times must be from 0 to {MOST_SECONDS:g} s, the shape from {LEAST_SHAPE:g} to {MOST_SHAPE:g}.")

  def gap(self, rng: np.random.Generator) -> float:
    """Seconds of computing until the next one."""
    if not self.every:
      return math.inf
    return float(self.every / math.gamma(1 + 1 / self.shape) * rng.weibull(self.shape))

  def free_of(self, seconds: float) -> float:
    """Probability that a gap is longer than `seconds`."""
    return math.exp(-((seconds / self.every * math.gamma(1 + 1 / self.shape)) ** self.shape)) if self.every else 1.0

  def length(self, rng: np.random.Generator) -> float:
    return self.seconds if self.fixed else float(rng.exponential(self.seconds))


class StepTimes(NamedTuple):
  """Seconds of an inner step.

  Attributes:
    seconds: mean of each worker, one or [M].
    jitter: 0, or the coefficient of variation.
    kind: of the distribution around the mean: "lognormal", "gamma" or "uniform".
  """

  seconds: tuple[float, ...]
  jitter: float = 0.0
  kind: str = "lognormal"

  def mean(self, worker: int) -> float:
    return self.seconds[worker % len(self.seconds)]

  def draw(self, seed: int, worker: int, r: int, steps: int) -> np.ndarray:
    """Seconds of the steps [H] of a worker's round r."""
    mean, cv = self.mean(worker), self.jitter
    if not cv:
      return np.full(steps, mean)
    rng = stream(seed, 3, worker, r)
    if self.kind == "lognormal":
      sigma2 = math.log1p(cv**2)
      return mean * rng.lognormal(-sigma2 / 2, math.sqrt(sigma2), steps)
    if self.kind == "gamma":
      return mean * rng.gamma(1 / cv**2, cv**2, steps)
    half = cv * math.sqrt(3)
    return mean * rng.uniform(max(1 - half, 0), 1 + half, steps)


def parse_step_times(text: str, jitter: str = "0") -> StepTimes:
  """From "2.35" or "2.35;2.35;4.7" and a jitter "0.2", "gamma:0.2", "uniform:0.1".

  Raises:
    ValueError: one sentence.
  """
  try:
    seconds = tuple(float(word) for word in text.split(";"))
  except ValueError:
    seconds = ()
  if not seconds or not all(1e-9 <= s <= MOST_SECONDS for s in seconds):
    raise ValueError(f"step_seconds={text!r} must be a positive number of seconds, or one for each worker (a;b;c).")
  kind, _, value = jitter.rpartition(":")
  try:
    cv = float(value)
  except ValueError:
    cv = math.nan
  if (kind or "lognormal") not in ("lognormal", "gamma", "uniform") or not (cv == 0 or LEAST_JITTER <= cv
                                                                                <= MOST_JITTER):
    raise ValueError(f"jitter={jitter!r} must be 0 or a coefficient of variation from {LEAST_JITTER:g} to {MOST_JITTER:g}, "
                     "or lognormal:, gamma: or uniform: and one.")
  if kind == "uniform" and cv > 1 / math.sqrt(3):
    raise ValueError(f"jitter={jitter!r}: a uniform step time cannot vary by more than 0.577 of its mean.")
  return StepTimes(seconds, cv, kind or "lognormal")
