"""Sharding inside a worker by path rules: which of a parameter's axes the mesh axes `fsdp` and `tensor` divide."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from fgd_jax.mixing import path_of

PyTree = Any
Rules = Sequence[tuple[str, PartitionSpec]]

# The Llama of fgd_jax.models: matrices are divided over `fsdp` along the model width.
_COLUMNS, _ROWS = r"/(q|k|v|gate|up)/kernel$", r"/(o|down)/kernel$"
LLAMA_RULES: Rules = (
    (r"^layers/.*" + _COLUMNS, PartitionSpec(None, "fsdp")),
    (r"^layers/.*" + _ROWS, PartitionSpec(None, None, "fsdp")),
    (_COLUMNS, PartitionSpec("fsdp")),
    (_ROWS, PartitionSpec(None, "fsdp")),
    (r"^embed/embedding$", PartitionSpec(None, "fsdp")),
    (r"^lm_head/kernel$", PartitionSpec("fsdp")),
)


def inside_worker(mesh: Mesh | None) -> dict[str, Any]:
  """The sharding arguments of `build_round` for the Llama on a mesh with an axis `fsdp` above 1; none without."""
  if mesh is None or mesh.shape.get("fsdp", 1) == 1:
    return {}
  return {"param_sharding": LLAMA_RULES, "batch_sharding": PartitionSpec("fsdp")}


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


def like_params(tree: PyTree, params: PyTree, specs: dict[str, PartitionSpec]) -> PyTree:
  """Specs for a state tree: a leaf whose path ends in a parameter's path, with its shape, is sharded as it is."""
  shapes = {path_of(p): tuple(x.shape) for p, x in jax.tree_util.tree_flatten_with_path(params)[0]}

  def leaf(path, x):
    keys = path_of(path).split("/")
    for i in range(len(keys) + 1):  # the last one is "": parameters that are a single array
      name = "/".join(keys[i:])
      if shapes.get(name) == tuple(x.shape):
        return specs[name]
    return PartitionSpec()

  return jax.tree_util.tree_map_with_path(leaf, tree)
