"""Outer optimizers: any optax transform; the field's default is SGD with Nesterov momentum."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def nesterov(outer_lr: optax.ScalarOrSchedule, outer_momentum: float = 0.9, nesterov: bool = True
             ) -> optax.GradientTransformation:
  """DiLoCo's outer optimizer: buf' = mu buf + g; theta' = theta - lr (g + mu buf')  (arXiv 2311.08105, PyTorch form).

  Args:
    outer_lr: outer learning rate, or an optax schedule over rounds.
    outer_momentum: mu in [0, 1); 0 is plain SGD.
    nesterov: False gives heavy-ball momentum, theta' = theta - lr buf'.

  Raises:
    ValueError: a momentum outside [0, 1) or a learning rate that is not positive.
  """
  number = lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool)
  if not (number(outer_momentum) and 0 <= outer_momentum < 1):
    raise ValueError(f"outer_momentum={outer_momentum!r} must be a number in [0, 1).")
  if not callable(outer_lr) and not (number(outer_lr) and 0 < outer_lr < float("inf")):
    raise ValueError(f"outer_lr={outer_lr!r} must be a positive number or an optax schedule over rounds.")
  return optax.sgd(outer_lr, momentum=outer_momentum or None, nesterov=nesterov and outer_momentum > 0)


class DelayedNesterovState(NamedTuple):
  """Attributes:
    arrived: arrivals so far. total: of the outer gradients since the momentum was last renewed. momentum: as it was then.
  """

  arrived: jax.Array
  total: Any
  momentum: Any


def delayed_nesterov(outer_lr: float, outer_momentum: float = 0.9, arrivals: int = 1, share: float = 0.0
                     ) -> optax.GradientTransformation:
  """Delayed Nesterov for outer gradients that arrive one by one (Liu et al., arXiv 2401.09135).

      total += g
      every N-th arrival:  m <- mu m + total/N;  theta <- theta - lr ((1 - c N + c) mu m + g/N);  total <- 0
      all others:          theta <- theta - lr (c mu m + g/N)

  Args:
    outer_lr, outer_momentum: lr and mu.
    arrivals: N, the number of workers; 1 is SGD with Nesterov momentum.
    share: c in [0, 1/N], how much of the momentum every arrival applies.

  Raises:
    ValueError: N below 1, or c outside its range.
  """
  nesterov(outer_lr, outer_momentum)  # refuses the same values
  if not isinstance(arrivals, int) or arrivals < 1:
    raise ValueError(f"arrivals={arrivals!r} must be a number of workers, at least 1.")
  if not 0 <= share <= 1 / arrivals:
    raise ValueError(f"share={share!r} must be a number from 0 to 1/arrivals = {1 / arrivals:g}.")

  def init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return DelayedNesterovState(jnp.zeros((), jnp.int32), zeros, zeros)

  def update(grads, state, params=None):
    del params
    renews = (state.arrived + 1) % arrivals == 0
    total = jax.tree.map(jnp.add, state.total, grads)
    momentum = jax.tree.map(lambda m, s: jnp.where(renews, outer_momentum * m + s / arrivals, m), state.momentum, total)
    factor = jnp.where(renews, 1 - share * arrivals + share, share) * outer_momentum
    updates = jax.tree.map(lambda m, g: (-outer_lr * (factor * m + g / arrivals)).astype(g.dtype), momentum, grads)
    total = jax.tree.map(lambda s: jnp.where(renews, 0, s), total)
    return updates, DelayedNesterovState(state.arrived + 1, total, momentum)

  return optax.GradientTransformation(init, update)
