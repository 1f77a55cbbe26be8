"""Many leaves in one buffer: XLA overlaps one large transfer where it would hold back the last of many.

The buffer holds a device's local shards, one after the other. Ravelling leaves that are sharded automatically would make
XLA gather them first, so packing and unpacking happen with the axes inside a worker made manual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

PyTree = Any

# A TPU lays out the last two axes in such tiles; what is cut along them is moved without a second copy.
TILE = (8, 128)


class Packing(NamedTuple):
  """How leaves lie on the devices of a worker, which is all that packing needs to know.

  Attributes:
    axes: sizes of the mesh axes inside a worker, those above 1.
    specs: PartitionSpec of a leaf's own axes by path; a path that is not there is replicated.
  """

  axes: Mapping[str, int]
  specs: Mapping[str, PartitionSpec]

  def pack(self, leaves: Sequence[tuple[str, jax.Array]], lead: int, pieces: tuple[int, ...] = ()) -> jax.Array:
    """Leaves [lead..., *shape] of one dtype -> [lead..., n]; with pieces [lead..., *pieces, rows, 128], zero-padded.

    The axis of n or rows is divided over `axes`.
    """
    def local(*shards):
      flat = jnp.concatenate([x.reshape(*x.shape[:lead], -1) for x in shards], axis=-1)
      if not pieces:
        return flat
      padding = -flat.shape[-1] % (math.prod(pieces) * math.prod(TILE))
      flat = jnp.pad(flat, [(0, 0)] * lead + [(0, padding)]) if padding else flat
      return flat.reshape(*flat.shape[:lead], *pieces, -1, TILE[-1])

    specs = [self._spec(path, lead) for path, _ in leaves]
    return self._inside(local, specs, self._buffer(lead + len(pieces)))(*[x for _, x in leaves])

  def unpack(self, buffer: jax.Array, like: Sequence[tuple[str, Any]], lead: int) -> list[jax.Array]:
    """What `pack` made -> leaves [lead..., *shape], for `like` = (path, stack [K, *shape])."""
    shapes = [self._local(path, x.shape[1:]) for path, x in like]

    def local(flat):
      flat = flat.reshape(*flat.shape[:lead], -1)
      leaves, start = [], 0
      for shape in shapes:
        end = start + math.prod(shape)
        leaves.append(flat[..., start:end].reshape(*flat.shape[:lead], *shape))
        start = end
      return leaves

    specs = [self._spec(path, lead) for path, _ in like]
    return self._inside(local, [self._buffer(lead if buffer.ndim == lead + 1 else buffer.ndim - 2)], specs)(buffer)

  def _spec(self, path: str, lead: int) -> PartitionSpec:
    """The leaf's spec on the axes that divide it, behind `lead` free axes."""
    present = [tuple(name for name in axis_names(entry) if name in self.axes) or None for entry in self.specs.get(path, ())]
    return PartitionSpec(*[None] * lead, *present)

  def _buffer(self, lead: int) -> PartitionSpec:
    return PartitionSpec(*[None] * lead, tuple(self.axes) or None)

  def _local(self, path: str, shape: Sequence[int]) -> tuple[int, ...]:
    return local_shape(shape, self.specs.get(path, PartitionSpec()), self.axes)

  def _inside(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    if not self.axes:
      return f
    return jax.shard_map(f, axis_names=set(self.axes), in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)


def local_shape(shape: Sequence[int], spec: PartitionSpec, axes: Mapping[str, int]) -> tuple[int, ...]:
  """The shape of one device's shard of an array (of the largest, where an axis does not divide).

  Args:
    shape: of the whole array.
    spec: names of mesh axes for its axes; those that `axes` lacks divide nothing.
    axes: sizes of the mesh axes.
  """
  entries = [*spec, *[None] * (len(shape) - len(spec))]
  return tuple(-(-n // math.prod(axes.get(name, 1) for name in axis_names(entry))) for n, entry in zip(shape, entries))


def axis_names(entry: Any) -> tuple[str, ...]:
  """The mesh axes in one entry of a PartitionSpec."""
  return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
