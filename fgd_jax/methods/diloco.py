"""DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import optax

from fgd_jax.methods.base import Method, outer_gradient, outer_optimizer, outer_step


@dataclasses.dataclass(frozen=True)
class DiLoCo(Method):
  """One blocking all-reduce of the outer gradients a round.

      w_m     = H inner steps from theta
      Delta   = mean_m (theta - w_m)
      theta'  = outer step from theta with Delta        (Nesterov: lr 0.7, momentum 0.9)

  Args:
    outer_lr, outer_momentum, nesterov: of the outer optimizer; lr may be an optax schedule over rounds.
    outer: any optax transform instead.
  """

  outer_lr: Any = None
  outer_momentum: float | None = None
  nesterov: bool = True
  outer: Any = None
  mix2: Any = "global"
  mixers: ClassVar[tuple[str, ...]] = ("mix2",)

  def __post_init__(self):
    self.optimizer  # bad values are refused here, not in the first round

  @functools.cached_property
  def optimizer(self) -> optax.GradientTransformation:
    return outer_optimizer(self.outer, self.outer_lr, self.outer_momentum, self.nesterov)

  def init(self, z):
    return self.optimizer.init(z)

  def land(self, z, w, x, ms, ctx):
    delta = self.mix2(outer_gradient(z, w, ctx), ctx)
    return outer_step(self.optimizer, delta, ms, start=z)
