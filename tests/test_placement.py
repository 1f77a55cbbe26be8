"""No mesh, one worker a slot, several a slot, fsdp inside: same numbers, and only the counted bytes in the program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fgd_jax as fgd

M, H, BATCH = 8, 3, 4
METHODS = {
    "diloco": lambda: fgd.methods.make("diloco"),
    "data_parallel": lambda: fgd.methods.make("data_parallel"),
    "GlobalM1LocalM2": lambda: fgd.methods.make("GlobalM1LocalM2"),
    "LocalM1M2": lambda: fgd.methods.make("LocalM1M2"),
    "ring": lambda: fgd.methods.make("fgd", mix1="ring", mix2="ring", outer_lr=0.5, outer_momentum=0.8),
    "striped_pairs": lambda: fgd.methods.make("fgd", mix1="striped_pairs", mix2="identity"),
    "one_peer": lambda: fgd.methods.make("fgd", mix1="one_peer_exponential", mix2="one_peer_hypercube"),
    "striped_hypercube": lambda: fgd.methods.make("fgd", mix1="striped_hypercube", mix2="striped_hypercube"),
    "random_groups": lambda: fgd.methods.make("fgd", mix1="global", mix2=("random_groups", {"group_size": 4})),
    "streaming": lambda: fgd.methods.make("streaming_diloco", fragments=3, order="flat", delay=1),
    "noloco": lambda: fgd.methods.make("noloco", group_size=4),
    "gasloc": lambda: fgd.methods.make("gasloc", topology="two_random_pairs", inner_steps=(3, 3, 2, 1, 3, 0, 3, 3)),
}


def inner_of(name):
  """AdamW with DiLoCo; elsewhere momentum SGD, which compiles faster."""
  return optax.adamw(0.02) if name == "diloco" else optax.sgd(0.05, momentum=0.9)


def loss_fn(params, batch, rng):
  """An ordinary two-layer model with noise from the worker's rng."""
  hidden = jnp.tanh(batch["x"] @ params["in"]["kernel"] + params["in"]["bias"])
  hidden = hidden + 0.1 * jax.random.normal(rng, hidden.shape, hidden.dtype)
  return jnp.mean((hidden @ params["out"]["kernel"] - batch["y"]) ** 2)


def params_of(dtype):
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda shape: rng.normal(size=shape).astype(dtype),
                      {"in": {"kernel": (4, 8), "bias": (8,)}, "out": {"kernel": (8, 2)}},
                      is_leaf=lambda x: isinstance(x, tuple))


def batch_of(r, dtype, m=M):
  rng = np.random.default_rng(100 + r)
  return {"x": rng.normal(size=(m, H, BATCH, 4)).astype(dtype), "y": rng.normal(size=(m, H, BATCH, 2)).astype(dtype)}


def workers_on(devices):
  if devices is None:
    return fgd.Workers(M)
  return fgd.Workers(M, jax.make_mesh((devices,), ("worker",), devices=jax.devices()[:devices]))


@functools.cache
def trajectory(name, devices, dtype, rounds):
  """Params and loss after each round, on NumPy arrays."""
  with jax.enable_x64(dtype == "float64"):
    init, round_fn = fgd.build_round(METHODS[name](), loss_fn, inner_of(name), workers=workers_on(devices), seed=1)
    state, out = init(params_of(dtype)), []
    for r in range(rounds):
      state, metrics = round_fn(state, batch_of(r, dtype))
      out.append(jax.tree.map(np.asarray, (state.params, metrics["loss"])))
    return out


def largest(a, b):
  """The largest difference, relative to values above 1."""
  return max(np.max(np.abs(x - y) / np.maximum(1, np.abs(y)), initial=0)
             for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("name,devices", [
    *((n, d) for n in ("diloco", "GlobalM1LocalM2") for d in (1, 2, 4, 8)),
    *((n, d) for n in ("data_parallel", "ring") for d in (2, 4, 8)),
    *((n, 8) for n in ("striped_pairs", "random_groups")),
    ("LocalM1M2", 1), ("LocalM1M2", 8), ("one_peer", 4), ("striped_hypercube", 2)])
def test_placements_agree_in_float64(name, devices):
  """Design 3.1: 1e-12 after one round, 1e-9 after five."""
  rounds = 5 if devices in (1, 8) or name in ("diloco", "ring", "one_peer") else 2
  want, got = trajectory(name, None, "float64", 5), trajectory(name, devices, "float64", rounds)
  assert got[0][0]["in"]["kernel"].dtype == np.float64
  assert largest(got[0], want[0]) < 1e-12
  assert largest(got, want[:rounds]) < 1e-9


@pytest.mark.parametrize("name", ["GlobalM1LocalM2", "ring"])
def test_placements_agree_in_float32(name):
  want, got = trajectory(name, None, "float32", 1), trajectory(name, 8, "float32", 1)
  assert largest(got[0], want[0]) < 1e-5


def test_workers_differ():
  """The comparison above is about something: losses and (for gossip) parameters are not the same for all workers."""
  params, loss = trajectory("ring", None, "float64", 5)[-1]
  assert np.min(np.std(loss, axis=0)) > 1e-4
  assert np.std(params["out"]["kernel"], axis=0).min() > 1e-4


def test_dropped_workers_on_a_mesh(x64):
  """`alive` gives the same numbers on 8 devices, also with NaN in the dropped worker's batch."""
  out = []
  for devices in (None, 8):
    init, round_fn = fgd.build_round(METHODS["GlobalM1LocalM2"](), loss_fn, optax.sgd(0.1), workers=workers_on(devices))
    state = init(params_of("float64"))
    for r in range(3):
      batch = batch_of(r, "float64")
      batch["x"][3] = np.nan
      state, _ = round_fn(state, batch, np.arange(M) != 3)
    out.append(jax.tree.map(lambda x: np.delete(np.asarray(x), 3, 0), state.params))
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(out[1]))
  assert largest(out[1], out[0]) < 1e-12


