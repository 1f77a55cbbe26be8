"""The contract of a method that exchanges fragments of the parameters in turn; the round is `fgd_jax.cycle`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fgd_jax.methods.base import Method, Outer, mean_of, narrowed, outer_step, widened
from fgd_jax.mixing import Context, Mixer
from fgd_jax.mixing.fragments import Fragments, check_fragments, make_fragments
from fgd_jax.outer.merge import Aggregator, make_aggregator

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Fragmented(Outer):
  """A method that exchanges fragments of the parameters in turn, H/P inner steps apart.

      init_fragment(theta) -> fs                    the state of one fragment, `theta` its outer parameters
      depart(w, fs, ctx) -> payload, w', memo       when it is due: what travels, and what arrive needs to know
      arrive(w, x, fs, memo, ctx) -> w', fs'        when the mixed payload x is there, `delay` inner steps later

  A round is one cycle of H steps. With t inner steps since the start, fragment p is due at the t with
  (t - p H/P) mod H = 0, and first when it has done H steps: fragment 0 at H, 2H, ..., fragment p at H + p H/P, ... With a
  delay, what is due at the end of a round departs at the start of the next one. A delay is at most H/P, so that at most one
  fragment is in flight. Fragments of equal shapes share one program.

  Args:
    fragments: P, which divides H, or a list of P path patterns.
    order: "strided" | "sequential" layers, "balanced" tensors, or "flat" ranges (`fgd_jax.mixing.fragments`).
    ends: "own": what is outside the layers is the last fragment; "joined": it joins the first and last fragment of layers.
    aggregator: "mean" of the outer gradients, or "iso_c", an isotropic spectrum of this mean (as in `IsoLoCo`; needs whole
      matrices, so not order="flat").
    aggregator_options: of the aggregator.
  """

  fragments: Any = 1
  order: str = "strided"
  ends: str = "own"
  aggregator: str = "mean"
  aggregator_options: Mapping[str, Any] | None = None
  mix1: Any = "global"
  mixers: ClassVar[tuple[str, ...]] = ("mix1",)

  def __post_init__(self):
    super().__post_init__()
    check_fragments(self.fragments, self.order, self.ends)
    if self.merge.name not in ("mean", "iso_c"):
      raise ValueError(f"aggregator={self.aggregator!r} does not work on the mean of a fragment; choose 'mean' or 'iso_c'.")
    if self.merge.name == "iso_c" and self.order == "flat" and self.fragments != 1:
      raise ValueError("aggregator='iso_c' needs whole matrices, which order='flat' cuts; choose order='strided' or "
                       "'balanced'.")

  @functools.cached_property
  def merge(self) -> Aggregator:
    return make_aggregator(self.aggregator, self.aggregator_options)

  @property
  def count(self) -> int:
    """P."""
    return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

  def delay_of(self, steps: int) -> int:
    """Inner steps between departure and arrival in rounds of `steps`."""
    raise TypeError(f"{type(self).__name__} does not define delay_of.")

  @property
  def blocks(self) -> bool:
    """Whether fragments arrive when they depart, so that workers wait for them."""
    raise TypeError(f"{type(self).__name__} does not define blocks.")

  @property
  def jumps(self) -> bool:
    """Whether a worker's fragment changes when it departs."""
    return False

  @property
  def overlapped(self) -> Mixer | None:
    return None if self.blocks else super().overlapped

  def check_steps(self, steps: int) -> None:
    """Refuses rounds of a length that the fragments cannot share."""
    if steps % self.count:
      raise ValueError(f"fragments={self.count} must divide the inner steps of a round, H={steps}; change one of them.")
    if self.delay_of(steps) > steps // self.count:
      raise ValueError(f"delay={self.delay_of(steps)} must be at most H / fragments = {steps // self.count} inner steps, "
                       "the time until the next fragment departs; lower delay or fragments.")

  def bind(self, workers: int, seed: int = 0) -> Method:
    bound = self.bind_mixers(workers, seed)
    return dataclasses.replace(bound, mix1=dataclasses.replace(bound.mix1, key="mix2")) if self.blocks else bound

  def partition(self, z: PyTree) -> Fragments:
    """The fragments of one worker's parameters (arrays or shapes)."""
    return make_fragments(self.fragments, self.order, z, self.ends)

  def init(self, z):
    """One stack of fragment states [fragments of the group, ...] for each group of equal fragments."""
    parts = self.partition(z)
    stacked = lambda states: jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    return tuple(stacked([self.init_fragment(parts.take(z, p)) for p in group]) for group in parts.groups)

  def init_fragment(self, theta: PyTree) -> PyTree:
    return {"theta": theta, "outer": self.optimizer.init(theta), "error": self.no_error(theta)}

  def depart(self, w: PyTree, fs: PyTree, ctx: Context) -> tuple[PyTree, PyTree, PyTree]:
    raise TypeError(f"{type(self).__name__} does not define depart.")

  def arrive(self, w: PyTree, x: PyTree, fs: PyTree, memo: PyTree, ctx: Context) -> tuple[PyTree, PyTree]:
    raise TypeError(f"{type(self).__name__} does not define arrive.")

  def step(self, delta: PyTree, theta: PyTree, outer: PyTree) -> tuple[PyTree, PyTree]:
    """The outer step of a fragment with the mean outer gradient `delta`: new outer parameters and optimizer state."""
    return outer_step(self.optimizer, self.merge.finish(delta, delta), outer, start=theta)

  def eval_params(self, z, ms, alive, weights=None):
    """The outer parameters: a patchwork of fragments that were exchanged at different times (arXiv 2501.18512)."""
    return self.patchwork(z, [mean_of(fs["theta"], alive) for fs in ms])

  def patchwork(self, z: PyTree, theta: Sequence[PyTree]) -> PyTree:
    """One worker's tree, in the dtypes of z [M, ...], from a stack of outer fragments for each group."""
    one = jax.tree.map(lambda x: x[0], z)
    return narrowed(self.partition(widened(one)).join(theta, widened(one)), one)
