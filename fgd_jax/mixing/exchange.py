"""Sums and permutations over workers, wherever the workers live.

The M workers sit on `devices` positions of the mesh axis `worker`, K = M / devices of them in each slot; worker m is
number m mod K on position m // K. Everything here acts on a slot's local *stack*, arrays [K, ...]. With one position
(a laptop, Colab) the stack holds all workers and nothing is sent.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

WORKER_AXIS = "worker"


class Placement(NamedTuple):
  """M workers on `devices` positions of the mesh axis `worker` (1: all on one, without collectives).

  `slices`: the slice of each position, where there are several positions in each of several slices.
  """

  workers: int
  devices: int = 1
  slices: tuple[int, ...] | None = None

  @property
  def slots(self) -> int:
    return self.workers // self.devices


def sum_over_workers(stack: jax.Array, placement: Placement) -> jax.Array:
  """[K, ...] -> [...]: the sum over all M workers, equal on every position."""
  local = jnp.sum(stack, axis=0, dtype=stack.dtype)
  return lax.psum(local, WORKER_AXIS) if placement.devices > 1 else local


def gather_workers(stack: jax.Array, placement: Placement) -> jax.Array:
  """[K, ...] -> [M, ...]: what all workers have, on every position."""
  return lax.all_gather(stack, WORKER_AXIS, tiled=True) if placement.devices > 1 else stack


class _Move(NamedTuple):
  """One permutation of device positions: position i sends its slot send[i] and stores what comes at recv[i]."""

  pairs: tuple[tuple[int, int], ...]
  send: tuple[int, ...]
  recv: tuple[int, ...]


@functools.cache
def colour(source: tuple[int, ...], devices: int) -> tuple[_Move, ...]:
  """Splits a permutation of M workers in K permutations of the device positions (Koenig's edge colouring).

  The bipartite multigraph (sending position, receiving position) is K-regular, so it is the union of K perfect
  matchings; each is one ppermute.
  """
  slots = len(source) // devices
  edges = [(s // slots, d // slots, s % slots, d % slots) for d, s in enumerate(source)]
  moves = []
  for _ in range(slots):
    matched: dict[int, tuple[int, int, int, int]] = {}  # receiving position -> edge

    def augment(position: int, seen: set[int]) -> bool:
      for edge in edges:
        if edge[0] != position or edge[1] in seen:
          continue
        seen.add(edge[1])
        if edge[1] not in matched or augment(matched[edge[1]][0], seen):
          matched[edge[1]] = edge
          return True
      return False

    for position in range(devices):
      if not augment(position, set()):
        raise ValueError(f"{source} is not a permutation of the workers.")
    send, recv = [0] * devices, [0] * devices
    for s, d, i, j in matched.values():
      send[s], recv[d] = i, j
      edges.remove((s, d, i, j))
    moves.append(_Move(tuple((s, d) for s, d, _, _ in matched.values()), tuple(send), tuple(recv)))
  return tuple(moves)


@functools.cache
def uniform(pairs: tuple[tuple[int, int], ...], slices: tuple[int, ...] | None
            ) -> tuple[tuple[tuple[tuple[int, int], ...], tuple[int, ...]], ...]:
  """Splits a permutation of positions in parts that every slice runs alike: (pairs, positions that keep the result).

  Where the pairs inside one slice differ from those inside another, XLA runs them in a conditional on the slice, which
  ends before the inner steps. Each such pattern becomes a permutation of its own that all slices run; pairs between
  slices are another.
  """
  if slices is None:
    return ((pairs, tuple(d for _, d in pairs)),)
  start = {s: slices.index(s) for s in slices}
  patterns: dict[tuple[tuple[int, int], ...], list[int]] = {}
  for s, first in start.items():
    inside = tuple(sorted((a - first, b - first) for a, b in pairs if slices[a] == slices[b] == s))
    patterns.setdefault(inside, []).append(s)
  between = tuple((a, b) for a, b in pairs if slices[a] != slices[b])
  if len(patterns) == 1:
    return ((pairs, tuple(d for _, d in pairs)),)
  parts = [(between, tuple(d for _, d in between))] if between else []
  for pattern, where in patterns.items():
    if pattern:
      everywhere = tuple((first + a, first + b) for first in start.values() for a, b in pattern)
      parts.append((everywhere, tuple(start[s] + b for s in where for _, b in pattern)))
  return tuple(parts)


def permute_start(stack: jax.Array, source: Any, placement: Placement, ids: jax.Array) -> Any:
  """The collectives of "worker m receives from worker source[m]", and nothing else.

  Args:
    stack: [K, ...] local values.
    source: [M]; a tuple of ints where something is sent, anything indexable on one position.
    placement: where the workers live.
    ids: int32 [K] numbers of the local workers.

  Returns:
    What was received, for `permute_finish`.
  """
  if placement.devices == 1:
    return stack[jnp.asarray(source)]
  position = ids[0] // placement.slots
  received = []
  for move in colour(tuple(int(s) for s in source), placement.devices):
    if placement.slots == 1:
      block = stack[0]
    else:
      block = lax.dynamic_index_in_dim(stack, jnp.asarray(move.send)[position], 0, keepdims=False)
    received.append([lax.ppermute(block, WORKER_AXIS, pairs) if any(s != d for s, d in pairs) else block
                     for pairs, _ in uniform(move.pairs, placement.slices)])
  return received


def permute_finish(received: Any, source: Any, placement: Placement, ids: jax.Array) -> jax.Array:
  """Assembles what `permute_start` received into a stack [K, ...]."""
  if placement.devices == 1:
    return received
  position = ids[0] // placement.slots
  moves = colour(tuple(int(s) for s in source), placement.devices)
  blocks = []
  for move, (block, *others) in zip(moves, received):
    for (_, keep), other in zip(uniform(move.pairs, placement.slices)[1:], others):
      block = jnp.where(jnp.isin(position, jnp.asarray(keep)), other, block)
    blocks.append(block)
  if placement.slots == 1:
    return blocks[0][None]
  stack = jnp.zeros((placement.slots, *blocks[0].shape), blocks[0].dtype)
  for move, block in zip(moves, blocks):
    stack = lax.dynamic_update_index_in_dim(stack, block, jnp.asarray(move.recv)[position], 0)
  return stack
