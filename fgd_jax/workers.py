"""Where workers live: on one device, one for each slot of the mesh axis `worker`, or several in each slot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fgd_jax.mixing.exchange import WORKER_AXIS, Placement

PyTree = Any
SLOT_AXIS = "slot"  # the vmap axis that numbers the K workers of one device position


class Workers:
  """M workers and their placement.

  Args:
    count: M, the number of workers.
    mesh: None puts all workers on one device. A mesh needs an axis `worker` whose size divides M: size M is one worker
      for each slot, less is several. Its other axes (`fsdp`, `tensor`) shard inside a worker. Any axis types are
      accepted; the mesh is rebuilt with Auto axes, in which ordinary model code works.

  Raises:
    ValueError: M below 1, a mesh without the axis, or one whose size does not divide M.
  """

  def __init__(self, count: int, mesh: Mesh | None = None):
    if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or count < 1:
      raise ValueError(f"Workers(count={count!r}): the number of workers must be a positive integer.")
    self.count = int(count)
    if mesh is None:
      self.mesh = None
      self.placement = Placement(self.count, 1)
      return
    if WORKER_AXIS not in mesh.axis_names:
      raise ValueError(f"The mesh has axes {mesh.axis_names} and no axis {WORKER_AXIS!r}; name one of them "
                       f"{WORKER_AXIS!r} or pass mesh=None.")
    devices = mesh.shape[WORKER_AXIS]
    if self.count % devices:
      raise ValueError(f"Workers(count={count}): the mesh axis {WORKER_AXIS!r} has size {devices}, which does not divide "
                       "the number of workers; change one of them.")
    self.mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    self.placement = Placement(self.count, devices)
    slices = self.slices
    if 1 < len(set(slices)) < len(slices):
      count = len(set(slices))
      if sorted(slices) != slices or any(slices.count(s) * count != len(slices) for s in slices):
        raise ValueError(f"The positions of the mesh axis {WORKER_AXIS!r} lie in slices {slices}; each slice needs equally "
                         "many, one after the other (fgd_jax.sharding.make_mesh lays them out so).")
      self.placement = self.placement._replace(slices=tuple(slices))

  def __repr__(self) -> str:
    where = "one device" if self.mesh is None else f"mesh {dict(self.mesh.shape)}"
    return f"Workers({self.count} on {where})"

  @property
  def platform(self) -> str:
    """"cpu", "gpu" or "tpu"."""
    return self.devices[0].platform

  @property
  def devices(self) -> list[jax.Device]:
    """All devices that the workers use; those of a mesh may belong to a topology that is only compiled for."""
    return [_default_device()] if self.mesh is None else list(self.mesh.devices.flat)

  @property
  def inner_axes(self) -> dict[str, int]:
    """Sizes of the mesh axes inside a worker, those above 1."""
    shape = {} if self.mesh is None else self.mesh.shape
    return {name: size for name, size in shape.items() if size > 1 and name != WORKER_AXIS}

  @property
  def slices(self) -> list[int]:
    """The TPU slice of every position of the mesh axis `worker` (0 where devices know no slices)."""
    if self.mesh is None:
      return [0]
    by_position = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(WORKER_AXIS), 0)
    return [slice_of(d) for d in by_position.reshape(self.placement.devices, -1)[:, 0]]

  @property
  def local(self) -> list[int]:
    """The workers of which this process holds at least a part, ascending: it needs only their batches."""
    if self.mesh is None:
      return list(range(self.count))
    by_position = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(WORKER_AXIS), 0)
    here = [any(d.process_index == jax.process_index() for d in position)
            for position in by_position.reshape(self.placement.devices, -1)]
    return [m for m in range(self.count) if here[m // self.placement.slots]]

  def stacked(self, spec: PartitionSpec = PartitionSpec()) -> jax.sharding.Sharding:
    """Sharding of an array [M, ...] whose remaining axes follow `spec`."""
    if self.mesh is None:
      return SingleDeviceSharding(_default_device())
    return NamedSharding(self.mesh, PartitionSpec(WORKER_AXIS, *spec))

  def replicated(self) -> jax.sharding.Sharding:
    """Sharding of what every worker has whole."""
    return SingleDeviceSharding(_default_device()) if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

  def bring(self, x: Any) -> Any:
    """The array as it is where the placement can read it; from other devices, a copy for everyone."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or not x.committed:
      return x
    here = self.replicated()
    return x if x.sharding.device_set == here.device_set else jax.device_put(x, here)

  def put(self, tree: PyTree, sharding: jax.sharding.Sharding) -> PyTree:
    """Host arrays as global arrays; with several processes each takes its shards, without comparing notes."""
    if sharding.is_fully_addressable:
      return jax.device_put(tree, sharding)

    def one(x):
      if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x
      x = np.asarray(x)
      return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(one, tree)

  def from_local(self, tree: PyTree, sharding: jax.sharding.Sharding) -> PyTree:
    """Global arrays [M, ...] from host arrays that hold the rows of the workers `self.local` alone."""
    local = self.local
    if len(local) == self.count:
      return self.put(tree, sharding)
    row = {worker: i for i, worker in enumerate(local)}

    def one(x):
      def shard(index):
        return x[([row[m] for m in range(self.count)[index[0]]], *index[1:])]
      return jax.make_array_from_callback((self.count, *x.shape[1:]), sharding, shard)

    return jax.tree.map(one, tree)

  def everywhere(self, tree: PyTree) -> PyTree:
    """Small arrays so that every process can read them whole; nothing happens where it can already."""
    leaves, structure = jax.tree.flatten(tree)
    apart = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)
             and not (x.is_fully_addressable or x.is_fully_replicated)]
    for i, x in zip(apart, self._gather([leaves[i] for i in apart]) if apart else ()):
      leaves[i] = x
    return jax.tree.unflatten(structure, leaves)

  @functools.cached_property
  def _gather(self) -> Callable:
    return jax.jit(lambda xs: xs, out_shardings=self.replicated())

  def spmd(self, body: Callable, stacks: int) -> Callable:
    """Runs `body` on every slot's local stack.

    The first `stacks` arguments of the result are pytrees of [M, ...] arrays, the others are the same for all workers;
    `body` sees [K, ...] and returns [K, ...]. Manual over `worker` only, so that other axes stay automatic;
    check_vma is off, because with it the gradient at averaged parameters would be summed over workers.
    """
    if self.placement.devices == 1 and not self.inner_axes:
      return body

    def run(*args):
      specs = tuple(PartitionSpec(WORKER_AXIS) if i < stacks else PartitionSpec() for i in range(len(args)))
      return jax.shard_map(body, mesh=self.mesh, axis_names={WORKER_AXIS}, in_specs=specs,
                           out_specs=PartitionSpec(WORKER_AXIS), check_vma=False)(*args)

    return run

  def each(self, f: Callable, *stacks: PyTree, how: str = "vmap") -> PyTree:
    """Applies `f`, written for one worker, to each worker of a local stack: one plain call where there is one."""
    if self.placement.slots == 1:
      out = f(*jax.tree.map(lambda x: x[0], stacks))
      return jax.tree.map(lambda x: x[None], out)
    if how == "map":
      return jax.lax.map(lambda args: f(*args), stacks)
    return jax.vmap(f, axis_name=SLOT_AXIS)(*stacks)


def slice_of(device: Any) -> int:
  """The TPU slice of a device; all others count as one slice."""
  return int(getattr(device, "slice_index", 0) or 0) if device.platform == "tpu" else 0


def _default_device() -> jax.Device:
  default = jax.config.jax_default_device  # type: ignore[attr-defined]
  return default if isinstance(default, jax.Device) else jax.devices(default)[0] if default else jax.devices()[0]
