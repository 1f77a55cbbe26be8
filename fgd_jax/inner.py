"""The gradient of one inner step, from one batch or from several micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any


def gradient(loss_fn: Callable, w: PyTree, batch: PyTree, rng: jax.Array, accumulate: int) -> tuple[Any, Any, PyTree]:
  """Loss, aux and gradient at w; with `accumulate` above 1 the means over that many micro-batches.

  Args:
    loss_fn: (params, batch, rng) -> scalar, or (scalar, aux).
    w: parameters. batch: leaves [B, ...]. rng: a key; micro-batch i gets fold_in(rng, i).
    accumulate: divides B.

  Raises:
    ValueError: loss_fn returns something else.
  """
  def loss_and_aux(w, batch, rng):
    out = loss_fn(w, batch, rng)
    loss, aux = out if isinstance(out, (tuple, list)) and len(out) == 2 else (out, None)
    if not isinstance(loss, jax.Array) or loss.shape:
      shape = f"an array of shape {loss.shape}" if isinstance(loss, jax.Array) else repr(type(loss).__name__)
      raise ValueError(f"loss_fn returned {shape}; it must return a scalar or (scalar, aux).")
    return loss, aux

  both = jax.value_and_grad(loss_and_aux, has_aux=True)
  if accumulate == 1:
    (loss, aux), grads = both(w, batch, rng)
    return loss, aux, grads
  micro = jax.tree.map(lambda x: x.reshape(accumulate, x.shape[0] // accumulate, *x.shape[1:]), batch)
  one = lambda i: both(w, jax.tree.map(lambda x: x[i], micro), jax.random.fold_in(rng, i))
  shapes = jax.eval_shape(one, jnp.int32(0))

  def add(total, i):
    return jax.tree.map(jnp.add, total, one(i)), None

  total, _ = lax.scan(add, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
                      jnp.arange(accumulate, dtype=jnp.int32))
  (loss, aux), grads = jax.tree.map(lambda x: x / accumulate, total)
  return loss, aux, grads
