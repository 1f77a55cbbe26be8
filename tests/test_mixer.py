"""Mixers carry out their matrix, on any placement, also with dropped workers; colouring and byte counts."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import fgd_jax as fgd
from fgd_jax.mixing import Context, exchange
from fgd_jax.mixing.exchange import colour

M = 8
TOPOLOGIES = ["identity", "global", "random_pairs", ("random_groups", {"group_size": 2}), "random_groups", "ring",
              "lazy_ring", "exponential", "one_peer_exponential", "hypercube", "one_peer_hypercube",
              "striped_hypercube", "striped_pairs"]
SHAPES = {"scalar": (), "vector": (7,), "nested": {"matrix": (3, 5), "cube": (2, 3, 1)}, "four": [(1, 2, 3, 2)]}


def name_of(topology):
  return topology if isinstance(topology, str) else f"{topology[0]}{topology[1]['group_size']}"


def workers_on(devices, count=M):
  if devices is None:
    return fgd.Workers(count)
  return fgd.Workers(count, jax.make_mesh((devices,), ("worker",), devices=jax.devices()[:devices]))


def stack_of(m, dtype=np.float64, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda shape: rng.normal(size=(m, *shape)).astype(dtype), SHAPES,
                      is_leaf=lambda x: isinstance(x, tuple))


def path(keys):
  return "/".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in keys)


@functools.cache
def overlapped(mixer, devices, count, static):
  """jit of finish(start) on (stack, alive, choice); on a mesh the permutation is part of the program."""
  workers = workers_on(devices, count)

  def body(stack, ids, alive, choice):
    ctx = Context(workers.placement, jnp.int32(0), ids, alive, {"mix": choice if static is None else static})
    return mixer.finish(mixer.start(stack, ctx), stack, ctx)

  run = workers.spmd(body, stacks=2)
  return jax.jit(lambda stack, alive, choice: run(stack, jnp.arange(count, dtype=jnp.int32), alive, choice))


@functools.cache
def blocking(mixer, devices, count):
  """jit of the mixer's call for one worker, as a method makes it, on (stack, alive, choice)."""
  workers = workers_on(devices, count)

  def body(stack, ids, alive, choice):
    ctx = Context(workers.placement, jnp.int32(0), ids, alive, {"mix": choice})
    return workers.each(lambda x, worker: mixer(x, ctx._replace(worker=worker)), stack, ids)

  run = workers.spmd(body, stacks=2)
  return jax.jit(lambda stack, alive, choice: run(stack, jnp.arange(count, dtype=jnp.int32), alive, choice))


def apply(mixer, devices, r, stack, alive=None):
  """(finish(start), blocking call) of round r."""
  count = mixer.topology.workers
  alive = np.ones(count, bool) if alive is None else alive
  choice = mixer.topology.choice(r)
  static = choice if mixer.varying and devices not in (None, 1) else None
  stack = jax.device_put(stack, workers_on(devices, count).stacked())
  return (overlapped(mixer, devices, count, static)(stack, alive, np.int32(choice)),
          blocking(mixer, devices, count)(stack, alive, np.int32(choice)))


def product(mixer, r, stack, alive=None):
  """W x leaf by leaf in float64; a dropped worker's value reaches nobody and stays."""
  def leaf(keys, x):
    kwargs = {"stripe": mixer.stripe_of(path(keys))} if mixer.topology.name.startswith("striped") else {}
    w = mixer.matrix(r, alive=alive, **kwargs)
    live = np.ones(len(x), bool) if alive is None else alive
    keep = np.reshape(live, (-1,) + (1,) * (x.ndim - 1))
    mixed = np.tensordot(w, np.where(keep, x, 0).astype(np.float64), axes=1)
    return np.where(keep, mixed, x.astype(np.float64))

  return jax.tree_util.tree_map_with_path(leaf, stack)


def assert_close(got, want, **tolerance):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for (keys, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want)):
    np.testing.assert_allclose(np.asarray(a).astype(np.float64), b, err_msg=path(keys), **tolerance)


FOUR = [t for t in TOPOLOGIES if t != "random_groups"]
CASES = [(t, 4, d) for t in FOUR for d in (None, 4)] + [("ring", 4, 1), ("random_pairs", 4, 1), ("global", 4, 1)]
CASES += [(t, 4, 2) for t in ("global", "random_pairs", "ring", "exponential", "one_peer_exponential", "striped_pairs")]
CASES += [(t, 8, d) for t in TOPOLOGIES for d in ((None,) if name_of(t).startswith("random_groups") else (None, 8))]
CASES += [("random_groups", 8, 8), ("random_pairs", 8, 4), ("one_peer_exponential", 8, 4), ("striped_hypercube", 8, 2)]
CASES += [("random_pairs", 5, None), ("random_pairs", 5, 5), ("one_peer_exponential", 6, 3), ("random_pairs", 6, 2),
          (("random_groups", {"group_size": 3}), 6, 6), ("torus", 9, 3), ("torus", 9, None), ("exponential", 7, 7),
          ("striped_pairs", 3, 3), ("ring", 2, 2), ("global", 3, 3), ("random_pairs", 1, None), ("ring", 1, 1)]