# --- sharding inside a worker ---------------------------------------------------------------------------------------


RULES = (("out/kernel", PartitionSpec("fsdp", None)), ("kernel", PartitionSpec(None, "fsdp")))


@functools.cache
def with_fsdp(name, shape):
  with jax.enable_x64(True):
    mesh = jax.make_mesh(shape, ("worker", "fsdp"), devices=jax.devices()[:shape[0] * shape[1]])
    init, round_fn = fgd.build_round(METHODS[name](), loss_fn, inner_of(name), workers=fgd.Workers(M, mesh), seed=1,
                                     param_sharding=RULES)
    first = init(params_of("float64"))
    placed = [(x.sharding, x.shape) for x in jax.tree.leaves(first[:3])]
    state, metrics = round_fn(first, batch_of(0, "float64"))
    after = [(x.sharding, x.shape) for x in jax.tree.leaves(state[:3])]
    return jax.tree.map(np.asarray, (state.params, metrics["loss"])), placed + after


@pytest.mark.parametrize("name,shape", [("diloco", (4, 2)), ("GlobalM1LocalM2", (4, 2)),
                                        ("data_parallel", (4, 2)), ("diloco", (1, 8))])
def test_fsdp_gives_the_same_numbers(name, shape):
  """Design 3.1: 1e-10 after one round with fsdp above 1."""
  got, _ = with_fsdp(name, shape)
  assert largest(got, trajectory(name, None, "float64", 5)[0]) < 1e-10


def test_overlapped_permutations_with_fsdp():
  """A Mix1 that changes from round to round on (2 positions x 2 fsdp), four workers a position."""
  got, _ = with_fsdp("one_peer", (2, 2))
  assert largest(got, trajectory("one_peer", None, "float64", 5)[0]) < 1e-10


def test_optimizer_states_are_sharded_like_the_parameters():
  """Parameters, Adam moments and outer momentum: [worker, ..., fsdp] at the start and after a round."""
  _, leaves = with_fsdp("diloco", (4, 2))
  parts = {(8, 4, 8): (2, 4, 4), (8, 8, 2): (2, 4, 2), (8, 8): (2, 8)}  # in/kernel, out/kernel, in/bias
  seen = [shape for _, shape in leaves if shape in parts]
  assert len(seen) == 2 * 4 * 3  # params, mu, nu and the outer momentum, three leaves each
  for sharding, shape in leaves:
    assert isinstance(sharding, NamedSharding) and sharding.spec[0] == "worker"
    assert sharding.shard_shape(shape) == parts.get(shape, (2,))  # the step counters are [8]


def test_single_array_parameters_and_their_optimizer_are_sharded(x64):
  """A tree may be one array: the rule that shards it shards its moments too."""
  mesh = jax.make_mesh((4, 2), ("worker", "fsdp"))
  init, round_fn = fgd.build_round(METHODS["diloco"](), lambda w, b, k: jnp.sum(w * b), optax.adam(0.1),
                                   workers=fgd.Workers(4, mesh), param_sharding=[("", PartitionSpec("fsdp"))])
  state = init(np.zeros(6))
  for x in jax.tree.leaves(state[:3]):
    if x.shape == (4, 6):
      assert x.sharding.shard_shape(x.shape) == (1, 3)


