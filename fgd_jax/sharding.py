"""Sharding inside a worker, and the mesh that holds it: which array axes the mesh axes `fsdp` and `tensor` divide.

Inside a worker everything is automatic: rules place the parameters, the optimizer states follow them, `constrain` places
the activations that XLA would place badly, and XLA adds the collectives. Only `worker` is manual (fgd_jax.workers).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, PartitionSpec

from fgd_jax.mixing import path_of
from fgd_jax.mixing.exchange import WORKER_AXIS
from fgd_jax.mixing.fragments import FLAT
from fgd_jax.mixing.pack import axis_names
from fgd_jax.workers import slice_of

PyTree = Any
Rules = Sequence[tuple[str, PartitionSpec]]
FSDP, TENSOR = "fsdp", "tensor"

# The Llama of fgd_jax.models. Each matrix is divided over both axes, and only along the model, feed-forward and head
# widths, so that any vocabulary and number of layers will do.
# - Layers, Megatron's way: q, k, v, gate and up have their columns over `tensor`, o and down their rows, so a layer adds
#   over `tensor` twice. `fsdp` divides the rows of all of them: were it the columns of o, q and o (both [D, D]) would
#   differ, and XLA, which shares the optimizer's broadcast scalars between equal shapes, would reshard one of them in
#   every step.
# - Embedding: along the width. A vocabulary divided over `fsdp` aborts XLA's partitioner (see Ends.encode), a gathered
#   table is the largest buffer of the step; this way only activations move.
# - lm_head: along the width too; it is gathered over `fsdp` where it is used and its columns go to `tensor`.
_COLUMNS, _ROWS = r"/(q|k|v|gate|up)/kernel$", r"/(o|down)/kernel$"
LLAMA_RULES: Rules = (
    (r"^layers/.*" + _COLUMNS, PartitionSpec(None, FSDP, TENSOR)),
    (r"^layers/.*" + _ROWS, PartitionSpec(None, (TENSOR, FSDP))),
    (_COLUMNS, PartitionSpec(FSDP, TENSOR)),
    (_ROWS, PartitionSpec((TENSOR, FSDP))),
    (r"^embed/embedding$", PartitionSpec(None, (FSDP, TENSOR))),
    (r"^lm_head/kernel$", PartitionSpec((FSDP, TENSOR))),
)


# --- the mesh --------------------------------------------------------------------------------------------------------


def slices(devices: Sequence[Any]) -> list[list[Any]]:
  """The devices by TPU slice (what `slice_index` says), in order; elsewhere all of them are one slice.

  CPU processes and GPU hosts have no counterpart: their devices stay in the order of `jax.devices()`.
  """
  devices = list(devices)
  if not devices or devices[0].platform != "tpu":
    return [devices]
  by_slice: dict[int, list[Any]] = {}
  for d in sorted(devices, key=lambda d: (slice_of(d), d.id)):
    by_slice.setdefault(slice_of(d), []).append(d)
  return list(by_slice.values())


def make_mesh(devices: Sequence[Any], worker: int, fsdp: int = 1, tensor: int = 1) -> Mesh:
  """A mesh with the axes ("worker", "fsdp", "tensor"): `worker` runs over the slices, the others stay inside one.

  Position p of `worker` lies in slice p // (worker / slices), so several positions share a slice or have one each, and
  a worker never straddles slices: only what crosses workers goes over the network between them. Devices that are not
  needed stay unused, the same number in each slice. In a slice that is used whole the devices are laid out along its
  torus. Devices of a compile-only topology (jax.experimental.topologies) will do.

  Raises:
    ValueError: positions that do not divide evenly, or a mesh that needs more devices than a slice has.
  """
  parts = slices(devices)
  count, inside = len(parts), fsdp * tensor
  shape = f"worker={worker} x fsdp={fsdp} x tensor={tensor}"
  if min(worker, fsdp, tensor) < 1:
    raise ValueError(f"A mesh of {shape} has an empty axis; each must be at least 1.")
  have = min(len(part) for part in parts)
  if count > 1 and inside > have:
    raise ValueError(f"fsdp={fsdp} x tensor={tensor} needs {inside} devices for a worker, which never straddles slices, and "
                     f"a slice has {have}; make fsdp or tensor smaller.")
  if worker % count:
    raise ValueError(f"worker={worker} positions cannot be spread evenly over {count} slices; use a multiple of {count}, or "
                     "fewer slices.")
  if worker // count * inside > have:
    where = f"in each of {count} slices, which have" if count > 1 else "and there are"
    raise ValueError(f"A mesh of {shape} needs {worker // count * inside} devices {where} {have}; make the mesh smaller.")
  # What mesh_utils.create_hybrid_device_mesh((worker / count, fsdp, tensor), (count, 1, 1)) does, but for slices of which
  # only a part is used.
  grid = np.concatenate([_layout(part, (worker // count, fsdp, tensor)) for part in parts])
  return Mesh(grid, (WORKER_AXIS, FSDP, TENSOR), axis_types=(AxisType.Auto,) * 3)


def _layout(devices: list[Any], shape: tuple[int, int, int]) -> np.ndarray:
  """One slice's devices as an array of this shape, neighbours along its axes near each other on the torus."""
  if len(devices) == math.prod(shape):
    for split in (False, True):  # without splitting a physical axis where that is possible: its rings are whole
      try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split)
      except (AssertionError, NotImplementedError, ValueError):  # a shape or chip it knows no layout for
        continue
  plain = np.empty(math.prod(shape), object)
  plain[:] = devices[:plain.size]
  return plain.reshape(shape)