@pytest.mark.parametrize("topology,m,devices", CASES, ids=[f"{name_of(t)}-{m}-{d}" for t, m, d in CASES])
def test_exchange_is_the_matrix_product(x64, topology, m, devices):
  """Overlapped and blocking use; then masks: NaN and infinities of dropped workers never spread."""
  mixer = fgd.mixing.make(topology, workers=m, seed=7)
  stack = stack_of(m)
  for r in (0, 1):
    for got in apply(mixer, devices, r, stack):
      assert_close(got, product(mixer, r, stack), atol=1e-13, rtol=0)
      assert all(x.dtype == jnp.float64 for x in jax.tree.leaves(got))
  for dropped, bad in (((m // 2,), np.nan), ((0, 1), np.inf), (range(1, m), np.nan)):
    alive = ~np.isin(np.arange(m), list(dropped))
    stack = stack_of(m)
    for x in jax.tree.leaves(stack):
      x[~alive] = bad
    for got in apply(mixer, devices, 1, stack, alive):
      assert_close(got, product(mixer, 1, stack, alive), atol=1e-13, rtol=0)
      assert all(np.all(np.isfinite(np.asarray(x)[alive])) for x in jax.tree.leaves(got))


def test_nobody_alive_changes_nothing(x64):
  for topology in ("global", "random_pairs", "ring"):
    mixer, stack = fgd.mixing.make(topology, workers=M, seed=7), stack_of(M)
    for devices in (None, 8):
      for got in apply(mixer, devices, 1, stack, np.zeros(M, bool)):
        assert_close(got, stack, atol=1e-15, rtol=0)


@pytest.mark.parametrize("devices", [None, 8])
@pytest.mark.parametrize("topology", ["global", "random_pairs", "ring", "exponential"], ids=name_of)
def test_low_precision_leaves_keep_their_dtype(topology, devices):
  """bfloat16 (8 bits) and float32 leaves in one tree; the error is a few roundings of the leaf's own dtype."""
  mixer = fgd.mixing.make(topology, workers=M, seed=2)
  stack = {"half": jnp.asarray(stack_of(M)["vector"], jnp.bfloat16), "single": stack_of(M, np.float32)["vector"]}
  host = jax.tree.map(np.asarray, stack)
  for got in apply(mixer, devices, 1, stack):
    assert got["half"].dtype == jnp.bfloat16 and got["single"].dtype == jnp.float32
    want = product(mixer, 1, host)
    np.testing.assert_allclose(np.asarray(got["half"], np.float64), want["half"], atol=4 * 2.0 ** -8)
    np.testing.assert_allclose(np.asarray(got["single"], np.float64), want["single"], atol=4 * 2.0 ** -23)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("topology", [t for t in TOPOLOGIES if t != "identity"], ids=name_of)
def test_equal_workers_are_a_fixed_point(topology, dtype):
  """Rows of W sum to 1: where all workers agree, mixing may not move them, also not by a rounding that piles up."""
  mixer = fgd.mixing.make(topology, workers=M, seed=2)
  start = np.asarray(jnp.asarray(np.linspace(1, 2, 257)[:-1], dtype))
  stack = {"x": np.broadcast_to(start, (M, 256))}
  for r in range(20):
    choice = np.int32(mixer.topology.choice(r))
    stack = jax.tree.map(np.asarray, overlapped(mixer, None, M, None)(stack, np.ones(M, bool), choice))
  error = np.abs(stack["x"].astype(np.float64) / start.astype(np.float64) - 1).max()
  eps = float(jnp.finfo(dtype).eps)
  assert error <= 4 * eps, f"moved by {error / eps:.1f} eps in 20 rounds"


@pytest.mark.parametrize("topology,m", [("global", 8), ("random_pairs", 8), ("ring", 8), ("lazy_ring", 8), ("torus", 9),
                                        ("exponential", 16), (("random_groups", {"group_size": 3}), 6)])
def test_bfloat16_mixing_keeps_the_mean(topology, m):
  """Rounding to nearest is unbiased: the mean over m * 4096 values moves by far less than half a unit of 2^-8."""
  mixer = fgd.mixing.make(topology, workers=m, seed=2)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(m, 4096)) + 1.5, jnp.bfloat16)
  before, stack = float(jnp.mean(x.astype(jnp.float32))), {"x": x}
  for r in range(30):
    stack = overlapped(mixer, None, m, None)(stack, np.ones(m, bool), np.int32(mixer.topology.choice(r)))
  after = float(jnp.mean(stack["x"].astype(jnp.float32)))
  assert after == pytest.approx(before, rel=2.0 ** -9)


def test_overlapped_and_blocking_use_are_the_same_numbers(x64):
  for topology, devices in itertools.product(("random_pairs", "ring", "global"), (None, 8)):
    mixer = fgd.mixing.make(topology, workers=M, seed=7)
    a, b = apply(mixer, devices, 2, stack_of(M))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
      np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_runtime_choice_cannot_be_launched_ahead_on_a_mesh():
  mixer = fgd.mixing.make("random_pairs", workers=M)
  with pytest.raises(ValueError, match="mesh"):
    overlapped(mixer, 8, M, None)(stack_of(M, np.float32), np.ones(M, bool), np.int32(0))


# --- colouring ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count,devices", [(4, 2), (6, 3), (8, 8), (8, 4), (8, 2), (8, 1), (12, 4), (16, 4), (24, 3)])
def test_colouring_splits_a_permutation(count, devices):
  """K moves, each a permutation of the positions; their edges are exactly worker source[m] -> worker m."""
  rng, slots = np.random.default_rng(0), count // devices
  line = np.arange(count)
  special = [line, np.roll(line, 1), np.roll(line, count // 2), line[::-1]]
  for source in [*special, *(rng.permutation(count) for _ in range(40))]:
    moves = colour(tuple(int(s) for s in source), devices)
    assert len(moves) == slots
    edges = {}
    for move in moves:
      assert sorted(s for s, _ in move.pairs) == sorted(d for _, d in move.pairs) == list(range(devices))
      for s, d in move.pairs:
        edges[d * slots + move.recv[d]] = s * slots + move.send[s]
    assert edges == {m: int(s) for m, s in enumerate(source)}


def test_colouring_refuses_what_is_no_permutation():
  with pytest.raises(ValueError, match="permutation"):
    colour((0, 0, 0, 1), 2)


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology,m,models", [
    ("identity", 8, 0), ("global", 8, 2 * 7 / 8), ("global", 2, 1), ("global", 5, 2 * 4 / 5), ("random_pairs", 8, 1),
    ("random_pairs", 5, 1), ("random_groups", 8, 3), (("random_groups", {"group_size": 2}), 8, 1),
    (("random_groups", {"group_size": 8}), 8, 2 * 7 / 8), ("ring", 8, 2), ("ring", 2, 1), ("lazy_ring", 8, 2),
    ("torus", 9, 4), ("exponential", 8, 3), ("exponential", 5, 3), ("one_peer_exponential", 8, 1), ("hypercube", 8, 3),
    ("one_peer_hypercube", 8, 1), ("striped_hypercube", 8, 1), ("striped_pairs", 8, 1), ("global", 1, 0),
    ("ring", 1, 0), ("random_pairs", 1, 0), ("random_pairs", 2, 1)])
def test_bytes_sent(topology, m, models):
  """2 (M-1)/M S for an all-reduce, S for each message a worker sends; S counts each leaf in its own dtype."""
  tree = {"a": jax.ShapeDtypeStruct((3, 5), jnp.float32), "b": jax.ShapeDtypeStruct((7,), jnp.bfloat16),
          "c": jax.ShapeDtypeStruct((), jnp.float32)}
  assert fgd.mixing.make(topology, workers=m).bytes_sent(tree) == pytest.approx(models * (60 + 14 + 4), rel=1e-15)


# --- several positions in each of several slices -----------------------------------------------------------------------


@pytest.mark.parametrize("source", [
    (1, 0, 4, 5, 2, 3, 7, 6), (1, 0, 3, 2, 6, 7, 4, 5), (2, 0, 1, 5, 3, 7, 4, 6), (1, 2, 3, 4, 5, 6, 7, 0)])
def test_permutations_are_split_so_that_slices_run_alike(source):
  """Positions 0-3 and 4-7 are slices: every part has the same pairs inside each, and together they are the permutation."""
  pairs = tuple((s, d) for d, s in enumerate(source))
  got = {}
  for part, keep in exchange.uniform(pairs, (0,) * 4 + (1,) * 4):
    assert len({s for s, _ in part}) == len({d for _, d in part}) == len(part)
    inside = [{(s - first, d - first) for s, d in part if first <= s < first + 4 and first <= d < first + 4}
              for first in (0, 4)]
    assert inside[0] == inside[1]
    got.update({d: s for s, d in part if d in keep})
  assert got == {d: s for s, d in pairs}


def test_split_permutations_give_the_same_numbers():
  """All 14 rounds of random pairs on 8 positions in two slices, against the mixing matrix."""
  mesh = jax.make_mesh((8,), ("worker",), axis_types=(jax.sharding.AxisType.Auto,))
  mixer = fgd.mixing.make("random_pairs", workers=8, seed=4)
  placement = exchange.Placement(8, 8, (0,) * 4 + (1,) * 4)
  x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
  for choice in range(7):
    def mix(x, ids, choice=choice):
      ctx = Context(placement, jnp.int32(0), ids, jnp.ones(8, bool), {"mix": choice})
      return mixer.finish(mixer.start(x, ctx), x, ctx)

    f = jax.shard_map(mix, mesh=mesh, in_specs=PartitionSpec("worker"), out_specs=PartitionSpec("worker"), check_vma=False)
    r = next(r for r in range(200) if mixer.topology.choice(r) == choice)
    np.testing.assert_allclose(np.asarray(jax.jit(f)(x, jnp.arange(8))), mixer.matrix(r) @ x, rtol=1e-6, atol=1e-6)
