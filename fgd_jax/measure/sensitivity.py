"""Which blocks of the parameters make workers predict differently: the JS distance that is left when blocks are shared.

FGD (arXiv 2606.22768) finds the subset of its Mix2 by JS distance; how is not known (SUM), both ways here are ours (INF).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fgd_jax.measure.js import js_distance, pairwise_js

PyTree = Any
WAYS = ("average", "copy")


def js_when_shared(apply: Callable, stack: PyTree, tokens_NxBxL: Any, labels: PyTree, by: str = "average"
                   ) -> Callable[[Any], float]:
  """The mean JS distance of two workers once the chosen blocks are alike, as a function of the choice.

  Args:
    apply: (params, tokens [B, L]) -> logits [B, L, V].
    stack: pytree of [M, ...] parameters, M at least 2.
    tokens_NxBxL: N batches, of which one at a time is in memory.
    labels: the same pytree of int32 arrays that broadcast against one worker's leaves: the number of the block that an
      entry belongs to (a scalar for a whole leaf, [layers, 1, ...] where layers are stacked).
    by: "average": the chosen blocks of all workers are their mean, and all pairs are compared. "copy": worker a gets those
      of worker b and is compared with b, for all a != b.

  Returns:
    f(chosen bool [blocks]) -> distance in [0, 1]; one compilation serves every choice.

  Raises:
    ValueError: one worker, or an unknown `by`.
  """
  workers = jax.tree.leaves(stack)[0].shape[0]
  if workers < 2:
    raise ValueError("There is one worker, and nobody to disagree with; sensitivity needs two or more.")
  if by not in WAYS:
    raise ValueError(f"by={by!r} must be one of {', '.join(WAYS)}.")
  distance = {"average": _averaged, "copy": _copied}[by]

  @jax.jit
  def run(stack, tokens, labels, chosen):
    shared = jax.tree.map(lambda label: chosen[label], labels)
    return jnp.mean(distance(apply, stack, tokens, shared))

  tokens, labels = jnp.asarray(tokens_NxBxL), jax.tree.map(jnp.asarray, labels)
  return lambda chosen: float(run(stack, tokens, labels, jnp.asarray(chosen, bool)))


def _averaged(apply: Callable, stack: PyTree, tokens: jax.Array, shared: PyTree) -> jax.Array:
  """[N] distances."""
  mean = lambda x: jnp.mean(x, axis=0, dtype=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)
  alike = jax.tree.map(lambda x, s: jnp.where(s, mean(x), x), stack, shared)
  return jax.lax.map(lambda t: pairwise_js(jax.vmap(apply, (0, None))(alike, t))["js_distance"], tokens)


def _copied(apply: Callable, stack: PyTree, tokens: jax.Array, shared: PyTree) -> jax.Array:
  """[N] distances."""
  workers = jax.tree.leaves(stack)[0].shape[0]
  pairs = jnp.asarray(np.argwhere(~np.eye(workers, dtype=bool)))

  def batch(t):
    logits = jax.vmap(apply, (0, None))(stack, t)

    def pair(ab):
      params = jax.tree.map(lambda x, s: jnp.where(s, x[ab[1]], x[ab[0]]), stack, shared)
      return js_distance(apply(params, t), logits[ab[1]])

    return jnp.mean(jax.lax.map(pair, pairs))

  return jax.lax.map(batch, tokens)


def ranked(drops: Sequence[float], sizes: Sequence[float]) -> list[int]:
  """Numbers of the blocks, the greatest drop per byte first.

  Args:
    drops: of the JS distance, by block. sizes: bytes, positive.
  """
  return sorted(range(len(drops)), key=lambda i: -drops[i] / sizes[i])


def within_budget(drops: Sequence[float], sizes: Sequence[float], budget: float) -> list[int]:
  """Numbers of the blocks, ascending, that the greedy choice takes: by drop per byte, each that lowers JS and still fits.

  A small block may just keep a large one out, so the choice is repeated without each block in turn, and that with the
  greatest sum of drops counts.
  """
  order = [i for i in ranked(drops, sizes) if drops[i] > 0]
  choices = [_fitting(order, sizes, budget), *(_fitting([i for i in order if i != out], sizes, budget) for out in order)]
  return sorted(max(choices, key=lambda taken: sum(drops[i] for i in taken)))


def _fitting(order: Sequence[int], sizes: Sequence[float], budget: float) -> list[int]:
  taken: list[int] = []
  for i in order:
    if sum(sizes[j] for j in taken) + sizes[i] <= budget:
      taken.append(i)
  return taken
