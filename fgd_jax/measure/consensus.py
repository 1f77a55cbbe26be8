"""How far the workers are apart in parameter space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def pairwise_squared_distance(stack: PyTree) -> jax.Array:
  """Mean squared distance over all pairs of different workers, ||x_a - x_b||^2 summed over all leaves.

  This is the "distance" of FGD's bound (arXiv 2606.22768), computed from the spread around
  the mean: 2 / (M - 1) sum_m ||x_m - mean||^2.

  Args:
    stack: pytree of [M, ...] arrays.

  Returns:
    Scalar (float32, float64 for float64 leaves); 0 for M = 1.
  """
  return sum((_leaf(x) for x in jax.tree.leaves(stack)), jnp.zeros(()))


def consensus_distances(w: PyTree, z: PyTree) -> dict[str, jax.Array]:
  """The mean squared distance of two workers at the end of the inner phase, w [M, ...], and after the outer step, z."""
  return {"consensus_inner": pairwise_squared_distance(w), "consensus_outer": pairwise_squared_distance(z)}


def by_block(stack: PyTree, block_of: Callable[[str], str], path_of: Callable[[Any], str]) -> dict[str, jax.Array]:
  """`pairwise_squared_distance` for each block of parameters.

  Args:
    stack: pytree of [M, ...] arrays.
    block_of: path of a leaf (keys joined by "/") -> name of its block.
    path_of: jax key path -> path.
  """
  blocks: dict[str, jax.Array] = {}
  for path, x in jax.tree_util.tree_flatten_with_path(stack)[0]:
    name = block_of(path_of(path))
    blocks[name] = blocks.get(name, jnp.zeros(())) + _leaf(x)
  return blocks


def _leaf(x: jax.Array) -> jax.Array:
  workers = x.shape[0]
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  x = x - x[:1]  # exactly 0 for equal workers, whatever the mean rounds to
  return 2 / max(workers - 1, 1) * jnp.sum(jnp.square(x - jnp.mean(x, axis=0)))
