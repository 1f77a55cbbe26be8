"""fsdp and tensor inside a worker: the numbers of one device, every leaf where the rules put it; meshes over slices."""

import functools
import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import fgd_jax as fgd
from fgd_jax import config as configs
from fgd_jax import models, sharding
from fgd_jax.default_config import get_config

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
V, D, F, LAYERS = 18, 8, 16, 2  # the vocabulary is not divisible by 4: no rule divides it
H, B, L = 2, 4, 8


def llama(scan_layers, dtype="float32"):
  return models.make(models.LlamaConfig(vocab_size=V, dim=D, layers=LAYERS, heads=4, kv_heads=2, ffn_dim=F,
                                        scan_layers=scan_layers, param_dtype=dtype))


def mesh_of(shape):
  return None if shape is None else sharding.make_mesh(jax.devices(), *shape)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """These programs run once; most of their time would be optimisation."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def one_round(method, shape, scan_layers, dtype="float64", workers=4, **options):
  """(params, losses) on the host after one round with a batch and parameters that depend on nothing else, and the state."""
  with jax.enable_x64(dtype == "float64"):
    model, mesh = llama(scan_layers, dtype), mesh_of(shape)
    inner = optax.adamw(0.01) if method == "diloco" else optax.sgd(0.1)
    name, *method_options = method if isinstance(method, tuple) else (method,)
    method = fgd.methods.make(name, **dict(method_options))
    init, round_fn = fgd.build_round(method, model.loss, inner, workers=fgd.Workers(workers, mesh),
                                     **sharding.inside_worker(mesh), **options)
    tokens = np.random.default_rng(0).integers(0, V, (workers, H, B, L + 1), dtype=np.int32)
    state, metrics = round_fn(init(model.init(jax.random.key(0))), {"tokens": tokens})
    return jax.tree.map(np.asarray, (state.params, metrics["loss"])), state


def largest(a, b):
  return max(float(np.max(np.abs(x - y))) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, shape, scan_layers, workers", [
    ("diloco", (8, 1, 1), True, 8), ("diloco", (4, 2, 1), True, 8), ("diloco", (2, 2, 2), True, 8),
    ("diloco", (1, 4, 2), True, 8),
    ("GlobalM1", (2, 2, 2), True, 4),
    ("GlobalM1LocalM2", (2, 2, 2), False, 4), ("GlobalM1LocalM2", (4, 2, 1), False, 4),
    ("LocalM1M2", (2, 2, 2), True, 2),
    (("streaming_diloco", ("fragments", 2), ("delay", 1)), (2, 2, 2), True, 2),
    (("streaming_diloco", ("fragments", 2), ("delay", 0), ("ends", "joined"), ("codec", "int8")), (2, 2, 2), False, 4),
    (("pipelined_diloco", ("fragments", 2)), (2, 2, 2), True, 2),
])
def test_a_sharded_worker_gives_the_numbers_of_one_device(method, shape, scan_layers, workers):
  """Design 3.1: 1e-10 in float64 after one round, with one and with several workers a position."""
  got, _ = one_round(method, shape, scan_layers, workers=workers)
  assert largest(got, one_round(method, None, scan_layers, workers=workers)[0]) < 1e-10


def test_float32_agrees_too():
  got, _ = one_round("GlobalM1", (2, 2, 2), True, "float32")
  assert largest(got, one_round("GlobalM1", None, True, "float32")[0]) < 1e-5


def test_vmapped_workers_and_micro_batches_are_sharded_alike():
  """Several workers of a position at once, and micro-batches that fsdp divides anew."""
  got, _ = one_round("GlobalM1", (2, 2, 2), True, inner_loop="vmap", accumulate=2)
  assert largest(got, one_round("GlobalM1", None, True)[0]) < 1e-10


def test_evaluation_and_measures_of_sharded_workers():
  """Outside of the round there is no worker axis to be manual over: what the trainer computes there is the same too."""
  from fgd_jax import train
  heldout = np.random.default_rng(1).integers(0, V, (2, 4, L + 1), dtype=np.int32)
  results = []
  with jax.enable_x64(True):
    model = llama(False, "float64")
    for shape in (None, (2, 2, 2)):
      _, state = one_round("GlobalM1LocalM2", shape, False)
      workers = fgd.Workers(4, mesh_of(shape))
      evaluated = train.make_evaluation(model.loss, heldout, workers)(fgd.mean_params(state), state.params)
      distances = jax.jit(train.js_of(model.apply, jnp.asarray(heldout[0, :1, :-1])))(state.params, None)
      results.append(jax.tree.map(np.asarray, {**evaluated, **distances}))
  assert {"eval_loss", "eval_loss_workers", "js_distance"} <= results[0].keys()
  assert largest(*results) < 1e-10


# --- where every leaf lies -------------------------------------------------------------------------------------------


def shard_of(path, shape, fsdp, tensor):
  """One worker's shard shape of a parameter, written down once more: Megatron's columns and rows, widths elsewhere."""
  name = path.split("/")[-2]
  shape = list(shape)
  if name in ("q", "k", "v", "gate", "up"):
    shape[-2], shape[-1] = shape[-2] // fsdp, shape[-1] // tensor
  elif name in ("o", "down", "lm_head"):
    shape[-2] //= fsdp * tensor
  elif name == "embed":
    shape[-1] //= fsdp * tensor
  return tuple(shape)


@pytest.mark.parametrize("fsdp, tensor", [(4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_every_leaf_of_the_state_is_sharded_as_ruled(scan_layers, fsdp, tensor):
  """Parameters, both Adam moments and the outer momentum; nothing but norms and counters is whole on a device."""
  mesh, model = mesh_of((2, fsdp, tensor)), llama(scan_layers)
  _, round_fn = fgd.build_round(fgd.methods.make("GlobalM1LocalM2"), model.loss, optax.adamw(0.1),
                                workers=fgd.Workers(4, mesh), **sharding.inside_worker(mesh))
  params = jax.eval_shape(model.init, jax.random.key(0))
  state = round_fn.abstract_state(params)
  expected = {fgd.mixing.path_of(p): (x.shape, shard_of(fgd.mixing.path_of(p), x.shape, fsdp, tensor))
              for p, x in jax.tree_util.tree_flatten_with_path(params)[0]}
  seen = dict.fromkeys(expected, 0)
  for path, x in jax.tree_util.tree_flatten_with_path(state[:3])[0]:
    name = fgd.mixing.path_of(path)
    match = next((p for p in expected if name.endswith(p) and x.shape == (4, *expected[p][0])), None)
    shard = x.sharding.shard_shape(x.shape)
    if match is None:
      assert shard == (2,), name  # step counters, [workers]
    else:
      assert shard == (2, *expected[match][1]), name
      seen[match] += 1
  assert set(seen.values()) == {4}, seen


def test_a_round_keeps_the_state_where_it_was():
  _, state = one_round("diloco", (2, 2, 2), True, workers=8)
  for leaf, parts in (("q", (4, LAYERS, 4, 4)), ("o", (4, LAYERS, 2, D))):
    for tree in (state.params, state.inner_opt_state[0].mu, state.inner_opt_state[0].nu):
      x = tree["layers"]["attn"][leaf]["kernel"]
      assert x.sharding.shard_shape(x.shape) == parts
  outer = [x for x in jax.tree.leaves(state.method_state) if x.shape == (8, V, D)]
  assert [x.sharding.shard_shape(x.shape) for x in outer] == [(4, V, 2)]


def test_rules_name_only_axes_that_the_mesh_has():
  rules = sharding.inside_worker(jax.make_mesh((4, 2), ("worker", "fsdp")))
  assert rules["batch_sharding"] == PartitionSpec("fsdp")
  assert dict(rules["param_sharding"])[r"^lm_head/kernel$"] == PartitionSpec("fsdp")
  assert "tensor" not in str(rules)
  assert sharding.inside_worker(mesh_of((8, 1, 1))) == sharding.inside_worker(None) == {}


# --- activations -----------------------------------------------------------------------------------------------------


def test_activations_are_constrained_only_where_a_mesh_is():
  """Without a mesh the program is untouched; axes that do not divide a length are dropped."""
  x = jnp.ones((4, 3))
  assert sharding.constrain(x, "fsdp", "tensor") is x
  mesh = mesh_of((2, 2, 2))

  def body(x):
    return sharding.constrain(x, "fsdp", "tensor")

  inside = jax.jit(jax.shard_map(body, mesh=mesh, axis_names={"worker"}, in_specs=PartitionSpec(),
                                 out_specs=PartitionSpec(), check_vma=False))
  text = inside.lower(x).as_text()
  assert text.count("sharding_constraint") == 1 and '[{"fsdp"}, {}]' in text.split("sharding_constraint")[1]
  np.testing.assert_array_equal(inside(x), x)
  whole = jax.jit(jax.shard_map(body, mesh=mesh_of((8, 1, 1)), axis_names={"worker"}, in_specs=PartitionSpec(),
                                out_specs=PartitionSpec(), check_vma=False))
  assert "sharding_constraint" not in whole.lower(x).as_text()


def test_ids_outside_the_vocabulary_are_not_hidden():
  """The loss has no gather that could clip them: NaN for targets of V or more, and below 0."""
  model = llama(False)
  params, tokens = model.init(jax.random.key(0)), np.ones((1, 3), np.int32)
  for bad in (V, -1):
    loss = model.loss(params, {"tokens": np.where([[False, False, True]], bad, tokens)})
    assert np.isnan(float(loss))


# --- meshes ----------------------------------------------------------------------------------------------------------


def chips(slices, each, platform="tpu"):
  """Stand-ins for devices of a few slices, in an order that is not theirs."""
  all_of = [types.SimpleNamespace(id=100 * s + i, slice_index=s, platform=platform, device_kind="none", process_index=s,
                                  coords=(i % 2, i // 2, 0), core_on_chip=0)
            for s in range(slices) for i in range(each)]
  return all_of[::-1]


def test_on_cpu_the_order_of_the_devices_is_kept():
  mesh = sharding.make_mesh(jax.devices(), 2, 2, 2)
  assert mesh.shape == {"worker": 2, "fsdp": 2, "tensor": 2}
  assert list(mesh.devices.flat) == jax.devices()
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


@pytest.mark.parametrize("slices, each, shape", [(2, 4, (2, 4, 1)), (2, 4, (4, 2, 1)), (4, 4, (4, 1, 2)), (2, 8, (2, 2, 2))])
def test_workers_are_spread_evenly_over_slices_and_never_straddle_them(slices, each, shape, monkeypatch):
  monkeypatch.setattr(sharding, "Mesh", lambda grid, names, axis_types: grid)
  grid = sharding.make_mesh(chips(slices, each), *shape)
  assert grid.shape == shape and len({d.id for d in grid.flat}) == grid.size
  for p, inside in enumerate(grid):
    assert {d.slice_index for d in inside.flat} == {p // (shape[0] // slices)}


@pytest.mark.parametrize("slices, each, shape, words", [
    (2, 4, (3, 1, 1), ["worker=3", "2 slices", "multiple of 2"]),
    (2, 4, (2, 8, 1), ["fsdp=8", "tensor=1", "8 devices", "straddles", "has 4"]),
    (2, 4, (4, 2, 2), ["worker=4", "fsdp=2", "tensor=2", "8 devices", "2 slices", "4", "smaller"]),
    (1, 4, (4, 2, 1), ["8 devices", "there are 4", "smaller"]),
    (1, 4, (0, 1, 1), ["worker=0", "at least 1"]),
])
def test_impossible_meshes_stop_with_one_sentence(slices, each, shape, words):
  with pytest.raises(ValueError) as e:
    sharding.make_mesh(chips(slices, each), *shape)
  assert all(w in str(e.value) for w in words), str(e.value)
  assert "\n" not in str(e.value)


@pytest.mark.parametrize("arg, words", [
    ("mesh.tensor=4,model.dim=16,model.heads=8", ["mesh.tensor=4", "model.kv_heads=2"]),
    ("mesh.tensor=3,model.kv_heads=3,model.heads=4", ["mesh.tensor=3", "model.heads=4"]),
    ("mesh.tensor=2,mesh.fsdp=4,model.dim=36", ["mesh.fsdp=4", "mesh.tensor=2", "model.dim=36"]),
    ("mesh.fsdp=4,model.ffn_dim=30", ["mesh.fsdp=4", "model.ffn_dim=30"]),
    ("mesh.fsdp=4,accumulate=2", ["mesh.fsdp=4", "batch_size=4", "accumulate=2"]),
])
def test_configs_that_the_rules_cannot_divide_stop_with_one_sentence(arg, words):
  with pytest.raises(ValueError) as e:
    configs.validate(get_config(arg))
  assert all(w in str(e.value) for w in words), str(e.value)
  assert "change one of them" in str(e.value) and "\n" not in str(e.value)


def test_workers_and_slices_that_do_not_divide_are_named():
  with pytest.raises(ValueError, match="workers=3 cannot be divided evenly among 2 slices; make workers a multiple of 2"):
    configs.make_workers(get_config("workers=3"), chips(2, 4))
  with pytest.raises(ValueError, match="mesh: fsdp=4 x tensor=2 needs 8 devices .* straddles slices, and a slice has 4"):
    configs.make_workers(get_config("workers=4,mesh.fsdp=4,mesh.tensor=2"), chips(2, 4))
  with pytest.raises(ValueError, match="mesh: worker=3 positions .* 2 slices"):
    configs.make_workers(get_config("workers=6,mesh.worker=3"), chips(2, 4))


TOPOLOGY = """
import json, sys
from jax.experimental import topologies
from fgd_jax import config as configs, sharding
from fgd_jax.default_config import get_config
out = []
for name, slices, arg in json.loads(sys.argv[1]):
  devices = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices).devices
  workers = configs.make_workers(get_config(arg), devices)
  out.append([dict(workers.mesh.shape), [[getattr(d, "slice_index", 0), *d.coords] for d in workers.mesh.devices.flat]])