def test_batches_may_be_sharded_inside_a_worker(x64):
  mesh = jax.make_mesh((4, 2), ("worker", "fsdp"))
  workers = fgd.Workers(M, mesh)
  init, round_fn = fgd.build_round(METHODS["diloco"](), loss_fn, optax.adamw(0.02), workers=workers, seed=1,
                                   param_sharding=RULES, batch_sharding=PartitionSpec("fsdp"))
  state, metrics = round_fn(init(params_of("float64")), batch_of(0, "float64"))
  got = jax.tree.map(np.asarray, (state.params, metrics["loss"]))
  assert largest(got, trajectory("diloco", None, "float64", 5)[0]) < 1e-10


def test_a_sharding_rule_with_too_many_axes_is_refused():
  mesh = jax.make_mesh((4, 2), ("worker", "fsdp"))
  init, _ = fgd.build_round(METHODS["diloco"](), loss_fn, optax.sgd(0.1), workers=fgd.Workers(M, mesh),
                            param_sharding=[("bias", PartitionSpec(None, "fsdp"))])
  with pytest.raises(ValueError, match="in/bias"):
    init(params_of("float32"))


# --- meshes as users make them --------------------------------------------------------------------------------------


def test_explicit_axes_of_make_mesh_work_with_an_ordinary_model(x64):
  """jax.make_mesh gives Explicit axes, in which this gather and product would not trace; Workers takes them."""
  mesh = jax.make_mesh((8,), ("worker",), axis_types=(jax.sharding.AxisType.Explicit,))
  def loss(params, batch, rng):
    x = params["table"][batch]
    return jnp.mean((x @ params["table"].T) ** 2) + jnp.mean(jnp.einsum("bd,de->be", x, params["w"]))
  rng = np.random.default_rng(0)
  params, out = {"table": rng.normal(size=(11, 4)), "w": rng.normal(size=(4, 4))}, []
  tokens = rng.integers(0, 11, size=(M, H, BATCH)).astype(np.int32)
  for workers in (fgd.Workers(M), fgd.Workers(M, mesh)):
    init, round_fn = fgd.build_round(METHODS["GlobalM1LocalM2"](), loss, optax.adam(0.01), workers=workers)
    state, metrics = round_fn(init(params), tokens)
    out.append(jax.tree.map(np.asarray, (state.params, metrics["loss"])))
  assert largest(out[1], out[0]) < 1e-12


def test_params_that_live_on_the_mesh_are_accepted(x64):
  """Users often initialise on the mesh (replicated, or on another device): same numbers, and their arrays stay."""
  mesh = jax.make_mesh((8,), ("worker",))
  for sharding in (NamedSharding(mesh, PartitionSpec()), jax.sharding.SingleDeviceSharding(jax.devices()[3])):
    params = jax.device_put(params_of("float64"), sharding)
    init, round_fn = fgd.build_round(METHODS["diloco"](), loss_fn, optax.adamw(0.02), workers=workers_on(8), seed=1)
    state, metrics = round_fn(init(params), batch_of(0, "float64"))
    got = jax.tree.map(np.asarray, (state.params, metrics["loss"]))
    assert largest(got, trajectory("diloco", 8, "float64", 5)[0]) == 0
    assert not params["in"]["bias"].is_deleted()


def test_batches_that_live_on_the_mesh_are_accepted(x64):
  mesh = jax.make_mesh((8,), ("worker",))
  batch = jax.device_put(batch_of(0, "float64"), NamedSharding(mesh, PartitionSpec("worker")))
  init, round_fn = fgd.build_round(METHODS["diloco"](), loss_fn, optax.adamw(0.02), workers=workers_on(8), seed=1)
  state, metrics = round_fn(init(params_of("float64")), batch)
  got = jax.tree.map(np.asarray, (state.params, metrics["loss"]))
  assert largest(got, trajectory("diloco", 8, "float64", 5)[0]) == 0


@pytest.mark.parametrize("make,words", [
    (lambda: fgd.Workers(8, jax.make_mesh((8,), ("data",))), ["worker", "data"]),
    (lambda: fgd.Workers(6, jax.make_mesh((4,), ("worker",), devices=jax.devices()[:4])), ["6", "4"]),
    (lambda: fgd.Workers(0), ["0"]), (lambda: fgd.Workers(2.0), ["2.0"]), (lambda: fgd.Workers(-1), ["-1"]),
])
def test_impossible_placements_are_refused(make, words):
  with pytest.raises(ValueError) as error:
    make()
  assert all(word in str(error.value) for word in words), str(error.value)


# --- what crosses workers ------------------------------------------------------------------------------------------


SIZES = {"f32": 4, "f64": 8, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}
COLLECTIVE = re.compile(r"= (.*?) (all-reduce|collective-permute|all-gather|reduce-scatter|all-to-all)(-start)?\(")


