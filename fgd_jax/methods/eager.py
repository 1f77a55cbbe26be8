"""Eager DiLoCo: fresh own outer gradient, everybody else's from earlier rounds (arXiv 2502.12996).

Evidence: tables from the paper's text, the update rule from reading notes (SUM); the first rounds' rule is ours (INF).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fgd_jax.methods.base import Outer, outer_gradient, outer_step, unsent


@dataclasses.dataclass(frozen=True)
class EagerDiLoCo(Outer):
  """The mean of outer gradients `delay` rounds old travels beside the inner steps; in it, the own one is replaced.

      Dtilde_m = mean_j Delta_j^(r-delay) + (Delta_m^(r) - Delta_m^(r-delay)) / M
      theta_m  = outer step from theta_m with Dtilde_m          (parameters and momentum are the worker's own)

  In the first `delay` rounds the missing outer gradients count as zero: Dtilde_m = Delta_m / M.

  Args:
    delay: rounds that a mean may take, at least 1; that many outer gradients are kept.
    others: see `Outer`. The paper's outer learning rate is 0.4, at 2 workers (configs/eager_diloco.py).
  """

  delay: int = 1
  mix1: Any = "global"
  mixers: ClassVar[tuple[str, ...]] = ("mix1",)

  def __post_init__(self):
    super().__post_init__()
    if not isinstance(self.delay, int) or isinstance(self.delay, bool) or self.delay < 1:
      raise ValueError(f"delay={self.delay!r} must be a number of rounds, at least 1.")

  def init(self, z):
    zeros = jax.tree.map(jnp.zeros_like, z)
    return {"outer": self.optimizer.init(z), "earlier": (zeros,) * self.delay, "error": self.no_error(z)}

  def launch(self, z, ms):
    oldest = ms["earlier"][0]
    return jax.tree.map(jnp.add, oldest, ms["error"]) if self.feeds_back else oldest

  def land(self, z, w, x, ms, ctx):
    delta, sent = outer_gradient(z, w, ctx), self.launch(z, ms)
    error = unsent(self.mix1, sent, ctx._replace(healthy=None)) if self.feeds_back else ()  # sent before anyone was sick
    seen, alive = self.mix1.seen(sent, ctx), self.mix1.alive(ctx)
    here = alive[ctx.worker]
    seen = jax.tree.map(lambda seen, sent: jnp.where(here, seen, sent), seen, sent)  # apart, it has its own as it was
    workers = jnp.where(here, jnp.sum(alive), 1)
    x = sent if x is None else x
    eager = jax.tree.map(lambda x, new, old: x + (new - old) / workers.astype(x.dtype), x, delta, seen)
    z, state = outer_step(self.optimizer, eager, ms["outer"], start=z)
    return z, {"outer": state, "earlier": (*ms["earlier"][1:], delta), "error": error}
