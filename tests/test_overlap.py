"""Forms of overlap: packed buffers, the ring in the scan, the host form. None of them changes the numbers."""

import json
import os
import re
import subprocess
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import fgd_jax as fgd
from fgd_jax import overlap
from fgd_jax.mixing.pack import Packing
from fgd_jax.mixing.ring import Ring

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
M, H = 4, 6
METHODS = {
    "GlobalM1LocalM2": {},
    "fgd": {"mix1": "one_peer_exponential", "mix2": "global"},
    "GlobalM1": {"mix_outer_state": "mix1"},
    "striped": {"mix1": "striped_pairs", "mix2": "identity"},
    "directed": {"mix1": ("lazy_ring", {}), "mix2": "identity"},
    "diloco": {},
}


def mesh_of(worker, fsdp=1):
  return jax.make_mesh((worker, fsdp), ("worker", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2,
                       devices=jax.devices()[:worker * fsdp])


def method_of(name):
  return fgd.methods.make(name if name in ("GlobalM1LocalM2", "GlobalM1", "diloco") else "fgd", **METHODS[name])


def loss_fn(params, batch, rng):
  hidden = jnp.tanh(batch["x"] @ params["a"]["kernel"] + params["a"]["bias"])
  return jnp.mean((hidden @ params["b"]["kernel"] * params["gain"].astype(hidden.dtype) - batch["y"]) ** 2)


def params_of():
  rng = np.random.default_rng(0)
  return {"a": {"kernel": rng.normal(size=(4, 8)), "bias": rng.normal(size=8)}, "b": {"kernel": rng.normal(size=(8, 2))},
          "gain": np.asarray(1.25, np.float32)}  # a scalar of another dtype has a buffer of its own


def run(name, worker, form, fsdp=1, rounds=2, dead=None):
  """Parameters, states and losses after some rounds; also the round."""
  rules = {"param_sharding": [("a/kernel", PartitionSpec(None, "fsdp")), ("b/kernel", PartitionSpec("fsdp"))],
           "batch_sharding": PartitionSpec("fsdp")} if fsdp > 1 else {}
  mesh = mesh_of(worker, fsdp) if worker else None
  init, round_fn = fgd.build_round(method_of(name), loss_fn, optax.adamw(0.02), workers=fgd.Workers(M, mesh), seed=3,
                                   overlap=form, **rules)
  state = init(params_of())
  alive = None if dead is None else np.arange(M) != dead
  for r in range(rounds):
    rng = np.random.default_rng(r)
    batches = {"x": rng.normal(size=(M, H, 4, 4)), "y": rng.normal(size=(M, H, 4, 2))}
    state, metrics = round_fn(state, batches, alive=alive if r else None)
  return [np.asarray(x) for x in jax.tree.leaves((state[:3], metrics["loss"]))], round_fn


def assert_close(got, want, tolerance):
  for a, b in zip(got, want, strict=True):
    single = 1e-6 if a.dtype == np.float32 else 0
    np.testing.assert_allclose(a, b, rtol=max(tolerance, single), atol=max(tolerance, single))


@pytest.mark.parametrize("name", METHODS)
def test_packed_form_is_bitwise_the_barrier_form(x64, name):
  want, _ = run(name, 4, "barrier")
  for a, b in zip(run(name, 4, "packed")[0], want, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name, worker, fsdp", [
    ("GlobalM1LocalM2", 4, 2), ("GlobalM1", 2, 2), ("fgd", 2, 2), ("striped", 4, 2), ("directed", 4, 2), ("directed", 2, 2)])
def test_packed_form_with_sharded_or_several_workers(x64, name, worker, fsdp):
  """Against one device without any exchange in flight: 1e-10 with fsdp above 1 (design 3.1)."""
  assert_close(run(name, worker, "packed", fsdp)[0], run(name, None, "auto")[0], 1e-10)


@pytest.mark.parametrize("name, worker, fsdp", [("GlobalM1LocalM2", 4, 1), ("GlobalM1", 4, 2)])
def test_ring_form_gives_the_true_mean(x64, name, worker, fsdp):
  assert_close(run(name, worker, "ring", fsdp)[0], run(name, None, "auto")[0], 1e-10)


@pytest.mark.parametrize("name, form", [
    ("GlobalM1LocalM2", "packed"), ("GlobalM1LocalM2", "ring"), ("GlobalM1LocalM2", "host"), ("directed", "packed")])
def test_a_dead_worker_keeps_its_own_values_in_every_form(x64, name, form):
  assert_close(run(name, 4, form, dead=2)[0], run(name, None, "auto", dead=2)[0], 1e-12)


