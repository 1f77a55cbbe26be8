"""The inner phase of one worker: optax steps in a scan, each from one batch or from several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fgd_jax.methods import Method
from fgd_jax.mixing import Context
from fgd_jax.mixing.stacks import finite_rows

PyTree = Any


class Inner(NamedTuple):
  """How every worker trains between exchanges; the arguments of `build_round`.

  Attributes:
    loss_fn, optimizer, accumulate, seed: see there.
    method: bound; its `inner_grad`, its `inner_steps`, and what its Mix1 carries step by step.
    quarantine: where gradients are averaged in every step, those of a worker with a number that is not finite are left out.
  """

  loss_fn: Callable
  optimizer: optax.GradientTransformation
  accumulate: int
  seed: int
  method: Method
  quarantine: bool = False

  def phase(self, w: PyTree, opt_state: PyTree, batches_Sx: PyTree, worker: jax.Array, riding: Any, ctx: Context,
            first: Any, steps: int, loop: bool = False) -> tuple[PyTree, PyTree, jax.Array, Any, Any]:
    """S consecutive inner steps of one worker.

    Args:
      w, opt_state: its parameters and inner optimizer state.
      batches_Sx: leaves [S, ...].
      worker: int32 scalar.
      riding: what of Mix1 travels step by step (the ring form), or None.
      ctx: the round's context.
      first: number of the first of these steps in its round of `steps`.
      loop: a single step is a loop too, whose length XLA does not know: where it writes the step out, a transfer that should
        run beside it drifts behind it.

    Returns:
      w, opt_state, loss [S], aux [S, ...], riding.
    """
    method, ctx = self.method, ctx._replace(worker=worker)
    key = jax.random.fold_in(jax.random.key(self.seed), worker)

    def step(carry, xs):
      w, opt_state, riding = carry
      h, batch = xs
      rng = jax.random.fold_in(key, ctx.round * steps + first + h)
      loss, aux, grads = gradient(self.loss_fn, w, batch, rng, self.accumulate)
      if method.inner_grad is not None:
        healthy = None
        if self.quarantine:
          healthy = finite_rows(jax.tree.map(lambda x: x[None], (loss, grads)))[0]
          grads = jax.tree.map(lambda g: jnp.where(healthy, g, 0), grads)
        grads = method.inner_grad(grads, ctx._replace(event=first + h, healthy=healthy))
      updates, new_state = self.optimizer.update(grads, opt_state, w)
      new = optax.apply_updates(w, updates)
      if method.inner_steps is not None:
        active = first + h < jnp.asarray(_limits(method.inner_steps, ctx.workers, steps))[worker]
        new, new_state = jax.tree.map(lambda a, b: jnp.where(active, a, b), (new, new_state), (w, opt_state))
      if riding is not None:
        riding = method.overlapped.during(riding, h, ctx)  # type: ignore[union-attr]
      return (new, new_state, riding), (loss, aux)

    count = jax.tree.leaves(batches_Sx)[0].shape[0]
    with jax.named_scope("inner"):
      if loop and count == 1:
        (w, opt_state, riding), out = _once(step, (w, opt_state, riding), jax.tree.map(lambda x: x[0], batches_Sx),
                                            ctx.round)
        return w, opt_state, *jax.tree.map(lambda x: x[None], out), riding
      (w, opt_state, riding), (loss, aux) = lax.scan(step, (w, opt_state, riding),
                                                     (jnp.arange(count, dtype=jnp.int32), batches_Sx))
    return w, opt_state, loss, aux, riding


def _once(step: Callable, carry: Any, batch: PyTree, r: jax.Array) -> tuple[Any, Any]:
  """step(carry, (0, batch)) in a loop of length min(1, r + 1), which is 1 in every round."""
  run = lambda carry: step(carry, (jnp.int32(0), batch))
  nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, carry)[1])
  _, carry, out = lax.while_loop(lambda c: c[0] < jnp.minimum(1, r + 1), lambda c: (c[0] + 1, *run(c[1])), (0, carry,
                                                                                                            nothing))
  return carry, out


def _limits(inner_steps: Sequence[int], workers: int, steps: int) -> np.ndarray:
  """int32 [M]: how many of a round's steps each worker takes."""
  limits = np.asarray(inner_steps, np.int32)
  if limits.shape != (workers,) or limits.min() < 0 or limits.max() > steps:
    raise ValueError(f"inner_steps={list(inner_steps)} must hold a number of steps from 0 to H={steps} for each of the "
                     f"{workers} workers.")
  return limits


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
