"""What a run is between rounds."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


class State(NamedTuple):
  """Everything a run is: leaves of all but `round` are [M, ...] and live on the devices.

  Attributes:
    params: the workers' parameters z.
    inner_opt_state: the inner optimizer's state of each worker; it survives across rounds.
    method_state: the method's own state (outer momentum, ...).
    round: completed rounds, a host NumPy int32.
  """

  params: PyTree
  inner_opt_state: PyTree
  method_state: PyTree
  round: Any


class Originals(NamedTuple):
  """The method state where parameters are narrower than float32, so that small outer updates do not vanish in rounding.

  Attributes:
    method: the method's own state.
    params: the outer parameters in float32; the workers' are these, rounded.
  """

  method: PyTree
  params: PyTree


def narrow(params: PyTree) -> bool:
  """Whether a leaf is narrower than float32."""
  return any(jnp.dtype(x.dtype).itemsize < 4 for x in jax.tree.leaves(params))


@jax.jit
def _mean(stack: PyTree) -> PyTree:
  return jax.tree.map(lambda x: jnp.mean(x, axis=0).astype(x.dtype), stack)


def mean_params(state: State) -> PyTree:
  """The average model: one exact mean over the workers' parameters, without the worker axis."""
  refuse_consumed(state)
  return _mean(state.params)


def refuse_consumed(state: State) -> None:
  """Raises ValueError for a state whose buffers a round has taken over."""
  if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state[:3])):
    raise ValueError("This state was consumed by an earlier round (its buffers are donated); use the state that "
                     "round_fn returned, or restore a checkpoint if that round failed.")


def checksum(tree: PyTree) -> int:
  """CRC-32 of all numbers of a tree, in the order of its leaves."""
  crc = 0
  for leaf in jax.tree.leaves(tree):
    crc = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), crc)
  return crc