@pytest.mark.parametrize("name, worker", [("GlobalM1LocalM2", 4), ("GlobalM1", 2), ("diloco", 4), ("striped", None)])
def test_host_form_is_bitwise_one_program(x64, name, worker):
  want, _ = run(name, worker, "barrier" if worker else "auto")
  for a, b in zip(run(name, worker, "host")[0], want, strict=True):
    np.testing.assert_array_equal(a, b)


def test_host_form_over_two_processes_hides_a_late_peer():
  """The scan ends while Mix1 is still waiting for the other process, in every round; numbers as in one program."""
  out = subprocess.run([sys.executable, "benchmarks/host_overlap.py", "--json", "--rounds=3", "--delay=1.5",
                        "--inner-steps=20", "--dim=64"], cwd=ROOT, capture_output=True, text=True, timeout=300,
                       env={**os.environ, "PYTHONPATH": ROOT, "XLA_FLAGS": ""})
  assert out.returncode == 0, out.stderr[-2000:]
  result = json.loads(out.stdout.splitlines()[-1])
  assert result["events"] == ["begin", "inner_done", "mix1_done", "land_done"]
  assert result["same_order_every_round"] and result["bitwise_equal"]


# --- the ring ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions, steps", [(2, 1), (2, 5), (3, 2), (5, 4), (5, 8), (8, 7), (8, 45)])
def test_ring_sums_exactly_and_alike_on_all_positions(positions, steps):
  ring = Ring(positions, steps)
  values = np.random.default_rng(1).integers(-1000, 1000, size=(positions, 2 * 5 * 3)).astype(np.float32)
  packing = Packing({}, {})

  def one(x):
    buffers = [packing.pack([("x", x[0])], lead=0, pieces=ring.pieces)]
    buffers, _ = lax.scan(lambda b, h: (ring.during(b, h), None), buffers, jnp.arange(steps))
    return packing.unpack(buffers[0], [("x", x)], lead=0)[0][None]

  f = jax.shard_map(one, mesh=mesh_of(positions), axis_names={"worker"}, in_specs=PartitionSpec("worker"),
                    out_specs=PartitionSpec("worker"), check_vma=False)
  np.testing.assert_array_equal(np.asarray(jax.jit(f)(values)), np.tile(values.sum(0), (positions, 1)))


@pytest.mark.parametrize("positions, steps", [(2, 1), (4, 100), (8, 7), (8, 100), (16, 29)])
def test_ring_sends_two_m_minus_one_over_m_of_the_buffer(positions, steps):
  """Useful hops: 2 (D-1)/D of the buffer, as any ring all-reduce; idle ones at the end add less than one round trip."""
  ring = Ring(positions, steps)
  segments, chunks = ring.pieces
  hops, useful = steps * ring.hops_per_step, 2 * (positions - 1) * segments
  assert useful <= hops < useful + 2 * (positions - 1)
  assert useful / (segments * chunks) == 2 * (positions - 1) / positions


# --- packing -----------------------------------------------------------------------------------------------------------