print("RESULT" + json.dumps(out))
"""


def test_meshes_of_real_topologies():
  """Compile-only TPU devices: positions are chosen and laid out by slice, and neighbours in a worker are on the torus."""
  pytest.importorskip("libtpu")
  cases = [("v5e:2x2", 2, "workers=4,mesh.fsdp=2"), ("v5e:2x2", 2, "workers=6"), ("v5p:2x2x2", 1, "workers=4,mesh.fsdp=2"),
           ("v5e:2x4", 1, "workers=2,mesh.fsdp=2,mesh.tensor=2")]
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
         "PYTHONPATH": ROOT}
  done = subprocess.run([sys.executable, "-c", TOPOLOGY, json.dumps(cases)], env=env, capture_output=True, text=True,
                        timeout=300)
  assert done.returncode == 0, done.stderr[-2000:]
  two, six, v5p, v5e = json.loads(done.stdout.split("RESULT")[1])
  assert two[0] == {"worker": 4, "fsdp": 2, "tensor": 1}
  assert [place[0] for place in two[1]] == [0, 0, 0, 0, 1, 1, 1, 1]
  assert six[0]["worker"] == 6 and [place[0] for place in six[1]] == [0, 0, 0, 1, 1, 1]  # one chip of each slice is unused
  for shape, places in (two, v5p, v5e):
    assert len({tuple(p) for p in places}) == len(places)
    for a, b in zip(places[::2], places[1::2]):  # the two devices along the innermost axis above 1
      assert sum(abs(x - y) for x, y in zip(a, b)) == 1, (shape, a, b)
