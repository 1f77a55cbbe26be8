"""Factored Gossip DiLoCo (arXiv 2606.22768), which splits DiLoCo's synchronisation into Mix1 and Mix2.

Evidence: the ingredients are from summaries of the paper (SUM); their assembly is ours and reproduces the published
bound and utilisations (INF: inferred, DER: derived; tests/test_methods.py). `momentum="recovered"` is ours.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import warnings
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fgd_jax.methods.base import Outer, exchanged, outer_gradient, outer_step, topology_name
from fgd_jax.mixing import Mixer, Subset, path_of


@dataclasses.dataclass(frozen=True)
class FactoredGossip(Outer):
  """Parameters are mixed beside the inner steps (Mix1), outer gradients after them (Mix2, blocking).

      x_m   = Mix1(z)_m                    overlaps the inner steps, which start from z_m, not from x_m
      w_m   = H inner steps from z_m
      D_m   = Mix2(z - w)_m                on the subset; elsewhere D_m = z_m - w_m
      z_m'  = outer step from x_m with D_m (Nesterov, momentum local to the worker)

  With a codec C, Mix1 sends q = C(z - ref) and adds what the worker knows of its own loss, so that the mean is kept exactly:
  x_m = ref + Mix1(q)_m + (z_m - ref - q_m). Where Mix1 is the global mean, ref' = ref + mean(q) is the same everywhere and
  follows z (in rounds in which all take part), so that only a round's displacement is compressed; elsewhere ref = 0 and the
  codec must be fine (bf16, int8).

  `momentum="recovered"` (ours, derived): with a global Mix1 and no Mix2, everybody knows the mean x_r, from which the point
  of Nesterov's two-sequence form that all share is recovered; `retain` keeps a part of the spread.

      ybar_{r-1} = (x_r + mu ybar_{r-2}) / (1 + mu),  ybar_{-1} = z_0
      y_m = x_r - lr Delta_m;   z_m' = y_m + mu (y_m - ybar_{r-1}) + retain (z_m - x_r)

  Args:
    mix1: topology of Mix1: a name or (name, options).
    mix2: topology of Mix2.
    subset: parameters that Mix2 covers (`fgd_jax.mixing.Subset`); None: all.
    outer_lr, outer_momentum: of the outer optimizer; default 0.7 / 0.9 (DiLoCo's), 0.4 / 0.8 where Mix2 is the identity,
      whose spread is unstable beyond outer_lr = (1 + mu) / (1 + 2 mu), and 0.5 / 0.75 with recovered momentum.
    mix_outer_state: "mix1" mixes the outer optimizer's floating-point state along with the parameters (the published
      variant GlobalM1S); "none" keeps momentum local.
    momentum: "local" or "recovered".
    retain: of the recovered form, in [0, 1).
    others: see `Outer`; error feedback is Mix2's.
  """

  mix1: Any = "global"
  mix2: Any = "random_pairs"
  subset: Any = None
  mix_outer_state: str = "none"
  momentum: str = "local"
  retain: float = 0.8
  mixers: ClassVar[tuple[str, ...]] = ("mix1", "mix2")

  def __post_init__(self):
    if self.mix_outer_state not in ("none", "mix1"):
      raise ValueError(f"mix_outer_state={self.mix_outer_state!r} must be 'none' or 'mix1'.")
    super().__post_init__()
    self.covered  # refuses a bad subset here, not in the first round
    if self.covered is not None and self._no_mix2:
      raise ValueError(f"subset={self.subset!r} is what Mix2 covers, and has no effect with mix2='identity'; give another "
                       "mix2, such as 'random_pairs', or leave subset out.")
    self._check_momentum()
    if (name := topology_name(self.mix1)) not in ("global", "identity", None):
      self.refuse_coarse(f"which mix1={name!r} sends without a reference that all workers know; use 'bf16' or 'int8', or "
                         "mix1='global'.")

  @property
  def _no_mix2(self) -> bool:
    return topology_name(self.mix2) in ("identity", None)

  def _check_momentum(self) -> None:
    if self.momentum not in ("local", "recovered"):
      raise ValueError(f"momentum={self.momentum!r} must be 'local' or 'recovered'.")
    if not (isinstance(self.retain, numbers.Real) and 0 <= self.retain < 1):
      raise ValueError(f"retain={self.retain!r} must be a number in [0, 1).")
    lr, mu = (self.lr_and_momentum if self.outer is None else (None, 0.0))
    if self.momentum == "recovered":
      if topology_name(self.mix1) != "global" or not self._no_mix2:
        raise ValueError(f"momentum='recovered' needs mix1='global' and mix2='identity', not {topology_name(self.mix1)!r} "
                         f"and {topology_name(self.mix2)!r}: the mean must be known to all workers.")
      if not isinstance(lr, numbers.Real) or self.outer_clip is not None or self.mix_outer_state != "none":
        raise ValueError("momentum='recovered' is Nesterov SGD with a constant outer_lr; it takes no outer=, schedule, "
                         "outer_clip or mix_outer_state.")
      if self.codec is not None:
        raise ValueError(f"momentum='recovered' takes no codec, got {self.codec!r}: its mean must be exact.")
    elif self._no_mix2 and topology_name(self.mix1) == "global" and isinstance(lr, numbers.Real):
      limit = (1 + mu) / (1 + 2 * mu)
      if lr > limit and not isinstance(self.mix1, Mixer):
        warnings.warn(f"outer_lr={lr} with outer_momentum={mu} is beyond GlobalM1's stability limit (1 + mu) / (1 + 2 mu) = "
                      f"{limit:.3f}: the workers may drift apart; lower outer_lr or outer_momentum, or give it a Mix2.",
                      stacklevel=4)

  @property
  def lr_and_momentum(self):
    if self.momentum == "recovered":
      lr, momentum = 0.5, 0.75
    else:
      lr, momentum = (0.4, 0.8) if self._no_mix2 else self.defaults
    return (lr if self.outer_lr is None else self.outer_lr,
            momentum if self.outer_momentum is None else self.outer_momentum)

  @functools.cached_property
  def covered(self) -> Subset | None:
    return None if self.subset is None else Subset(self.subset)

  def init(self, z):
    covered = z if self.covered is None else self.covered.take(z)  # refuses a subset that covers nothing
    state = {"ybar": z} if self.momentum == "recovered" else {"outer": self.optimizer.init(z)}
    return {**state, "error": () if self._no_mix2 else self.no_error(covered), "ref": z if self._follows else ()}

  @property
  def _follows(self) -> bool:
    """Whether Mix1's codec has a reference that all workers know."""
    return self.overlapped is not None and self.overlapped.codec is not None and self.overlapped.topology.bank[0].mean

  def launch(self, z, ms):
    sent = jax.tree.map(jnp.subtract, z, ms["ref"]) if self._follows else z
    return {"": sent, "outer_state": _floats(ms["outer"])} if self.mix_outer_state == "mix1" else sent

  def land(self, z, w, x, ms, ctx):
    if x is not None and self.overlapped.codec is not None:
      x, ms = self._decompressed(z, x, ms, ctx)
    if x is not None and self.mix_outer_state == "mix1":
      x, ms = x[""], {**ms, "outer": _with_floats(ms["outer"], x["outer_state"])}
    x = z if x is None else x
    delta = outer_gradient(z, w, ctx)
    if self.momentum == "recovered":
      return self._recovered(z, x, delta, ms)
    if self.covered is None:
      delta, error = exchanged(self.mix2, delta, ms["error"], ctx)
    else:
      part, error = exchanged(self.mix2, self.covered.take(delta), ms["error"], ctx)
      delta = self.covered.put(delta, part)
    z, state = outer_step(self.optimizer, delta, ms["outer"], start=x)
    return z, {**ms, "outer": state, "error": error}

  def mean_moved(self, ms, jump):
    """What stands for an earlier mean moves along, so that the jump is not taken for progress."""
    return {**ms, **{key: jax.tree.map(jnp.add, ms[key], jump) for key in ("ybar", "ref") if ms.get(key)}}

  def _decompressed(self, z, x, ms, ctx):
    """What Mix1 gives where its payload was compressed, and the reference that all workers share now."""
    sent = self.launch(z, ms)
    kept = jax.tree.map(jnp.subtract, sent, self.overlapped.seen(sent, ctx))
    heard = self.overlapped.heard(ctx._replace(healthy=None))  # Mix1 travels before anyone can be sick
    mixed = jax.tree.map(lambda x, k: x + jnp.where(heard, k, 0), x, kept)
    if not self._follows:
      return mixed, ms
    parameters = lambda tree: tree[""] if self.mix_outer_state == "mix1" else tree
    back = jax.tree.map(jnp.add, ms["ref"], parameters(mixed))
    everybody = jnp.all(self.overlapped.alive(ctx))  # or the reference of those who missed a round would differ for ever
    ref = jax.tree.map(lambda r, q: jnp.where(everybody, r + q, r), ms["ref"], parameters(x))
    return ({**mixed, "": back} if self.mix_outer_state == "mix1" else back), {**ms, "ref": ref}

  def _recovered(self, z, x, delta, ms):
    lr, mu = self.lr_and_momentum
    ybar = jax.tree.map(lambda x, before: (x + mu * before) / (1 + mu), x, ms["ybar"])
    y = jax.tree.map(lambda x, d: x - lr * d, x, delta)
    new = jax.tree.map(lambda y, b, z, x: y + mu * (y - b) + self.retain * (z - x), y, ybar, z, x)
    return new, {**ms, "ybar": ybar}


def _floats(tree: Any) -> dict[str, jax.Array]:
  """Floating-point leaves by path, so that they are still known to lie as their parameters do."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {path_of(path): x for path, x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)}


def _with_floats(tree: Any, floats: dict[str, jax.Array]) -> Any:
  return jax.tree_util.tree_map_with_path(lambda path, leaf: floats.get(path_of(path), leaf), tree)
