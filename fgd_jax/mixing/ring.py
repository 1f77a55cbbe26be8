"""A true mean as a ring all-reduce whose hops ride in the inner steps, for interconnects where psum cannot overlap.

The buffer is cut in D chunks for the D positions of the mesh axis `worker`. In hop s every position passes chunk
(position - s) mod D to its right neighbour and takes the one before it from its left: D - 1 hops that add (reduce-scatter),
then D - 1 that copy (all-gather). All positions end with the same sums, bit for bit, having sent 2 (D-1)/D of the buffer.
Where there are more inner steps than hops, the buffer is cut in segments that go round one after the other, so that every
step carries an equally small hop; the steps that are left over, fewer than one time round, carry idle hops of the same size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fgd_jax.mixing.exchange import WORKER_AXIS


class Ring(NamedTuple):
  """The plan of the hops.

  Attributes:
    positions: D, size of the mesh axis `worker`, at least 2.
    steps: H, inner steps that carry hops; at least D - 1 (then each carries two).
  """

  positions: int
  steps: int

  @property
  def hops_per_step(self) -> int:
    return 1 if self.steps >= 2 * (self.positions - 1) else 2

  @property
  def segments(self) -> int:
    return self.steps * self.hops_per_step // (2 * (self.positions - 1))

  @property
  def pieces(self) -> tuple[int, int]:
    """How a buffer is cut: (segments, D)."""
    return self.segments, self.positions

  def during(self, buffers: list[jax.Array], h: Any) -> list[jax.Array]:
    """The hops of inner step h on buffers [segments, D, rows, 128]; after the last each holds the sums over positions."""
    for i in range(self.hops_per_step):
      buffers = [self._hop(b, h * self.hops_per_step + i) for b in buffers]
    return buffers

  def _hop(self, buffer: jax.Array, hop: Any) -> jax.Array:
    D = self.positions
    segment, s = hop // (2 * (D - 1)), hop % (2 * (D - 1))
    active = segment < self.segments
    segment = jnp.minimum(segment, self.segments - 1)
    send = (lax.axis_index(WORKER_AXIS) - s) % D
    take, zero = (send - 1) % D, jnp.zeros((), send.dtype)
    chunk = lambda at: lax.dynamic_slice(buffer, (segment, at, zero, zero), (1, 1, *buffer.shape[2:]))
    received = lax.ppermute(chunk(send), WORKER_AXIS, [(i, (i + 1) % D) for i in range(D)])
    own = chunk(take)
    new = jnp.where(active, jnp.where(s < D - 1, own + received, received), own)
    return lax.dynamic_update_slice(buffer, new, (segment, take, zero, zero))