# --- activations -----------------------------------------------------------------------------------------------------


def constrain(x: jax.Array, *axes: Any) -> jax.Array:
  """Places an activation inside a worker, where there is a mesh to place it on; elsewhere it is returned as it is.

  Reads the mesh of the context (in a round: that of the shard_map over workers), so that a model needs no argument for
  it and works alike under jit, vmap and scan, with and without a mesh.

  Args:
    x: an array inside a worker; axes that vmap added are left to XLA.
    *axes: what divides each axis: "fsdp", "tensor", both as a tuple, or None. Mesh axes that are absent, 1, or not
      automatic are dropped, and so are those that do not divide the axis's length.
  """
  mesh = jax.sharding.get_abstract_mesh()
  sizes = {name: mesh.shape[name] for name, kind in zip(mesh.axis_names, mesh.axis_types)
           if name in (FSDP, TENSOR) and kind == AxisType.Auto and mesh.shape[name] > 1}
  if not sizes:
    return x

  def entry(length: int, names: Any) -> Any:
    names = tuple(name for name in axis_names(names) if name in sizes)
    return names if names and length % math.prod(sizes[name] for name in names) == 0 else None

  return jax.lax.with_sharding_constraint(x, PartitionSpec(*map(entry, x.shape, axes)))


# --- parameters and states -------------------------------------------------------------------------------------------


def inside_worker(mesh: Mesh | None) -> dict[str, Any]:
  """The sharding arguments of `build_round` for the Llama on a mesh with `fsdp` or `tensor` above 1; none without.

  A batch is divided over `fsdp` and the same for all positions of `tensor`.
  """
  shape = {} if mesh is None else dict(mesh.shape)
  if shape.get(FSDP, 1) * shape.get(TENSOR, 1) == 1:
    return {}
  only = lambda spec: PartitionSpec(*(_present(entry, shape) for entry in spec))
  return {"param_sharding": tuple((pattern, only(spec)) for pattern, spec in LLAMA_RULES),
          "batch_sharding": only(PartitionSpec(FSDP))}


def _present(entry: Any, shape: dict[str, int]) -> Any:
  """An entry of a PartitionSpec without the axes that a mesh lacks."""
  names = tuple(name for name in axis_names(entry) if name in shape)
  return names if len(names) > 1 else names[0] if names else None


def param_specs(params: PyTree, rules: Rules) -> dict[str, PartitionSpec]:
  """The PartitionSpec of every parameter by path: the first rule whose pattern matches (re.search), else replicated.

  Args:
    params: one worker's parameters (arrays or shapes), without the worker axis.
    rules: (pattern, spec); the spec names mesh axes for the leaf's own axes.

  Raises:
    ValueError: a spec with more axes than the leaf has.
  """
  specs = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    name = path_of(path)
    spec = next((spec for pattern, spec in rules if re.search(pattern, name)), PartitionSpec())
    if len(spec) > len(leaf.shape):
      raise ValueError(f"Sharding rule {spec} has more axes than {name} {tuple(leaf.shape)}; shorten the rule.")
    specs[name] = spec
  return specs


def like_params(tree: PyTree, params: PyTree, specs: dict[str, PartitionSpec], axes: Mapping[str, int]) -> PyTree:
  """Specs for a state tree: a leaf whose path ends in a parameter's path is sharded as it is, if it has its shape.

  Fragments of parameters too: they may have more axes in front, and another length where nothing divides the axis. Flat
  fragments (`fgd_jax.mixing.fragments`) are divided over all of `axes` (sizes of the mesh axes inside a worker) where those
  divide them.
  """
  shapes = {path_of(p): tuple(x.shape) for p, x in jax.tree_util.tree_flatten_with_path(params)[0]}
  inside = tuple(name for name in dict.fromkeys(n for spec in specs.values() for entry in spec for n in axis_names(entry))
                 if axes.get(name, 1) > 1)

  def leaf(path, x):
    keys = path_of(path).split("/")
    if keys[-1].startswith(FLAT) and inside and x.shape[-1] % math.prod(axes[name] for name in inside) == 0:
      return PartitionSpec(*[None] * (x.ndim - 1), inside)
    for i in range(len(keys) + 1):  # the last one is "": parameters that are a single array
      name = "/".join(keys[i:])
      if name in shapes and _is_part(tuple(x.shape), shapes[name], specs[name]):
        return PartitionSpec(*[None] * (x.ndim - len(shapes[name])), *specs[name])
    return PartitionSpec()

  return jax.tree_util.tree_map_with_path(leaf, tree)


def _is_part(shape: tuple[int, ...], whole: tuple[int, ...], spec: PartitionSpec) -> bool:
  """Whether an array may be (a stack of) parts of a parameter: as long as it wherever the spec divides it."""
  inner = shape[len(shape) - len(whole):]
  entries = [*spec, *[None] * (len(whole) - len(spec))]
  return len(shape) >= len(whole) and all(a == b or entry is None for a, b, entry in zip(inner, whole, entries))
