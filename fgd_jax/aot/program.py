"""Compiles one round for devices that are not there; run by `compile_round` in a process of its own, which may abort.

    python -m fgd_jax.aot.program FOLDER      reads FOLDER/request.json, writes FOLDER/answer.json and FOLDER/program.hlo
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from ml_collections import ConfigDict

from fgd_jax import aot, models, sharding
from fgd_jax import config as configs
from fgd_jax.aot import targets
from fgd_jax.default_config import get_config as default
from fgd_jax.mixing import exchange, path_of
from fgd_jax.mixing.pack import local_shape
from fgd_jax.overlap import Plan
from fgd_jax.round import Round
from fgd_jax.workers import Workers, slice_of

BYTE_VOCABULARY = 256  # where model.vocab_size is None; data are not read


def main(folder: str) -> int:
  with open(os.path.join(folder, "request.json")) as f:
    request = json.load(f)
  try:
    answer, code = _compile(request, folder), 0
  except ValueError as e:
    if os.environ.get("FGD_JAX_TRACEBACK"):
      raise
    answer, code = {"error": " ".join(str(e).split())}, 2
  except jax.errors.JaxRuntimeError as e:  # such as: Ran out of memory in memory space hbm
    if os.environ.get("FGD_JAX_TRACEBACK"):
      raise
    first = next((line for line in str(e).splitlines() if line.strip()), "no message")
    answer, code = {"error": f"The compiler refused the round: {first[:600]}"}, 3
  with open(os.path.join(folder, "answer.json"), "w") as f:
    json.dump(answer, f)
  return code


def read_config(values: dict[str, Any]):
  """A config with these values, keys with dots; keys that are None stay at their default."""
  config = default()
  config.unlock()
  for key, value in values.items():
    section, _, leaf = key.rpartition(".")
    holder = config[section] if section else config
    if value is None and leaf in holder and holder[leaf] is None:
      continue
    holder[leaf] = value
  return config.lock()


class Lowered(NamedTuple):
  """A traced and lowered round, before the compiler: the lowered program, and what it was made of."""

  program: jax.stages.Lowered
  plan: Plan
  round_fn: Round
  workers: Workers
  params: Any


def lower(config: ConfigDict, available: Sequence[Any], round: int = 0) -> Lowered:
  """Lowers a config's unmeasured round for devices that need not be there (`targets.devices`).

  Raises:
    ValueError: a config that cannot work, or too few devices.
  """
  configs.validate(config)
  workers = configs.make_workers(config, available)
  model = models.make(configs.make_model_config(config, config.model.vocab_size or BYTE_VOCABULARY))
  _, round_fn = configs.build_round(config, model.loss, workers)
  params = jax.eval_shape(model.init, jax.random.key(config.seed))
  tokens = jax.ShapeDtypeStruct((config.workers, config.inner_steps, config.batch_size, config.seq_len + 1), jnp.int32)
  state = round_fn.abstract_state(params)._replace(round=np.int32(round))
  program = round_fn.lower(state, {"tokens": tokens}, measured=False)
  return Lowered(program, round_fn.plan({"tokens": tokens}), round_fn, workers, params)


def _compile(request: dict[str, Any], folder: str) -> dict[str, Any]:
  available = targets.devices(targets.parse(request["topology"], request["slices"]))
  began = time.monotonic()
  program, plan, round_fn, workers, params = lower(read_config(request["config"]), available, request["round"])
  mesh = workers.mesh
  assert mesh is not None  # given devices are always put in one
  inside = sharding.inside_worker(mesh)
  xla_options = {**plan.options, **request["xla_options"]}
  lower_seconds, began, cpu = time.monotonic() - began, time.monotonic(), time.process_time()
  compiled = program.compile(compiler_options=xla_options or None)
  compile_seconds, compile_cpu_seconds = time.monotonic() - began, time.process_time() - cpu
  with open(os.path.join(folder, "program.hlo"), "w") as f:
    f.write(compiled.as_text() or "")
  axis = mesh.axis_names.index("worker")
  return {
      "form": plan.form, "xla_options": xla_options, "notes": [plan.warning] if plan.warning else [],
      "mesh": dict(mesh.shape), "inner_scope": aot.inner_scope(round_fn.method),
      "devices_available": len(available), "parameters": models.count_params(params),
      "compile_seconds": compile_seconds, "compile_cpu_seconds": compile_cpu_seconds, "lower_seconds": lower_seconds,
      "memory": _memory(compiled.memory_analysis()),
      "expected_mix1_bytes": expected_mix1_bytes(round_fn, request["round"], plan.form, params, workers.placement, mesh,
                                                 inside.get("param_sharding", ())),
      "device_worker": [int(index[axis]) for index in np.ndindex(mesh.devices.shape)],
      "device_slice": [slice_of(d) for d in mesh.devices.flat],
      "device_id": [int(d.id) for d in mesh.devices.flat],
      "jax": jax.__version__}


def _memory(stats: Any) -> dict[str, int]:
  """Bytes on one device by kind, from the compiler's own analysis."""
  names = [n for n in dir(stats) if n.endswith("_in_bytes")]
  return {n.removesuffix("_in_bytes"): int(getattr(stats, n)) for n in names}


def expected_mix1_bytes(round_fn: Round, r: int, form: str, params: Any, placement: exchange.Placement,
                        mesh: Mesh, rules: sharding.Rules) -> float | None:
  """What one device hands to Mix1's collectives in round r by algebra: its shard of each launched leaf, for every message.

  A mean over workers carries a leaf once for all workers of a device, in the ring form 2 (D-1)/D of it over D positions;
  a permutation once for every message that leaves the device. The compiler may send less (it may shard leaves that no
  rule shards) or more (padding, idle hops of a ring, the stages of an all-reduce inside and between slices). None where
  fragments travel, or compressed leaves, or the method's mixers are of another kind.
  """
  method = round_fn.method
  if method.overlapped is None or placement.devices == 1:
    return 0.0
  sent = round_fn.launched(params)
  if sent is None or method.overlapped.codec is not None:
    return None
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  specs = sharding.like_params(sent, shapes, sharding.param_specs(shapes, rules), mesh.shape)
  total = 0.0
  try:
    topology = method.overlapped.topology
    for (path, leaf), spec in zip(jax.tree_util.tree_flatten_with_path(sent)[0],
                                  jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))):
      pattern = topology.bank[(topology.choice(r) + topology.stripe_of(path_of(path))) % len(topology.bank)]
      messages = 1 if pattern.mean else sum(
          any(s != d for s, d in move.pairs) for _, source in pattern.terms
          for move in exchange.colour(tuple(int(s) for s in source), placement.devices))
      total += messages * math.prod(local_shape(leaf.shape, spec, mesh.shape)) * leaf.dtype.itemsize
  except AttributeError:
    return None
  return total * 2 * (placement.devices - 1) / placement.devices if form == "ring" else total


if __name__ == "__main__":
  sys.exit(main(sys.argv[1]))
