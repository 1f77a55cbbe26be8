"""NoLoCo (arXiv 2506.10911): random groups average, momentum pulls the worker towards its group. From the authors' code."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fgd_jax.methods.base import Compressed, Method, check_number, exchanged, outer_gradient
from fgd_jax.mixing import Mixer


@dataclasses.dataclass(frozen=True)
class NoLoCo(Compressed):
  """Heavy-ball momentum on the group's mean progress and on the distance to the group's mean.

      delta_i <- alpha delta_i + beta mean_{j in G} (w_j - phi_j) + gamma (mean_{j in G} phi_j - phi_i)
      phi_i   <- phi_i + delta_i

  Groups of `group_size` are drawn afresh every round, the same for both means. The mean of phi does not depend on the inner
  steps and travels beside them (Mix1); the mean progress blocks (Mix2). The authors' random pipeline routing is not part of
  it.

  Stability (derived; many workers): 0 < gamma < gamma_max = 2 (1 - alpha^2) / (1 - alpha (n - 2) / n).

  Args:
    group_size: n, divides the number of workers (pairs also when it is odd: one worker is idle then).
    alpha, beta, gamma: as above; the authors use 0.5 and 0.7 = 0.7.
    force: accept a gamma above 0.9 gamma_max.
    codec, error_feedback: see `Compressed`; of the progress. Parameters are sent as they are.
  """

  group_size: int = 2
  alpha: float = 0.5
  beta: float = 0.7
  gamma: float = 0.7
  force: bool = False
  mix1: Any = None
  mix2: Any = None
  mixers: ClassVar[tuple[str, ...]] = ("mix1", "mix2")

  def __post_init__(self):
    super().__post_init__()
    check_number("alpha", self.alpha, below=1, why="it is the momentum")
    check_number("beta", self.beta)
    check_number("gamma", self.gamma)
    if not isinstance(self.force, bool):
      raise ValueError(f"force={self.force!r} must be True or False.")
    if not isinstance(self.group_size, int) or isinstance(self.group_size, bool) or self.group_size < 1:
      raise ValueError(f"group_size={self.group_size!r} must be a positive number of workers.")
    if self.group_size == 2:
      self._check_gamma()

  def _check_gamma(self) -> None:
    n, alpha = self.group_size, self.alpha
    limit = 2 * (1 - alpha**2) / (1 - alpha * (n - 2) / n)
    if not self.force and self.gamma > 0.9 * limit:
      raise ValueError(f"gamma={self.gamma} exceeds 0.9 of the stability limit gamma_max = 2 (1 - alpha^2) / (1 - alpha (n "
                       f"- 2) / n) = {limit:.3f} for alpha={alpha}, group_size n={n}: workers would drift apart; lower "
                       "gamma or alpha, or set force=True.")

  def bind(self, workers: int, seed: int = 0) -> Method:
    if isinstance(self.mix1, Mixer):
      return self
    if 2 < self.group_size < workers:
      self._check_gamma()
    topology = "random_pairs" if self.group_size == 2 else ("random_groups", {"group_size": self.group_size})
    bound = dataclasses.replace(self, mix1=topology).bind_mixers(workers, seed)
    mix1 = dataclasses.replace(bound.mix1, codec=None)
    return dataclasses.replace(bound, mix1=mix1, mix2=dataclasses.replace(bound.mix1, key="mix2"))

  @property
  def mix(self) -> Mixer:
    """The groups' means; `.matrix(r)` gives round r's."""
    return self.mix1

  def init(self, z):
    return {"delta": jax.tree.map(jnp.zeros_like, z), "error": self.no_error(z)}

  def land(self, z, w, x, ms, ctx):
    backward, error = exchanged(self.mix2, outer_gradient(z, w, ctx), ms["error"], ctx)
    x = z if x is None else x
    move = lambda d, g, x, z: self.alpha * d - self.beta * g + self.gamma * (x - z)
    delta = jax.tree.map(move, ms["delta"], backward, x, z)
    return jax.tree.map(jnp.add, z, delta), {"delta": delta, "error": error}
