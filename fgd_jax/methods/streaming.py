"""Streaming DiLoCo: fragments in turn, each travelling beside `delay` inner steps (Douillard et al., arXiv 2501.18512)."""

from __future__ import annotations

import dataclasses
import numbers

import jax
import jax.numpy as jnp

from fgd_jax.methods.fragmented import Fragmented


@dataclasses.dataclass(frozen=True)
class StreamingDiLoCo(Fragmented):
  """When fragment p is due, its outer gradients depart; `delay` inner steps later the new fragment is blended in.

      due:             Delta_{m,p} = theta_p - w_{m,p}, compressed by each worker before the mean, which is summed in float32
      `delay` later:   theta_p <- outer step from theta_p with mean_m Delta_{m,p}
                       w_{m,p} <- blend w_{m,p} + (1 - blend) theta_p

  Schedule: see `Fragmented`. Other codes (torchft, MaxText) name the step at which a fragment *arrives*, `delay` later than
  ours, start fragment 0 after H/P steps instead of H, and so label the fragments in another order; their fragment that
  arrives at step s of a cycle is ours that departs at s - delay.

  Args:
    delay: tau, inner steps in flight, at most H/P; 0 blocks.
    blend: weight of the local value on arrival, in [0, 1] (0: overwrite; 0.5: the paper's studies of overlap).
    fragments, order, ends: see `Fragmented`.
    others: see `Outer`. The paper's outer learning rate is 0.4 (configs/streaming_diloco.py).
  """

  delay: int = 1
  blend: float = 0.5

  def __post_init__(self):
    super().__post_init__()
    if not isinstance(self.delay, int) or isinstance(self.delay, bool) or self.delay < 0:
      raise ValueError(f"delay={self.delay!r} must be a number of inner steps, at least 0.")
    if not isinstance(self.blend, numbers.Real) or not 0 <= self.blend <= 1:
      raise ValueError(f"blend={self.blend!r} must be a number from 0 (the global value) to 1 (the local one).")

  @property
  def blocks(self):
    return self.delay == 0

  def delay_of(self, steps):
    return self.delay

  def depart(self, w, fs, ctx):
    delta = ctx.weigh(jax.tree.map(jnp.subtract, fs["theta"], w))
    return (jax.tree.map(jnp.add, delta, fs["error"]) if self.feeds_back else delta), w, ()

  def arrive(self, w, x, fs, memo, ctx):
    theta, outer = self.step(x, fs["theta"], fs["outer"])
    w = jax.tree.map(lambda w, t: self.blend * w + (1 - self.blend) * t, w, theta)
    return w, {**fs, "theta": theta, "outer": outer}