def test_packing_returns_every_leaf_and_gathers_nothing():
  mesh = jax.make_mesh((2, 2, 2), ("worker", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
  specs = {"a": PartitionSpec("fsdp", "tensor"), "b": PartitionSpec(None, ("fsdp", "tensor")), "c": PartitionSpec()}
  shapes = {"a": (4, 6), "b": (3, 8), "c": (5,)}
  rng = np.random.default_rng(0)
  tree = {k: jax.device_put(rng.normal(size=(2, *shape)).astype(np.float32),
                            NamedSharding(mesh, PartitionSpec("worker", *specs[k]))) for k, shape in shapes.items()}
  packing = Packing({"fsdp": 2, "tensor": 2}, specs)

  def both(tree):
    leaves = list(tree.items())
    buffer = packing.pack(leaves, lead=1)
    assert buffer.shape == (1, 4 * (4 * 6 // 4 + 3 * 8 // 4 + 5))  # a replicated leaf is in every device's part
    return dict(zip(tree, packing.unpack(buffer, leaves, lead=1)))

  f = jax.jit(jax.shard_map(both, mesh=mesh, axis_names={"worker"}, in_specs=PartitionSpec("worker"),
                            out_specs=PartitionSpec("worker"), check_vma=False))
  for k, x in f(tree).items():
    np.testing.assert_array_equal(np.asarray(x), np.asarray(tree[k]))
  assert not re.search(r"all-(gather|to-all|reduce)|collective-permute", f.lower(tree).compile().as_text())


def test_buffers_hold_the_leaves_of_one_stripe_and_dtype():
  mixer = fgd.mixing.make("striped_pairs", workers=4)
  shape = lambda dtype: jax.ShapeDtypeStruct((1, 10), dtype)
  leaves = [(f"layer_{i}", shape(np.float32)) for i in range(8)] + [("layer_0", shape(jnp.bfloat16))]
  ctx = fgd.mixing.Context(fgd.mixing.Placement(4, 4), 0, None, None, {}, packing=Packing({}, {}))
  groups = mixer._groups(leaves, ctx)
  assert sorted(i for group in groups for i in group) == list(range(9)) and [8] in groups
  for group in groups:
    assert len({(mixer.stripe_of(leaves[i][0]), str(leaves[i][1].dtype)) for i in group}) == 1
  assert len(groups) == 1 + len({mixer.stripe_of(path) for path, _ in leaves})
  assert mixer._groups(leaves, ctx._replace(packing=None)) == [[i] for i in range(9)]


def test_packed_form_sends_one_message_for_all_leaves():
  """GlobalM1 in one program: one all-reduce of all float64 leaves and one of the float32 leaf, nothing else."""
  with jax.enable_x64(True):
    init, round_fn = fgd.build_round(fgd.methods.make("GlobalM1"), loss_fn, optax.sgd(0.1),
                                     workers=fgd.Workers(4, mesh_of(4)), overlap="packed")
    shape = lambda *s: jax.ShapeDtypeStruct((M, H, 4, *s), np.float64)
    state = round_fn.abstract_state(jax.tree.map(jnp.asarray, params_of()))
    text = round_fn.lower(state, {"x": shape(4), "y": shape(2)}).as_text()
  assert len(re.findall("stablehlo.all_reduce", text)) == 2


def test_packed_program_does_not_grow_with_leaves_times_messages():
  """Four leaves more cost as many instructions with three messages (hypercube of 8 workers) as with two (ring)."""
  workers = fgd.Workers(8, mesh_of(8))

  def instructions(name, leaves):
    mixer = fgd.mixing.make(name, workers=8)

    def mix(stack, ids):
      ctx = fgd.mixing.Context(workers.placement, 0, ids, jnp.ones(8, bool), {}, packing=Packing({}, {}))
      return mixer.finish(mixer.start(stack, ctx), stack, ctx)

    stack = {str(i): jax.ShapeDtypeStruct((8, i + 2), np.float32) for i in range(leaves)}
    text = jax.jit(workers.spmd(mix, stacks=2)).lower(stack, jax.ShapeDtypeStruct((8,), np.int32)).as_text()
    return text.count(" = ")

  growth = {name: instructions(name, 6) - instructions(name, 2) for name in ("ring", "hypercube")}
  assert growth["hypercube"] == growth["ring"] > 0


# --- choice ------------------------------------------------------------------------------------------------------------


class Chip(NamedTuple):
  """As much of a device as the choice looks at."""

  id: int
  platform: str
  device_kind: str
  slice_index: int = 0
  process_index: int = 0


def plan_on(kind, method="GlobalM1LocalM2", form="auto", positions=4, workers=4, slices=1, steps=100, fsdp=1, platform="tpu",
            processes=1, **options):
  total = positions * fsdp
  chips = [Chip(i, platform, kind, i * slices // total, i * processes // total) for i in range(total)]
  devices = np.empty(total, object)
  devices[:] = chips
  where = fgd.Workers(workers)
  where.mesh = types.SimpleNamespace(devices=devices.reshape(positions, fsdp), axis_names=("worker", "fsdp"),
                                     shape={"worker": positions, "fsdp": fsdp})
  where.placement = fgd.mixing.Placement(workers, positions)
  return overlap.plan(form, fgd.methods.make(method, **options).bind(workers, 0), where, steps)


def test_form_by_hardware():
  """The table of README: what suits which hardware."""
  sparse = {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true"}
  v5e, v5p = "TPU v5 lite", "TPU v5"
  assert plan_on(v5p)[:3] == ("packed", sparse, "")
  assert plan_on("TPU v6 lite", fsdp=2)[:3] == ("packed", sparse, "")
  many = {"xla_max_concurrent_async_collective_permutes": "1000"}
  assert plan_on(v5p, "LocalM1M2")[:3] == ("barrier", many, "")
  assert plan_on(v5e)[:3] == ("ring", {}, "")
  assert plan_on(v5e, "LocalM1M2")[:3] == plan_on(v5e, "LocalM1M2", slices=2)[:3] == ("barrier", many, "")
  assert plan_on(v5p, "fgd", mix1="hypercube", mix2="identity")[:3] == ("packed", many, "")
  assert plan_on(v5e, slices=4)[:3] == ("packed", {}, "")
  assert plan_on(v5e, slices=2)[:3] == plan_on(v5p, slices=2)[:3] == ("ring", {}, "")
  assert plan_on("TPU7x")[:3] == ("packed", sparse, "")
  assert plan_on("TPU7x", fsdp=2)[:3] == ("ring", {}, "")
  assert plan_on(v5e, "diloco").form == "none"
  assert plan_on("NVIDIA H100", platform="gpu")[:2] == plan_on("NVIDIA H100", platform="gpu", fsdp=2)[:2] == (
      "packed", {"xla_gpu_experimental_parallel_collective_overlap_limit": "16"})
  assert plan_on("cpu", platform="cpu").form == "barrier"
  assert plan_on("cpu", platform="cpu", processes=4).form == "host"
  assert plan_on("cpu", platform="cpu", processes=4, fsdp=2).form == "barrier"


def test_exposed_mix1_is_said_at_the_start():
  assert "inner_steps=2 is below workers - 1 = 3" in plan_on("TPU v5 lite", steps=2).warning
  assert "one worker a position" in plan_on("TPU v5 lite", workers=8).warning


@pytest.mark.parametrize("kwargs, words", [
    ({"kind": "cpu", "form": "fast"}, ["overlap.form='fast'", "packed"]),
    ({"kind": "TPU v5 lite", "form": "host"}, ["host", "CPU processes", "tpu"]),
    ({"kind": "cpu", "platform": "cpu", "form": "host", "fsdp": 2}, ["host", "fsdp"]),
    ({"kind": "cpu", "platform": "cpu", "form": "host", "method": "data_parallel"}, ["host", "inner steps"]),
    ({"kind": "TPU v5 lite", "form": "ring", "method": "LocalM1M2"}, ["ring", "true mean"]),
    ({"kind": "TPU v5 lite", "form": "ring", "workers": 8}, ["ring", "one worker a position", "8 workers are on 4"]),
    ({"kind": "TPU v5 lite", "form": "ring", "steps": 2}, ["ring", "inner_steps=2", "workers - 1 = 3"]),
    ({"kind": "TPU v5 lite", "form": "ring", "positions": 1}, ["ring", "one position"]),
])
def test_impossible_forms_are_refused(kwargs, words):
  with pytest.raises(ValueError) as e:
    plan_on(**kwargs)
  assert all(word in str(e.value) for word in words), str(e.value)


def test_momentum_that_travels_with_sharded_parameters_is_sharded():
  """mix_outer_state: the packed buffer holds a device's shards of both, 2 x (4 x 8 / 2 + 8 x 2 / 2 + bias) float64."""
  with jax.enable_x64(True):
    _, round_fn = fgd.build_round(
        method_of("GlobalM1"), loss_fn, optax.sgd(0.1), workers=fgd.Workers(2, mesh_of(2, 2)), overlap="packed",
        param_sharding=[("a/kernel", PartitionSpec(None, "fsdp")), ("b/kernel", PartitionSpec("fsdp"))])
    shape = lambda *s: jax.ShapeDtypeStruct((2, H, 4, *s), np.float64)
    state = round_fn.abstract_state(jax.tree.map(jnp.asarray, params_of()))
    text = round_fn.lower(state, {"x": shape(4), "y": shape(2)}).compile().as_text()
  assert re.search(rf"f64\[{2 * (16 + 8 + 8)}\][^\n]* all-reduce\(", text), re.findall(r"\S+ all-reduce\(", text)


@pytest.mark.parametrize("slices", [(0, 0, 1, 0), (0, 1, 0, 1), (1, 1, 0, 0)])
def test_slices_in_disorder_are_refused(slices, monkeypatch):
  monkeypatch.setattr(fgd.Workers, "slices", property(lambda self: list(slices)))
  with pytest.raises(ValueError, match="each slice needs equally many"):
    fgd.Workers(4, mesh_of(4))


def test_forms_that_cannot_be_are_refused_before_any_state():
  for method, form, word in (("GlobalM1", "typo", "typo"), ("LocalM1M2", "ring", "mean"), ("data_parallel", "host", "host")):
    with pytest.raises(ValueError, match=word):
      fgd.build_round(fgd.methods.make(method), loss_fn, optax.sgd(0.1), workers=fgd.Workers(4, mesh_of(4)), overlap=form)
