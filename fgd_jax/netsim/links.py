"""Bandwidths as people write them, the links of the workers, and what a collective costs on them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Hashable, Sequence

import numpy as np

BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
RATE = re.compile(r"^([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgt]?)(bit/s|bps|b/s|byte/s|)$", re.IGNORECASE)
KINDS = ("ring", "tree", "pairwise", "server", "allgather")


def parse_bandwidth(text: str) -> float:
  """Bits a second of "100Mbps", "1.5Gbit/s", "25GB/s" (bytes: a capital B) or a plain number of bits a second.

  Raises:
    ValueError: one sentence.
  """
  match = RATE.match(text.strip())
  try:
    value = float(match[1]) * BITS[match[2].lower()] if match else math.nan
  except ValueError:
    value = math.nan
  if not match or not 1e-3 <= value <= 1e21:
    raise ValueError(f"bandwidth={text!r} must be a positive rate such as 100Mbps, 1.5Gbit/s or 25GB/s, or the file of a "
                     "matrix of them.")
  return value * (8 if match[3] == "B/s" or match[3].lower() == "byte/s" else 1)


def write_bandwidth(bits: float) -> str:
  """The rate in the largest unit that leaves at least 1."""
  for unit, size in (("Tbps", 1e12), ("Gbps", 1e9), ("Mbps", 1e6), ("kbps", 1e3)):
    if bits >= size:
      return f"{bits / size:.4g}{unit}"
  return f"{bits:.4g}bps"


@dataclasses.dataclass(frozen=True)
class Cost:
  """What a mean over M workers costs, for a payload of S bytes.

  Attributes:
    sent: bytes that one worker sends, as a multiple of S (averaged over workers).
    path: bytes that pass the busiest worker's link one after the other, as a multiple of S.
    edge: the same for the busiest edge, where every pair of workers has a link of its own.
    hops: latencies one after the other.
  """

  sent: float
  path: float
  edge: float
  hops: int


def cost(kind: str, workers: int) -> Cost:
  """The cost of a mean over `workers` by this kind of collective; one worker sends nothing.

    ring        reduce-scatter and all-gather: 2 (M-1)/M S on every link, 2 (M-1) hops
    tree        a binary tree up and down, one message after the other: 2 log2 M S
    pairwise    recursive doubling: log2 M swaps of S
    server      all send S to one of equal bandwidth and get S back: 2 M S through its link
    allgather   every payload to everybody (what fgd_jax does with compressed payloads): (M-1) S
  """
  if kind not in KINDS:
    raise ValueError(f"transfer={kind!r} must be one of {', '.join(KINDS)}.")
  m = workers
  if m == 1:
    return Cost(0.0, 0.0, 0.0, 0)
  log = math.ceil(math.log2(m))
  ring = 2 * (m - 1) / m
  return {"ring": Cost(ring, ring, ring, 2 * (m - 1)), "tree": Cost(ring, 2.0 * log, 2.0 * log, 2 * log),
          "pairwise": Cost(log, log, log, log), "server": Cost(1.0, 2.0 * m, 2.0, 2),
          "allgather": Cost(m - 1, m - 1, 1.0, m - 1)}[kind]


@dataclasses.dataclass(frozen=True)
class Links:
  """The workers' connections: full-duplex links of each worker to a core that never limits, or one for each pair.

  Attributes:
    rates: bits a second: [M] for each worker's uplink and downlink, or [M, M] from worker (row) to worker (column).
    latency: seconds for each message.
  """

  rates: np.ndarray
  latency: float = 0.0

  def __post_init__(self):
    rates = np.asarray(self.rates, float)
    if rates.ndim == 2:
      off = rates[~np.eye(len(rates), dtype=bool)]
      if rates.shape[0] != rates.shape[1] or not (np.isfinite(off).all() and (off > 0).all()):
        raise ValueError("The bandwidth matrix must be square, with positive rates off its diagonal.")
    elif rates.ndim != 1 or not (np.isfinite(rates).all() and (rates > 0).all()):
      raise ValueError("Bandwidths must be positive and finite.")
    if not (math.isfinite(self.latency) and self.latency >= 0):
      raise ValueError(f"latency={self.latency} must be a number of seconds, at least 0.")

  @property
  def workers(self) -> int:
    return len(self.rates)

  @property
  def uniform(self) -> float | None:
    """The one rate in bits a second where all are equal."""
    rates = self.rates if self.rates.ndim == 1 else self.rates[~np.eye(len(self.rates), dtype=bool)]
    return float(rates[0]) if len(rates) and (rates == rates[0]).all() else None

  def capacity(self) -> dict[Hashable, float]:
    """Bytes a second of every link."""
    if self.rates.ndim == 1:
      return {(way, m): rate / 8 for m, rate in enumerate(self.rates) for way in ("up", "down")}
    return {(j, m): self.rates[j, m] / 8 for j, m in itertools.permutations(range(self.workers), 2)}

  def message(self, source: int, target: int) -> list[Hashable]:
    """The links of a message."""
    return [("up", source), ("down", target)] if self.rates.ndim == 1 else [(source, target)]

  def collective(self, kind: str, members: Sequence[int]) -> list[Hashable]:
    """The links of a mean over `members`; with a matrix, those of the edges that this kind uses."""
    members = list(members)
    if self.rates.ndim == 1:
      return [(way, m) for m in members for way in ("up", "down")]
    n, edges = len(members), set()
    for i in range(n):
      near = {"ring": [(i + 1) % n], "tree": [(i - 1) // 2] if i else [], "server": [0] if i else [],
              "pairwise": [i ^ (1 << k) for k in range(n.bit_length()) if i ^ (1 << k) < n],
              "allgather": [j for j in range(n) if j != i]}[kind]
      for j in near:
        edges |= {(i, j)} if kind == "ring" else {(i, j), (j, i)}
    return [(members[i], members[j]) for i, j in sorted(edges) if i != j]


def read_links(text: str, workers: int, latency: float = 0.0) -> Links:
  """Links from "100Mbps", one rate for each worker "1Gbps;100Mbps;...", or a file with M lines of M rates.

  Raises:
    ValueError: a rate that is none, or another number of rates than workers.
  """
  if os.path.isfile(text):
    try:
      with open(text, encoding="utf-8") as f:
        lines = [line.strip() for line in f.read(1 << 26).splitlines()]
    except UnicodeDecodeError as e:
      raise ValueError(f"bandwidth={text}: the file is no text.") from e
    rows = [re.split(r"[,;\s]+", line.strip(",;")) for line in lines if line and line[0] != "#"]
    if len(rows) != workers or any(len(row) != workers for row in rows):
      raise ValueError(f"bandwidth={text}: the file must hold {workers} lines of {workers} rates for {workers} workers.")
    rates = [[parse_bandwidth(word) if i != j else 1.0 for j, word in enumerate(row)] for i, row in enumerate(rows)]
    return Links(np.array(rates), latency)
  words = text.split(";")
  if len(words) not in (1, workers):
    raise ValueError(f"bandwidth={text!r} holds {len(words)} rates for {workers} workers; give one, or one for each.")
  return Links(np.array([parse_bandwidth(word) for word in words] * (workers if len(words) == 1 else 1)), latency)
