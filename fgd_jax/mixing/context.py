"""What a method and its mixers may know in one round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fgd_jax.mixing.exchange import Placement
from fgd_jax.mixing.pack import Packing
from fgd_jax.mixing.ring import Ring

PyTree = Any


class Context(NamedTuple):
  """What a method and its mixers may know in one round.

  Attributes:
    placement: where the workers live (static).
    round: int32 scalar, counted from 0.
    ids: int32 [K], the workers of this slot.
    worker: int32 scalar, this worker (inside a method), else None.
    alive: bool [M]; a worker that is not alive takes part in no exchange and keeps its own values.
    choices: index into each mixer's bank by mixer key; a Python int where the program is made for one permutation.
    weights: float [M] summing to M, weights of the workers' gradients (None: equal).
    sent: when a list, a blocking exchange only appends (mixer, tree) to it; for byte counts.
    packing: how Mix1's leaves share buffers (None: every leaf travels alone).
    ring: a mean over workers rides in the inner steps (`Mixer.during`); needs packing and one worker a slot.
    event: number of the exchange where a round has several of one mixer (fragments); draws of stochastic codecs differ by
      it.
    links: which exchanges fail, by mixer key: bool [events, M, M], symmetric: the pairs that can exchange; the diagonal: who
      takes part at all. A key that is not there, or None: nothing fails.
    healthy: whether what this worker sends may be used: a bool scalar inside a method, [K] for a stack; None: nobody looks.
      Only the worker knows, and its message tells the others (see `Mixer`).
  """

  placement: Placement
  round: Any
  ids: Any
  alive: Any
  choices: Mapping[str, Any]
  worker: Any = None
  weights: Any = None
  sent: list | None = None
  packing: Packing | None = None
  ring: Ring | None = None
  event: Any = 0
  links: Mapping[str, Any] | None = None
  healthy: Any = None

  @property
  def workers(self) -> int:
    return self.placement.workers

  def share(self) -> jax.Array:
    """This worker's weight, scaled so that the mean over live workers is 1; 1 where it takes part in no exchange."""
    if self.weights is None:
      return jnp.float32(1)
    live = jnp.where(self.alive, self.weights, 0)
    share = self.weights[self.worker] * jnp.sum(self.alive) / jnp.maximum(jnp.sum(live), 1e-30)
    return jnp.where(self.alive[self.worker], share, 1)

  def weigh(self, tree: PyTree) -> PyTree:
    """This worker's gradients times its share, so that a plain mean over workers is the weighted mean (DiLoCo, 2.1)."""
    if self.weights is None:
      return tree
    scale = self.share()
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), tree)

  def key(self, seed: int, worker: Any) -> jax.Array:
    """A random key for this worker, round and event."""
    key = jax.random.fold_in(jax.random.key(seed), self.round)
    return jax.random.fold_in(jax.random.fold_in(key, self.event), worker)