class Program:
  """The collectives of an optimised HLO text: result bytes by kind, inside and outside of the inner loop."""

  def __init__(self, text):
    self.lines, name = {}, None
    for line in text.splitlines():
      head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
      if head:
        name = "ENTRY" if head.group(1) else head.group(2)
        self.lines[name] = []
      elif name and line.startswith("  "):
        self.lines[name].append(line)
    self.bodies = re.findall(r" while\(.*?body=%?([\w.\-]+)", text)

  def bytes(self, name):
    """{kind: bytes} of a computation and all it calls; a conditional counts its largest branch, a loop's body once."""
    total = {}
    for line in self.lines[name]:
      found = COLLECTIVE.search(line)
      if found:
        size = sum(SIZES[t] * int(np.prod([int(d) for d in dims.split(",") if d]))
                   for t, dims in re.findall(r"(\w+)\[([\d,]*)\]", found.group(1)))
        total[found.group(2)] = total.get(found.group(2), 0) + size
      branches = re.search(r"branch_computations=\{(.*?)\}", line)
      if branches:
        parts = [self.bytes(b.strip().lstrip("%")) for b in branches.group(1).split(",")]
        assert all(p == parts[0] for p in parts), parts
        called = parts[:1]
      else:
        called = [self.bytes(c) for c in re.findall(r"(?:body|calls|to_apply)=%?([\w.\-]+)", line)]
      for part in called:
        for kind, size in part.items():
          total[kind] = total.get(kind, 0) + size
    return total


def lowered(name, measure=(), measured=True):
  """The lowered round on 8 devices and its (overlapped, blocking) bytes."""
  _, round_fn = fgd.build_round(METHODS[name](), loss_fn, inner_of(name), workers=workers_on(8), measure=measure)
  state = round_fn.abstract_state(params_of("float32"))
  return (round_fn.lower(state, batch_of(0, "float32"), measured=measured),
          round_fn.traffic(state.params, batch_of(0, "float32")))


def program_of(name, measure=()):
  low, traffic = lowered(name, measure)
  return Program(low.compile().as_text()), traffic


def counted(program, name="ENTRY"):
  """2 (M-1)/M of what is all-reduced and once what is permuted; nothing else may cross workers."""
  found = program.bytes(name)
  assert set(found) <= {"all-reduce", "collective-permute"}, found
  return 2 * (M - 1) / M * found.get("all-reduce", 0) + found.get("collective-permute", 0)


@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("one_peer", "striped_hypercube")])
def test_only_the_counted_bytes_cross_workers(name):
  """The compiled round holds the counted bytes; but for data_parallel, nothing crosses workers in the inner loop."""
  program, (overlapped, blocking) = program_of(name)
  assert program.bodies
  inside = sum(counted(program, body) for body in program.bodies)
  if name == "data_parallel":
    assert overlapped == 0 and H * inside == pytest.approx(blocking) and counted(program) == pytest.approx(inside)
  elif name == "streaming":  # an outer loop over three equal fragments, each sent once
    assert 3 * counted(program) == pytest.approx(overlapped) and blocking == 0
    return
  else:
    assert inside == 0
    assert counted(program) == pytest.approx(overlapped + blocking)


def test_a_round_without_measure_has_no_collective_of_the_measure():
  """Rule 4.4: nothing but the mixes crosses workers; with measured=False the consensus is not computed either."""
  plain, (overlapped, blocking) = lowered("GlobalM1LocalM2")
  assert lowered("GlobalM1LocalM2", ("consensus",), measured=False)[0].as_text() == plain.as_text()
  program, _ = program_of("GlobalM1LocalM2", ("consensus",))
  assert sum(program.bytes("ENTRY").values()) > overlapped + blocking


@pytest.mark.parametrize("scan_layers", [False, True])
def test_the_llama_sharded_inside_a_worker_gives_the_same_numbers(x64, scan_layers):
  """An fsdp axis with the rules of sharding.LLAMA_RULES, against one device: 1e-10 after one round."""
  from fgd_jax import models, sharding
  model = models.make(models.LlamaConfig(vocab_size=16, dim=8, layers=2, heads=4, kv_heads=2, ffn_dim=16,
                                         scan_layers=scan_layers, param_dtype="float64"))
  params = model.init(jax.random.key(0))
  batch = {"tokens": np.random.default_rng(0).integers(0, 16, (4, 2, 4, 9), dtype=np.int32)}
  ends = []
  for mesh in (None, jax.make_mesh((4, 2), ("worker", "fsdp"))):
    init, round_fn = fgd.build_round(fgd.methods.make("GlobalM1LocalM2"), model.loss, optax.sgd(0.1),
                                     workers=fgd.Workers(4, mesh), **sharding.inside_worker(mesh))
    state, _ = round_fn(init(params), batch)
    ends.append(state.params)
  for a, b in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1])):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
  kernel = ends[1]["lm_head"]["kernel"]
  assert kernel.sharding.shard_shape(kernel.shape) == (1, 4, 16)
