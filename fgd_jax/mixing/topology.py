"""Gossip topologies as data: who averages with whom in round r, as permutations and as matrices.

A topology is a small *bank* of patterns and a rule that picks one of them each round: always the same, the
next one of a cycle, or a uniform draw keyed by (seed, round). A pattern is either the exact mean over all workers or
a weighted sum of permutations, so that each term is one message a worker:

    y_m = (1 - sum_k weight_k) x_m + sum_k weight_k x_{source_k[m]}

Closed forms of the contraction factors stand in tests/test_topology.py. The random matchings of FGD (arXiv 2606.22768)
are drawn from the circle-method bank, which has the second moment of a uniform random matching.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

RANDOM_GROUPS_POOL = 64  # partitions in the bank of random_groups where no balanced bank is known


class Pattern(NamedTuple):
  """One round's mixing. Either `mean` (all workers average) or terms of (weight, source [M]).

  A weight is a number, or one for each receiving worker (a tuple [M]). `keep`: of the mean, the share of its own value that
  a worker keeps besides.
  """

  terms: tuple[tuple[Any, Any], ...] = ()
  mean: bool = False
  keep: float = 0.0

  def matrix(self, workers: int, alive: Any = None, symmetric: bool = True, links: Any = None) -> np.ndarray:
    """The float64 [M, M] matrix W of y = W x, with dropped workers and links as `Mixer` treats them."""
    alive = np.ones(workers, bool) if alive is None else np.asarray(alive, bool)
    links = np.ones((workers, workers), bool) if links is None else np.asarray(links, bool)
    alive = alive & np.diagonal(links)
    if self.mean:
      both = np.outer(alive, alive)
      mean = np.where(both, both / max(alive.sum(), 1), np.eye(workers) * ~alive)
      return (1 - self.keep) * mean + self.keep * np.eye(workers)
    matrix = np.eye(workers)
    for weight, source in self.terms:
      source, rows = np.asarray(source), np.arange(workers)
      active = alive & alive[source] & links[rows, source]
      active = active if symmetric else np.full(workers, active.all())
      np.add.at(matrix, (rows, rows), -np.asarray(weight) * active)
      np.add.at(matrix, (rows, source), np.asarray(weight) * active)
    return matrix

  def weakened(self, strength: float) -> "Pattern":
    """The pattern whose matrix is (1 - strength) I + strength W."""
    if self.mean:
      return self._replace(keep=1 - strength * (1 - self.keep))
    scaled = lambda weight: tuple(strength * w for w in weight) if isinstance(weight, tuple) else strength * weight
    return self._replace(terms=tuple((scaled(weight), source) for weight, source in self.terms))

  def messages(self) -> int:
    """How many model-sized messages the busiest worker sends (0 for the mean, which is an all-reduce)."""
    moved = [np.asarray(source) != np.arange(len(source)) for _, source in self.terms]
    return int(np.sum(moved, axis=0).max()) if moved else 0


@dataclasses.dataclass(frozen=True)
class Topology:
  """A bank of patterns over `workers` workers and the rule that picks one in each round.

  Attributes:
    draw: "fixed" (bank of one), "cycle" (bank[r mod L]) or "random" (uniform, keyed by (seed, r)).
    striped: leaf stripes s use bank[(s + choice(r)) mod L], with as many stripes as patterns.
    symmetric: every matrix of the bank is symmetric, so that a single link can be dropped on both sides; otherwise
      a dropped worker cancels the whole permutation (a one-sided average would not preserve the mean).
  """

  name: str
  workers: int
  bank: tuple[Pattern, ...]
  draw: str = "fixed"
  seed: int = 0
  striped: bool = False

  @functools.cached_property
  def symmetric(self) -> bool:
    return all(np.allclose(w, w.T) for w in self.matrices)

  @property
  def identity(self) -> bool:
    """Whether nothing is ever exchanged."""
    return all(not p.mean and p.messages() == 0 for p in self.bank)

  def weakened(self, strength: float) -> "Topology":
    """The topology with matrices (1 - strength) I + strength W; with W = I - Lambda, these are I - strength Lambda."""
    return dataclasses.replace(self, bank=tuple(pattern.weakened(strength) for pattern in self.bank))

  @functools.cached_property
  def matrices(self) -> list[np.ndarray]:
    """The float64 [M, M] matrices of the bank."""
    return [pattern.matrix(self.workers) for pattern in self.bank]

  def choice(self, r: int) -> int:
    """Index into the bank for round r (for striped topologies: the offset of stripe 0). Pure in (seed, r)."""
    if self.draw == "cycle":
      return int(r) % len(self.bank)
    if self.draw == "random":
      state = np.random.SeedSequence([self.seed, int(r)]).generate_state(1, np.uint64)
      return int(state[0] % np.uint64(len(self.bank)))
    return 0

  def stripe_of(self, path: str) -> int:
    """The stripe to which the leaf with this path (keys joined by "/") belongs; 0 where there are no stripes."""
    return zlib.crc32(path.encode()) % len(self.bank) if self.striped else 0

  def matrix(self, r: int, stripe: int | None = None, alive: Sequence[bool] | None = None, links: Any = None) -> np.ndarray:
    """The float64 [M, M] mixing matrix of round r.

    Args:
      r: round, counted from 0.
      stripe: which stripe, for striped topologies (required there).
      alive: [M] bool; dropped workers keep their own value (default: all alive).
      links: [M, M] bool, symmetric: which pairs can exchange; the diagonal: who takes part at all (default: all).

    Raises:
      ValueError: a striped topology without `stripe`.
    """
    if self.striped and stripe is None:
      raise ValueError(f"{self.name} has a matrix for each stripe: pass stripe=0..{len(self.bank) - 1}.")
    pattern = self.bank[(self.choice(r) + (stripe or 0)) % len(self.bank)]
    return pattern.matrix(self.workers, alive, self.symmetric, links)

  def contraction(self, rounds: int = 1) -> float:
    """Expected contraction factor of the squared disagreement, lambda_max(E[(W-J)^T (W-J)]).

    Random topologies: over `rounds` independent draws. Cyclic ones: rounds=1 is the average over the cycle, rounds > 1
    the product of the first `rounds` matrices.
    """
    if rounds < 1:
      raise ValueError(f"contraction(rounds={rounds}): rounds must be at least 1.")
    mean = np.full((self.workers, self.workers), 1 / self.workers)
    if self.draw == "cycle" and rounds > 1:
      product = np.eye(self.workers)
      for r in range(rounds):
        product = self.matrices[self.choice(r)] @ product
      second = (product - mean).T @ (product - mean)
    else:
      second = np.eye(self.workers) - mean
      for _ in range(rounds):
        second = sum(w.T @ second @ w for w in self.matrices) / len(self.bank)
    return float(max(np.linalg.eigvalsh((second + second.T) / 2)[-1], 0.0))


def _shift(workers: int, by: int) -> tuple[int, ...]:
  return tuple((m + by) % workers for m in range(workers))


def _weighted(sources: Sequence[Sequence[int]], weight: float) -> Pattern:
  """Equal weights on several permutations; the same permutation twice is one message with the sum of the weights."""
  merged: dict[tuple[int, ...], float] = {}
  for source in sources:
    merged[tuple(source)] = merged.get(tuple(source), 0.0) + weight
  return Pattern(tuple((w, s) for s, w in merged.items()))


def _circle(workers: int) -> list[tuple[int, ...]]:
  """The circle method: M - 1 perfect matchings (odd M: M matchings with one idle worker), every pair exactly once."""
  even = workers + workers % 2
  bank = []
  for r in range(even - 1):
    order = [even - 1] + [(r + i) % (even - 1) for i in range(even - 1)]
    source = list(range(workers))
    pairs = [(order[0], order[1])] + [(order[1 + i], order[-i]) for i in range(1, even // 2)]
    for a, b in pairs:
      if a < workers and b < workers:
        source[a], source[b] = b, a
    bank.append(tuple(source))
  return bank


def _power(name: str, workers: int) -> int:
  if workers & (workers - 1):
    raise ValueError(f"{name} needs a number of workers that is a power of two, got workers={workers}; "
                     "use random_pairs, ring or exponential instead.")
  return workers.bit_length() - 1


def _groups(partition: Sequence[Sequence[int]], workers: int) -> Pattern:
  """Every group averages: k - 1 rotations inside the groups, each with weight 1 / k."""
  size = len(partition[0])
  sources = []
  for by in range(1, size):
    source = [0] * workers
    for group in partition:
      for i, m in enumerate(group):
        source[m] = group[(i + by) % size]
    sources.append(source)
  return _weighted(sources, 1 / size)


def _singer_partitions(bits: int, sub: int) -> list[list[list[int]]]:
  """At most 2^bits - 1 partitions of F_2^bits in cosets of a 2^sub subspace, each difference covered equally often.

  The powers of a full-period linear map carry one subspace around; they are transitive on the non-zero vectors, so all
  pairs meet equally often.
  """
  size = 1 << bits
  for taps in range(1, size, 2):
    step = lambda v, taps=taps: ((v << 1) & (size - 1)) ^ (taps if v >> (bits - 1) else 0)
    orbit = [1]
    while (v := step(orbit[-1])) != 1 and v and len(orbit) < size:
      orbit.append(v)
    if len(orbit) == size - 1:
      break
  basis = [1 << i for i in range(sub)]
  partitions = []
  for _ in range(size - 1):
    span = {0}
    for b in basis:
      span |= {s ^ b for s in span}
    left, partition = set(range(size)), []
    while left:
      coset = sorted(min(left) ^ s for s in span)
      partition.append(coset)
      left -= set(coset)
    if partition not in partitions:  # a short orbit repeats evenly, so leaving repeats out keeps the balance
      partitions.append(partition)
    basis = [step(b) for b in basis]
  return partitions


def _all_partitions(rest: list[int], size: int) -> list[list[list[int]]]:
  if not rest:
    return [[]]
  found = []
  for others in itertools.combinations(rest[1:], size - 1):
    group = [rest[0], *others]
    found += [[group, *tail] for tail in _all_partitions([m for m in rest if m not in group], size)]
  return found


def _random_groups(workers: int, size: int, seed: int) -> list[Pattern]:
  """The bank of random_groups.

  Balanced (every pair meets equally often, contraction (M-k)/(k(M-1)) exactly) for pairs, for powers of two and where
  all partitions are few enough to list; otherwise a pool of partitions drawn from `seed`, whose contraction
  `Topology.contraction` gives exactly.
  """
  count = math.factorial(workers) // (math.factorial(size) ** (workers // size) * math.factorial(workers // size))
  if size == 1:
    return [Pattern()]
  if size == workers:
    return [Pattern(mean=True)]
  if size == 2:
    return [_weighted([s], 0.5) for s in _circle(workers)]
  if not workers & (workers - 1):
    partitions = _singer_partitions(workers.bit_length() - 1, size.bit_length() - 1)
  elif count <= RANDOM_GROUPS_POOL:
    partitions = _all_partitions(list(range(workers)), size)
  else:
    rng = np.random.default_rng(seed)
    draws = (sorted(sorted(g) for g in rng.permutation(workers).reshape(-1, size).tolist()) for _ in itertools.count())
    partitions = []
    while len(partitions) < RANDOM_GROUPS_POOL:
      if (partition := next(draws)) not in partitions:
        partitions.append(partition)
  return [_groups(p, workers) for p in partitions]


def _identity(m: int, seed: int) -> tuple[list[Pattern], str]:
  return [Pattern()], "fixed"


def _global(m: int, seed: int) -> tuple[list[Pattern], str]:
  return [Pattern(mean=True)], "fixed"


def _random_pairs(m: int, seed: int) -> tuple[list[Pattern], str]:
  return [_weighted([s], 0.5) for s in _circle(m)], "random"


def _groups_topology(m: int, seed: int, group_size: int = 4) -> tuple[list[Pattern], str]:
  if not isinstance(group_size, int) or group_size < 1 or m % group_size:
    raise ValueError(f"random_groups: group_size={group_size!r} must divide workers={m}; choose a divisor.")
  return _random_groups(m, group_size, seed), "random"


def _ring(m: int, seed: int) -> tuple[list[Pattern], str]:
  return [_weighted([_shift(m, 1), _shift(m, -1)], 1 / 3)], "fixed"


def _lazy_ring(m: int, seed: int) -> tuple[list[Pattern], str]:
  return [_weighted([_shift(m, 1), _shift(m, -1)], 1 / 4)], "fixed"


def _torus(m: int, seed: int) -> tuple[list[Pattern], str]:
  a = next(a for a in range(math.isqrt(m), 0, -1) if m % a == 0)
  b = m // a
  if a < 3:
    raise ValueError(f"torus needs workers = a x b with both sides at least 3, got workers={m} = {a} x {b}; "
                     "use ring or exponential instead.")
  sources = [tuple((i + di) % a * b + (j + dj) % b for i in range(a) for j in range(b))
             for di, dj in ((1, 0), (-1, 0), (0, 1), (0, -1))]
  return [_weighted(sources, 1 / 5)], "fixed"


def _offsets(m: int) -> list[int]:
  return [1 << k for k in range((m - 1).bit_length())]


def _exponential(m: int, seed: int) -> tuple[list[Pattern], str]:
  offsets = _offsets(m)
  return [_weighted([_shift(m, by) for by in offsets], 1 / (len(offsets) + 1))], "fixed"


def _one_peer_exponential(m: int, seed: int) -> tuple[list[Pattern], str]:
  return [_weighted([_shift(m, by)], 0.5) for by in _offsets(m)], "cycle"


def _flips(name: str, m: int) -> list[tuple[int, ...]]:
  return [tuple(i ^ (1 << bit) for i in range(m)) for bit in range(_power(name, m))]


def _hypercube(m: int, seed: int) -> tuple[list[Pattern], str]:
  flips = _flips("hypercube", m)
  return [_weighted(flips, 1 / (len(flips) + 1))], "fixed"


def _one_peer_hypercube(m: int, seed: int) -> tuple[list[Pattern], str]:
  return [_weighted([s], 0.5) for s in _flips("one_peer_hypercube", m)], "cycle"


def _striped_hypercube(m: int, seed: int) -> tuple[list[Pattern], str]:
  return [_weighted([s], 0.5) for s in _flips("striped_hypercube", m)], "cycle"


def _two_random_pairs(m: int, seed: int, weight: float = 2 / 3) -> tuple[list[Pattern], str]:
  """Two different matchings at once, neighbours in the circle-method bank; edges of this weight in the Laplacian."""
  bank = _circle(m)
  if len(bank) < 2:
    raise ValueError(f"two_random_pairs needs at least 3 workers, got workers={m}; use random_pairs.")
  if not isinstance(weight, (int, float)) or not 0 < weight <= 1:
    raise ValueError(f"two_random_pairs: weight={weight!r} must be in (0, 1]; the matrix would have negative entries.")
  return [_weighted([bank[i], bank[(i + 1) % len(bank)]], weight / 2) for i in range(len(bank))], "random"


def _edges(m: int, seed: int, edges: Sequence[Sequence[Any]] = ()) -> tuple[list[Pattern], str]:
  """I - Lambda for the Laplacian Lambda = 1/2 sum weight (e_i - e_j)(e_i - e_j)^T of the edges (i, j, weight).

  Edges are coloured greedily, so that each term of the pattern is a matching with a weight for each pair.
  """
  matchings: list[dict[int, tuple[int, float]]] = []
  for edge in edges if isinstance(edges, (list, tuple)) else (edges,):
    ends = set(edge[:2]) if isinstance(edge, (list, tuple)) and len(edge) == 3 else set()
    if len(ends) < 2 or not all(isinstance(e, (int, np.integer)) and 0 <= e < m for e in ends) or not edge[2] > 0:
      raise ValueError(f"edges: {edge!r} must be (i, j, weight) with two different workers from 0 to {m - 1} and a "
                       "positive weight.")
    i, j, weight = edge
    free = next((k for k in matchings if i not in k and j not in k), None)
    if free is None:
      free = {}
      matchings.append(free)
    free[i], free[j] = (j, weight), (i, weight)
  if not matchings:
    raise ValueError("edges: give at least one edge (i, j, weight), as ('edges', {'edges': ((0, 1, 1.0), ...)}).")
  return [Pattern(tuple((tuple(pairs[n][1] / 2 if n in pairs else 0.0 for n in range(m)),
                         tuple(pairs[n][0] if n in pairs else n for n in range(m))) for pairs in matchings))], "fixed"


TOPOLOGIES: dict[str, Callable[..., tuple[list[Pattern], str]]] = {
    "identity": _identity, "global": _global, "random_pairs": _random_pairs, "random_groups": _groups_topology,
    "ring": _ring, "lazy_ring": _lazy_ring, "torus": _torus, "exponential": _exponential,
    "one_peer_exponential": _one_peer_exponential, "hypercube": _hypercube, "one_peer_hypercube": _one_peer_hypercube,
    "striped_hypercube": _striped_hypercube, "striped_pairs": _random_pairs, "two_random_pairs": _two_random_pairs,
    "edges": _edges,
}
_OPTIONS = {"random_groups": "group_size", "two_random_pairs": "weight", "edges": "edges"}


def make_topology(name: str, workers: int, seed: int = 0, **options: Any) -> Topology:
  """The topology called `name` over `workers` workers.

  Raises:
    ValueError: unknown name or option, or a number of workers that the topology cannot have; the sentence says which.
  """
  if name not in TOPOLOGIES:
    raise ValueError(f"Unknown topology {name!r}; choose one of {', '.join(TOPOLOGIES)}.")
  if workers < 1:
    raise ValueError(f"workers={workers}: at least one worker is needed.")
  if seed < 0:
    raise ValueError(f"seed={seed}: seeds of topologies are not negative.")
  if set(options) - {_OPTIONS.get(name)}:
    raise ValueError(f"Topology {name!r} has no option {sorted(options)}; "
                     + ", ".join(f"{known} takes {option}" for known, option in _OPTIONS.items()) + ".")
  bank, draw = TOPOLOGIES[name](workers, seed, **options) if workers > 1 else ([Pattern()], "fixed")
  return Topology(name, workers, tuple(bank), draw, seed, striped=name.startswith("striped_"))
