"""Outer optimizers: any optax transform; the field's default is SGD with Nesterov momentum."""

from __future__ import annotations

import numbers

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
