"""Pipelined DiLoCo (ours): one fragment is always in flight, nobody waits, and no local step is thrown away."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from fgd_jax.methods.base import mean_of, widened
from fgd_jax.methods.fragmented import Fragmented


@dataclasses.dataclass(frozen=True)
class PipelinedDiLoCo(Fragmented):
  """Streaming's schedule with a delay of H/P, the time until the next fragment is due, and an additive landing.

      due:           Delta_{m,q} = theta_q - w_{m,q} departs; guess_{m,q} is where the worker goes on from
      H/P later:     theta_q <- outer step from theta_q with mean_m Delta_{m,q}, exactly DiLoCo's chain
      landing "add":     w_{m,q} += theta_q - guess_{m,q}        the steps made in flight are kept
      landing "blend":   w_{m,q} <- blend w_{m,q} + (1 - blend) theta_q

  `guess="continue"`: the worker stays where it is. `guess="own"`: it jumps to its own predicted outer step, the outer step
  with its own Delta in place of the mean.

  Evidence: ours; orderings seen at toy scale only.

  Args:
    fragments, order, ends: see `Fragmented`; by default 10 flat ranges.
    landing, blend, guess: as above.
    others: see `Outer`.
  """

  fragments: Any = 10
  order: str = "flat"
  landing: str = "add"
  blend: float = 0.5
  guess: str = "continue"

  def __post_init__(self):
    super().__post_init__()
    if self.landing not in ("add", "blend"):
      raise ValueError(f"landing={self.landing!r} must be 'add' or 'blend'.")
    if self.guess not in ("continue", "own"):
      raise ValueError(f"guess={self.guess!r} must be 'continue' or 'own'.")
    if not isinstance(self.blend, numbers.Real) or not 0 <= self.blend <= 1:
      raise ValueError(f"blend={self.blend!r} must be a number from 0 (the global value) to 1 (the local one).")

  @property
  def blocks(self):
    return False

  @property
  def jumps(self):
    return self.guess == "own"

  def delay_of(self, steps):
    return steps // self.count

  def depart(self, w, fs, ctx):
    delta = jax.tree.map(jnp.subtract, fs["theta"], w)
    sent = ctx.weigh(delta)
    sent = jax.tree.map(jnp.add, sent, fs["error"]) if self.feeds_back else sent
    guess = self.step(delta, fs["theta"], fs["outer"])[0] if self.guess == "own" else w
    return sent, guess, guess

  def arrive(self, w, x, fs, memo, ctx):
    theta, outer = self.step(x, fs["theta"], fs["outer"])
    if self.landing == "add":
      w = jax.tree.map(lambda w, t, guess: w + (t - guess), w, theta, memo)
    else:
      w = jax.tree.map(lambda w, t: self.blend * w + (1 - self.blend) * t, w, theta)
    return w, {**fs, "theta": theta, "outer": outer}

  def eval_params(self, z, ms, alive, weights=None):
    """The outer parameters, with the fragment that is due at the end of the round completed."""
    wide = widened(z)
    parts = self.partition(jax.tree.map(lambda x: x[0], wide))
    fs = jax.tree.map(lambda x: x[:, 0], ms[0])  # fragment 0; equal on all workers that missed no round
    theta = mean_of(fs["theta"], alive)
    outer = jax.tree.map(lambda x: x[jnp.argmax(alive)], fs["outer"])
    w = jax.vmap(lambda z: parts.take(z, 0))(wide)
    shares = alive * (jnp.float32(1) if weights is None else weights)
    w = jax.tree.map(lambda x: jnp.average(x, axis=0, weights=shares), w)
    theta, _ = self.step(jax.tree.map(jnp.subtract, theta, w), theta, outer)
    groups = [mean_of(fs["theta"], alive) for fs in ms]
    groups[0] = jax.tree.map(lambda stack, new: stack.at[0].set(new), groups[0], theta)
    return self.patchwork(z, groups)
