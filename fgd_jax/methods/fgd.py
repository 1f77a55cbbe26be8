"""Factored Gossip DiLoCo (arXiv 2606.22768), which splits DiLoCo's synchronisation into Mix1 and Mix2.

Evidence: the ingredients are from summaries of the paper (SUM); their assembly is ours and reproduces the published
bound and utilisations (INF: inferred, DER: derived; tests/test_methods.py).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from fgd_jax.methods.base import Method, outer_gradient, outer_optimizer, outer_step, topology_name
from fgd_jax.mixing import Subset, path_of


@dataclasses.dataclass(frozen=True)
class FactoredGossip(Method):
  """Parameters are mixed beside the inner steps (Mix1), outer gradients after them (Mix2, blocking).

      x_m   = Mix1(z)_m                    overlaps the inner steps, which start from z_m, not from x_m
      w_m   = H inner steps from z_m
      D_m   = Mix2(z - w)_m                on the subset; elsewhere D_m = z_m - w_m
      z_m'  = outer step from x_m with D_m (Nesterov, momentum local to the worker)

  Args:
    mix1: topology of Mix1: a name or (name, options).
    mix2: topology of Mix2.
    subset: parameters that Mix2 covers (`fgd_jax.mixing.Subset`); None: all.
    outer_lr, outer_momentum: of the outer optimizer; default 0.7 / 0.9 (DiLoCo's), and 0.4 / 0.8 where Mix2 is the
      identity, whose spread is unstable beyond outer_lr = (1 + mu) / (1 + 2 mu).
    outer: any optax transform instead.
    mix_outer_state: "mix1" mixes the outer optimizer's floating-point state along with the parameters (the published
      variant GlobalM1S); "none" keeps momentum local.
  """

  mix1: Any = "global"
  mix2: Any = "random_pairs"
  subset: Any = None
  outer_lr: Any = None
  outer_momentum: float | None = None
  outer: Any = None
  mix_outer_state: str = "none"
  mixers: ClassVar[tuple[str, ...]] = ("mix1", "mix2")

  def __post_init__(self):
    if self.mix_outer_state not in ("none", "mix1"):
      raise ValueError(f"mix_outer_state={self.mix_outer_state!r} must be 'none' or 'mix1'.")
    self.optimizer, self.covered  # bad values are refused here, not in the first round

  @functools.cached_property
  def optimizer(self) -> optax.GradientTransformation:
    lr, momentum = (0.4, 0.8) if topology_name(self.mix2) == "identity" else (0.7, 0.9)
    return outer_optimizer(self.outer, self.outer_lr, self.outer_momentum, default_lr=lr, default_momentum=momentum)

  @functools.cached_property
  def covered(self) -> Subset | None:
    return None if self.subset is None else Subset(self.subset)

  def init(self, z):
    if self.covered is not None:
      self.covered.take(z)  # refuses a subset that covers nothing
    return self.optimizer.init(z)

  def launch(self, z, ms):
    return {"": z, "outer_state": _floats(ms)} if self.mix_outer_state == "mix1" else z

  def land(self, z, w, x, ms, ctx):
    if self.mix_outer_state == "mix1" and x is not None:
      x, ms = x[""], _with_floats(ms, x["outer_state"])
    delta = outer_gradient(z, w, ctx)
    if self.covered is None:
      delta = self.mix2(delta, ctx)
    else:
      delta = self.covered.put(delta, self.mix2(self.covered.take(delta), ctx))
    return outer_step(self.optimizer, delta, ms, start=z if x is None else x)


def _floats(tree: Any) -> dict[str, jax.Array]:
  """Floating-point leaves by path, so that they are still known to lie as their parameters do."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {path_of(path): x for path, x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)}


def _with_floats(tree: Any, floats: dict[str, jax.Array]) -> Any:
  return jax.tree_util.tree_map_with_path(lambda path, leaf: floats.get(path_of(path), leaf), tree)
