"""Rows of stacks: pytrees with leaves [n, ...], one row a worker."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def rows(values: jax.Array, like: jax.Array) -> jax.Array:
  """[n] -> [n, 1, ...], ready to broadcast against a stack shaped as `like`."""
  return values.reshape((-1,) + (1,) * (like.ndim - 1))


def where_rows(mask: jax.Array, new: PyTree, old: Any) -> PyTree:
  """Rows of `new` where the mask (bool [n]) says so; elsewhere those of `old`, a tree like it or one number."""
  if isinstance(old, (int, float)):
    return jax.tree.map(lambda n: jnp.where(rows(mask, n), n, old), new)
  return jax.tree.map(lambda n, o: jnp.where(rows(mask, n), n, o), new, old)


def finite_rows(stack: PyTree) -> jax.Array:
  """Leaves [n, ...] -> bool [n]: in which rows all floating-point numbers are finite."""
  finite = [jnp.isfinite(x).reshape(x.shape[0], -1).all(axis=1) for x in jax.tree.leaves(stack)
            if jnp.issubdtype(x.dtype, jnp.inexact)]
  return jnp.stack(finite).all(axis=0)


def one_row(tree: PyTree) -> PyTree:
  """A stack of one row, so that what differs from position to position can leave a program."""
  return jax.tree.map(lambda x: x[None], tree)


def only_row(stack: PyTree) -> PyTree:
  """The tree in a stack of one row."""
  return jax.tree.map(lambda x: x[0], stack)
