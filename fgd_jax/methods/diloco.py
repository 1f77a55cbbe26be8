"""DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1) and IsoLoCo (arXiv 2607.03011)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fgd_jax.methods.base import Outer, exchanged, outer_step, unsent
from fgd_jax.mixing.stacks import finite_rows
from fgd_jax.outer.merge import Aggregator, make_aggregator


@dataclasses.dataclass(frozen=True)
class DiLoCo(Outer):
  """One blocking all-reduce of the outer gradients a round.

      w_m     = H inner steps from theta
      Delta   = mean_m (theta - w_m)
      theta'  = outer step from theta with Delta        (Nesterov: lr 0.7, momentum 0.9)

  Args:
    nesterov: False gives heavy-ball momentum.
    aggregator: in place of the mean (`fgd_jax.outer.merge`): "mean", "task_arithmetic", "iso_c", "dare" and "rda" need one
      all-reduce; "ties", "tsv_m" and "iso_cts" bring all M outer gradients to every worker, M - 1 messages of model size.
    aggregator_options: of the aggregator.
    others: see `Outer`.
  """

  nesterov: bool = True  # type: ignore[misc]
  aggregator: str = "mean"
  aggregator_options: Mapping[str, Any] | None = None
  mix2: Any = "global"
  mixers: ClassVar[tuple[str, ...]] = ("mix2",)

  def __post_init__(self):
    super().__post_init__()
    if not isinstance(self.nesterov, bool):
      raise ValueError(f"nesterov={self.nesterov!r} must be True or False.")
    if self.outer is not None and not self.nesterov:
      raise ValueError("nesterov=False has no effect on outer=, which is taken as it is; leave it unset.")
    self.merge

  @functools.cached_property
  def merge(self) -> Aggregator:
    return make_aggregator(self.aggregator, self.aggregator_options)

  def init(self, z):
    payload = jax.eval_shape(lambda z: self.merge.local(z, jnp.float32(1), jax.random.key(0)), z)
    return self.optimizer.init(z), self.no_error(payload)

  def land(self, z, w, x, ms, ctx):
    state, error = ms
    delta = jax.tree.map(jnp.subtract, z, w)
    merge = self.merge.bind(ctx.workers)
    payload = merge.local(delta, ctx.share(), ctx.key(self.mix2.topology.seed, ctx.worker))
    if merge.gathers:
      if self.feeds_back:
        payload = jax.tree.map(jnp.add, payload, error)
        error = unsent(self.mix2, payload, ctx)
      everyone, alive = self.mix2.gather(payload, ctx), ctx.alive
      if ctx.healthy is not None:  # the sick sent NaN
        alive = alive & finite_rows(everyone)
      merged = merge.merge(everyone, alive)
      merged = jax.tree.map(lambda m, d: jnp.where(ctx.alive[ctx.worker], m, d), merged, delta)
    else:
      mixed, error = exchanged(self.mix2, payload, error, ctx)
      merged = merge.finish(mixed, delta)
    z, state = outer_step(self.optimizer, merged, state, start=z)
    return z, (state, error)


@dataclasses.dataclass(frozen=True)
class IsoLoCo(DiLoCo):
  """DiLoCo whose mean outer gradient gets an isotropic spectrum (Iso-C) before the momentum (arXiv 2607.03011).

      Delta = mean_m (theta - w_m) = U diag(s) V^T;   G = mean(s) U V^T   for every matrix

  Evidence: the authors' code; their tables were not available.
  """

  defaults: ClassVar[tuple[float, float]] = (1.8, 0.8)

  aggregator: str = "iso_c"
