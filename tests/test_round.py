"""The public round: state, metrics, rng, placement-free behaviour, compilation, shapes and refusals."""

import contextlib
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fgd_jax as fgd

M, H, BATCH = 4, 3, 4


def loss_fn(params, batch, rng):
  return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def params_of(dtype=np.float32):
  rng = np.random.default_rng(0)
  return {"w": rng.normal(size=(3, 2)).astype(dtype), "b": rng.normal(size=2).astype(dtype)}


def batch_of(r=0, m=M, steps=H, dtype=np.float32, batch=BATCH):
  rng = np.random.default_rng(50 + r)
  return {"x": rng.normal(size=(m, steps, batch, 3)).astype(dtype),
          "y": rng.normal(size=(m, steps, batch, 2)).astype(dtype)}


def build(method="GlobalM1LocalM2", loss=loss_fn, inner=None, workers=M, **kwargs):
  method = fgd.methods.make(method) if isinstance(method, str) else method
  workers = fgd.Workers(workers) if isinstance(workers, int) else workers
  return fgd.build_round(method, loss, inner or optax.adamw(0.01), workers=workers, **kwargs)


def mesh_of(devices, axis="worker"):
  return jax.make_mesh((devices,), (axis,), devices=jax.devices()[:devices])


@contextlib.contextmanager
def compilations():
  """Counts backend compilations."""
  seen, name = [], "/jax/core/compile/backend_compile_duration"
  listener = lambda event, duration, **kwargs: seen.append(event) if event == name else None
  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    yield seen
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)


# --- the documented example and the fields of the state -------------------------------------------------------------


def test_the_interface_as_documented():
  """Design 3.1, word for word."""
  method = fgd.methods.make("fgd", mix1="global", mix2="random_pairs", outer_lr=0.7, outer_momentum=0.9)
  init, round_fn = fgd.build_round(method, loss_fn, optax.adamw(1e-2), workers=fgd.Workers(8), seed=0, measure=())
  params = params_of()
  state = init(params)
  state, metrics = round_fn(state, batch_of(m=8))
  assert jax.tree.map(np.shape, fgd.mean_params(state)) == {"w": (3, 2), "b": (2,)}
  assert round_fn.method.mix1.matrix(0).shape == round_fn.method.mix2.matrix(3).shape == (8, 8)
  assert set(metrics) == {"loss", "bytes_overlapped", "bytes_blocking"}
  assert metrics["loss"].shape == (8, H)


def test_state_fields():
  init, round_fn = build()
  params = params_of()
  state = init(params)
  assert state._fields == ("params", "inner_opt_state", "method_state", "round")
  for r in range(3):
    assert type(state.round) is np.int32 and state.round == r
    for x in jax.tree.leaves(state[:3]):
      assert isinstance(x, jax.Array) and x.shape[0] == M and not x.weak_type
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    state, metrics = round_fn(state, batch_of(r))
  assert type(state.round) is np.int32 and state.round == 3
  assert isinstance(metrics["bytes_overlapped"], float) and isinstance(metrics["bytes_blocking"], float)
  assert jax.tree.map(lambda x: x.dtype, jax.tree.leaves(state.params)) == [np.float32] * 2


def test_workers_start_bitwise_equal():
  """User reports 1.1."""
  for workers in (fgd.Workers(8), fgd.Workers(8, mesh_of(8))):
    init, round_fn = build(workers=workers)
    state = init(params_of())
    for x, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(params_of()), strict=True):
      np.testing.assert_array_equal(np.asarray(x), np.broadcast_to(want, x.shape))


def keeps_params():
  """An inner optimizer whose state holds the parameters themselves."""
  def update(updates, state, params):
    return jax.tree.map(lambda g: -0.1 * g, updates), params
  return optax.GradientTransformation(lambda params: params, update)


@pytest.mark.parametrize("workers", [1, M])
@pytest.mark.parametrize("inner", [optax.adamw(0.1), keeps_params()], ids=["adamw", "keeps_params"])
def test_params_are_not_consumed(workers, inner):
  """`init` copies, so donation never deletes the caller's arrays, nor twice the same buffer."""
  params = jax.tree.map(jnp.asarray, params_of())
  before = jax.tree.map(np.asarray, params)
  if hasattr(inner.init(optax.LookaheadParams.init_synced(params)), "fast_state"):
    inner = optax.sgd(0.1, momentum=0.9)
  init, round_fn = build(inner=inner, workers=workers)
  for _ in range(2):
    state, _ = round_fn(init(params), batch_of(m=workers))
  for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(before)):
    assert not x.is_deleted()
    np.testing.assert_array_equal(x, y)


def test_params_on_a_one_device_mesh_are_not_consumed():
  params = jax.device_put(params_of(), jax.devices()[0])
  init, round_fn = build(workers=fgd.Workers(1, mesh_of(1)))
  round_fn(init(params), batch_of(m=1))
  assert not any(x.is_deleted() for x in jax.tree.leaves(params))


def test_a_donated_state_gets_a_clear_sentence():
  init, round_fn = build()
  state = init(params_of())
  round_fn(state, batch_of())
  with pytest.raises(ValueError, match="donated"):
    round_fn(state, batch_of())


def test_mean_and_eval_params(x64):
  init, round_fn = build("GlobalM1")
  state, _ = round_fn(init(params_of(np.float64)), batch_of(dtype=np.float64))
  stack = jax.tree.map(np.asarray, state.params)
  assert np.ptp(stack["b"], axis=0).max() > 0
  for got in (fgd.mean_params(state), round_fn.eval_params(state)):
    for k in stack:
      np.testing.assert_allclose(got[k], stack[k].mean(0), rtol=1e-14)
  round_fn(state, batch_of(dtype=np.float64))  # reading the mean does not consume the state


# --- measures -------------------------------------------------------------------------------------------------------


def spread(tree):
  """Mean over pairs of different workers of the squared distance."""
  stack = np.concatenate([np.asarray(x, np.float64).reshape(len(x), -1) for x in jax.tree.leaves(tree)], 1)
  pairs = itertools.combinations(range(len(stack)), 2)
  return np.mean([np.sum((stack[a] - stack[b]) ** 2) for a, b in pairs])


@pytest.mark.parametrize("workers", [lambda: fgd.Workers(M), lambda: fgd.Workers(M, mesh_of(2))])
def test_consensus_is_measured_where_the_bound_says(x64, workers):
  """consensus_inner of w at the end of the inner phase, consensus_outer of z'; `local` gives w itself as z'."""
  init, round_fn = build("GlobalM1", inner=optax.sgd(0.1), workers=workers(), measure=("consensus",))
  alone, local = build("local", inner=optax.sgd(0.1))
  w, _ = local(alone(params_of(np.float64)), batch_of(dtype=np.float64))
  state, metrics = round_fn(init(params_of(np.float64)), batch_of(dtype=np.float64))
  assert set(metrics) == {"loss", "bytes_overlapped", "bytes_blocking", "consensus_inner", "consensus_outer"}
  np.testing.assert_allclose(metrics["consensus_inner"], spread(w.params), rtol=1e-12)
  np.testing.assert_allclose(metrics["consensus_outer"], spread(state.params), rtol=1e-12)


def test_unmeasured_rounds_have_nothing_extra_and_the_same_numbers():
  init, round_fn = build("LocalM1M2", measure=("consensus", lambda w, z: {"norm": jnp.sum(z["b"] ** 2)}))
  _, plain = build("LocalM1M2")
  a, b, c = init(params_of()), init(params_of()), init(params_of())
  for r in range(3):
    a, with_measure = round_fn(a, batch_of(r))
    b, without = round_fn(b, batch_of(r), measured=False)
    c, never = plain(c, batch_of(r))
    assert set(with_measure) - set(without) == {"consensus_inner", "consensus_outer", "norm"}
    assert set(without) == set(never) == {"loss", "bytes_overlapped", "bytes_blocking"}
    np.testing.assert_allclose(with_measure["norm"], np.sum(np.asarray(a.params["b"]) ** 2), rtol=1e-5)
  for x, y, z in zip(*(jax.tree.leaves(s.params) for s in (a, b, c))):
    np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(y, z)


def test_equal_workers_have_consensus_exactly_zero():
  init, round_fn = build("diloco", measure=("consensus",))
  _, metrics = round_fn(init(params_of()), batch_of())
  assert float(metrics["consensus_outer"]) == 0 and float(metrics["consensus_inner"]) > 0


# --- loss, aux, rng -------------------------------------------------------------------------------------------------


def test_loss_and_aux():
  """metrics["loss"] [M, H] is the loss before each step; aux is stacked [M, H, ...]."""
  def with_aux(params, batch, rng):
    return loss_fn(params, batch, rng), {"accuracy": jnp.sum(params["b"]), "parts": (batch["y"][0], jnp.int32(7))}
  init, round_fn = build("local", with_aux, inner=optax.sgd(0.0))
  _, metrics = round_fn(init(params_of()), batch_of())
  p, batch = params_of(), batch_of()
  want = np.mean((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2, axis=(2, 3))
  np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
  aux = metrics["aux"]
  np.testing.assert_allclose(aux["accuracy"], np.full((M, H), p["b"].sum()), rtol=1e-6)
  np.testing.assert_array_equal(aux["parts"][0], batch["y"][:, :, 0])
  np.testing.assert_array_equal(aux["parts"][1], np.full((M, H), 7))


@pytest.mark.parametrize("workers", [lambda: fgd.Workers(4), lambda: fgd.Workers(4, mesh_of(4)),
                                     lambda: fgd.Workers(4, mesh_of(2))])
def test_rng_is_folded_by_worker_and_step_from_the_start(workers):
  """fold_in(fold_in(key(seed), worker), step); step goes on over rounds."""
  noisy = lambda params, batch, rng: (jnp.sum(params) * 0, jax.random.bits(rng, (2,)))
  init, round_fn = build("local", noisy, inner=optax.sgd(0.1), workers=workers(), seed=11)
  state = init(np.zeros(2, np.float32))
  for r in range(3):
    state, metrics = round_fn(state, np.zeros((4, H, 1), np.float32))
    for m, h in itertools.product(range(4), range(H)):
      key = jax.random.fold_in(jax.random.fold_in(jax.random.key(11), m), r * H + h)
      np.testing.assert_array_equal(metrics["aux"][m, h], jax.random.bits(key, (2,)))


def test_a_run_repeats_exactly():
  out = []
  for _ in range(2):
    init, round_fn = build("LocalM1M2", seed=5)
    state = init(params_of())
    for r in range(3):
      state, _ = round_fn(state, batch_of(r))
    out.append(state.params)
  np.testing.assert_array_equal(out[0]["w"], out[1]["w"])


# --- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["diloco", "GlobalM1LocalM2", "LocalM1M2", "data_parallel", "local", "GlobalM1"])
@pytest.mark.parametrize("m,steps", [(1, 1), (3, 1), (5, 2)])
def test_numbers_of_workers_and_steps(method, m, steps):
  init, round_fn = build(method, workers=m)
  state = init(params_of())
  for r in range(2):
    state, metrics = round_fn(state, batch_of(r, m=m, steps=steps))
  assert metrics["loss"].shape == (m, steps)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state.params))


def test_another_number_of_steps_compiles_again_and_goes_on():
  """H is read off the shape."""
  init, round_fn = build()
  state, _ = round_fn(init(params_of()), batch_of(steps=3))
  state, metrics = round_fn(state, batch_of(steps=5))
  assert metrics["loss"].shape == (M, 5) and state.round == 2


@pytest.mark.parametrize("parts", [2, 4])
def test_gradient_accumulation_equals_the_full_batch(x64, parts):
  """User reports 1.16: H still counts optimizer steps."""
  out = []
  for accumulate in (1, parts):
    init, round_fn = build("diloco", accumulate=accumulate)
    state = init(params_of(np.float64))
    for r in range(2):
      state, metrics = round_fn(state, batch_of(r, dtype=np.float64))
    out.append((state.params, metrics["loss"]))
  assert out[1][1].shape == (M, H)
  for x, y in zip(jax.tree.leaves(out[0]), jax.tree.leaves(out[1])):
    np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


def test_accumulation_averages_aux_and_splits_the_rng():
  def both(params, batch, rng):
    return jnp.mean(batch) * jnp.sum(params), {"mean": jnp.mean(batch), "u": jax.random.uniform(rng)}
  init, round_fn = build("local", both, inner=optax.sgd(0.0), accumulate=2, workers=2)
  batch = np.arange(2 * 2 * 4, dtype=np.float32).reshape(2, 2, 4)
  _, metrics = round_fn(init(np.ones(1, np.float32)), batch)
  np.testing.assert_allclose(metrics["aux"]["mean"], batch.mean(-1))
  assert len(np.unique(metrics["aux"]["u"])) == 4


class Pair(NamedTuple):
  first: object
  second: object


@pytest.mark.parametrize("params", [
    np.ones((2, 2), np.float32), [np.ones(2, np.float32), (np.ones((), np.float32),)],
    Pair(np.ones(3, np.float32), {"deep": {"er": [np.ones((1, 2, 1), np.float32)]}}),
    {"a": None, "b": np.ones(2, np.float32), "c": {}}, {"python": 1.5, "zero_d": np.float32(2)},
    {"empty": np.ones((0, 3), np.float32), "b": np.ones(1, np.float32)},
    {0: np.ones(2, np.float32), 1: np.ones(1, np.float32)},
    {"many": np.ones((1, 2, 1, 2, 3), np.float32), "jax": jnp.ones(2)},
], ids=["array", "list", "namedtuple", "none", "scalars", "empty", "intkeys", "rank5"])
@pytest.mark.parametrize("method", ["diloco", "LocalM1M2"])
def test_any_pytree(params, method):
  quadratic = lambda p, batch, rng: sum(jnp.sum((x - jnp.mean(batch)) ** 2) for x in jax.tree.leaves(p))
  init, round_fn = build(method, quadratic, inner=optax.adam(0.1), workers=3)
  state, _ = round_fn(init(params), np.ones((3, 2, 1), np.float32) * np.arange(3, dtype=np.float32)[:, None, None])
  assert jax.tree.structure(state.params) == jax.tree.structure(params)
  mean = fgd.mean_params(state)
  assert jax.tree.map(np.shape, mean) == jax.tree.map(np.shape, params)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(mean))


@pytest.mark.parametrize("method", ["diloco", "GlobalM1LocalM2", "LocalM1M2", "data_parallel"])
def test_bfloat16_params_keep_their_dtype(method):
  init, round_fn = build(method, inner=optax.adamw(0.01), measure=("consensus",))
  params = {"w": jnp.asarray(params_of()["w"], jnp.bfloat16), "b": jnp.asarray(params_of()["b"])}
  state = init(params)
  before = jax.tree.map(lambda x: x.dtype, state[:3])
  for r in range(2):
    state, metrics = round_fn(state, batch_of(r))
  assert jax.tree.map(lambda x: x.dtype, state[:3]) == before
  assert state.params["w"].dtype == jnp.bfloat16 and state.params["b"].dtype == np.float32
  size = 6 * 2 + 2 * 4 if method == "data_parallel" else (6 + 2) * 4  # what methods with an outer step send is float32
  assert metrics["bytes_blocking"] + metrics["bytes_overlapped"] == pytest.approx(
      size * {"diloco": 1.5, "GlobalM1LocalM2": 2.5, "LocalM1M2": 2, "data_parallel": 1.5 * H}[method])
  assert np.isfinite(metrics["consensus_inner"])


def test_float64_stays_float64(x64):
  init, round_fn = build("LocalM1M2")
  state, metrics = round_fn(init(params_of(np.float64)), batch_of(dtype=np.float64))
  assert all(x.dtype == np.float64 for x in jax.tree.leaves((state.params, metrics["loss"])))
  floats = [x.dtype for x in jax.tree.leaves(state[:3]) if jnp.issubdtype(x.dtype, jnp.floating)]
  assert set(floats) == {np.dtype("float64")}


@pytest.mark.parametrize("batch", [
    np.random.default_rng(0).normal(size=(M, H, 3)), np.ones((M, H, 3), np.int64), np.ones((M, H, 3), np.uint8),
    np.ones((M, H, 3), bool), np.ones((M, H, 3), np.uint64)], ids=["float64", "int64", "uint8", "bool", "uint64"])
@pytest.mark.parametrize("workers", [lambda: fgd.Workers(M), lambda: fgd.Workers(M, mesh_of(4))])
def test_numpy_batches_of_any_dtype(batch, workers):
  """NumPy's own float64 and int64 are what users pass; without x64 they become 32 bit."""
  loss = lambda p, b, k: jnp.sum(p["w"] ** 2) + jnp.sum(p["b"]) * jnp.mean(b)
  init, round_fn = build("diloco", loss, workers=workers())
  state = init(params_of())
  for _ in range(2):
    state, metrics = round_fn(state, batch)
  assert metrics["loss"].shape == (M, H) and np.all(np.isfinite(metrics["loss"]))


@pytest.mark.parametrize("inner", [
    optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.1, 0.0, 10)),
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 100))),
    optax.MultiSteps(optax.adam(0.1), 2), optax.masked(optax.sgd(0.1), {"w": True, "b": False}),
    optax.partition({"x": optax.adam(0.1), "y": optax.sgd(0.1, momentum=0.9)}, {"w": "x", "b": "y"}),
    optax.lion(0.01), optax.adafactor(0.01),
], ids=["inject", "chain", "multisteps", "masked", "partition", "lion", "adafactor"])
def test_any_optax_inner_optimizer(inner):
  """Each worker's run under `local` is a plain optax loop."""
  init, round_fn = build("local", inner=inner, workers=2)
  state = init(params_of())
  for r in range(2):
    state, _ = round_fn(state, batch_of(r, m=2))

  @jax.jit
  def step(w, s, batch):
    grads = jax.grad(loss_fn)(w, batch, None)
    updates, s = inner.update(grads, s, w)
    return optax.apply_updates(w, updates), s

  for m in range(2):
    w = jax.tree.map(jnp.asarray, params_of())
    s = inner.init(w)
    for r, h in itertools.product(range(2), range(H)):
      w, s = step(w, s, jax.tree.map(lambda x: x[m, h], batch_of(r, m=2)))
    for k in w:
      np.testing.assert_allclose(state.params[k][m], w[k], rtol=2e-5, atol=1e-6)


# --- compilation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method,devices,programs", [
    ("LocalM1M2", None, 1), ("GlobalM1LocalM2", 4, 1), ("LocalM1M2", 4, 3), ("diloco", 4, 1), ("LocalM1M2", 2, 3)])
def test_no_compilation_after_the_first_round(method, devices, programs):
  """At most one executable for each permutation of the bank (3 matchings at M=4), all made in the first call."""
  workers = fgd.Workers(M) if devices is None else fgd.Workers(M, mesh_of(devices))
  init, round_fn = build(method, workers=workers)
  state = init(params_of())
  with compilations() as first:
    state, _ = round_fn(state, batch_of())
  jax.block_until_ready(state.params)
  assert programs <= len(first) <= programs + 2
  with compilations() as later:
    for r in range(1, 12):
      state, _ = round_fn(state, batch_of(r))
  assert later == []
  if devices and method == "LocalM1M2":
    assert len({round_fn.method.mix1.matrix(r).tobytes() for r in range(12)}) == 3


def test_a_second_run_of_the_same_round_compiles_nothing():
  init, round_fn = build()
  round_fn(init(params_of()), batch_of())
  with compilations() as seen:
    round_fn(init(params_of()), batch_of(1), np.array([True, False, True, True]))
  assert len(seen) <= 3  # init may compile again, the round may not
  state, batch = init(jax.tree.map(jnp.asarray, params_of())), jax.tree.map(jnp.asarray, batch_of(2))
  jax.block_until_ready((state[:3], batch))
  with compilations() as seen:
    round_fn(state, batch)
  assert seen == []


def test_compile_makes_everything_beforehand():
  """A measured round is a second executable; `compile` makes both before the first round."""
  init, round_fn = build("LocalM1M2", workers=fgd.Workers(M, mesh_of(4)), measure=("consensus",))
  state = init(params_of())
  made = round_fn.compile(round_fn.abstract_state(params_of()), batch_of())
  assert len(made) == 2 * 3
  round_fn(init(params_of()), batch_of(), measured=False)  # the eager helpers of a first call
  with compilations() as seen:
    for r in range(8):
      state, _ = round_fn(state, batch_of(r), measured=r % 2 == 0)
  assert seen == []


def test_lower_takes_shapes_only():
  init, round_fn = build("LocalM1M2", workers=fgd.Workers(M, mesh_of(4)), measure=("consensus",))
  shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  abstract = round_fn.abstract_state(shapes(params_of()))
  concrete = init(params_of())
  for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(concrete), strict=True):
    assert a.shape == np.shape(b) and a.dtype == b.dtype
    if isinstance(b, jax.Array):
      assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
  assert isinstance(abstract.round, jax.ShapeDtypeStruct)
  lowered = round_fn.lower(abstract, shapes(batch_of()))
  assert isinstance(lowered, jax.stages.Lowered)
  assert lowered.as_text() == round_fn.lower(concrete, batch_of()).as_text()  # abstract counts as round 0
  bare = abstract._replace(**{f: shapes(getattr(abstract, f)) for f in ("params", "inner_opt_state", "method_state")})
  assert round_fn.lower(bare, shapes(batch_of())).as_text() == lowered.as_text()
  assert lowered.as_text() != round_fn.lower(abstract, shapes(batch_of()), measured=False).as_text()


def test_lower_uses_the_permutation_of_the_round():
  _, round_fn = build("LocalM1M2", workers=fgd.Workers(M, mesh_of(4)))
  abstract = round_fn.abstract_state(params_of())
  rounds = {round_fn.method.mix1.matrix(r).tobytes(): r for r in range(20)}
  texts = {round_fn.lower(abstract._replace(round=np.int32(r)), batch_of()).as_text() for r in rounds.values()}
  assert len(texts) == 3


@pytest.mark.parametrize("loop", ["map", "vmap"])
@pytest.mark.parametrize("method", ["GlobalM1LocalM2", "data_parallel"])
def test_inner_loops_give_the_same_numbers(x64, loop, method):
  out = []
  for how in ("auto", loop):
    init, round_fn = build(method, inner_loop=how)
    state, metrics = round_fn(init(params_of(np.float64)), batch_of(dtype=np.float64))
    out.append((state.params, metrics["loss"]))
  for x, y in zip(jax.tree.leaves(out[0]), jax.tree.leaves(out[1])):
    np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


def test_a_user_scan_inside_the_loss_works_on_a_mesh():
  """Rule 4.6: a scan with a plain zero carry in the loss, where check_vma would refuse it."""
  def loss(params, batch, rng):
    carry, _ = jax.lax.scan(lambda c, x: (c + jnp.sum(x @ params["w"] + params["b"]), None), jnp.zeros(()), batch["x"])
    return carry ** 2 / 1e3
  out = []
  for workers in (fgd.Workers(M), fgd.Workers(M, mesh_of(4)), fgd.Workers(M, mesh_of(2))):
    init, round_fn = build(loss=loss, workers=workers)
    state, _ = round_fn(init(params_of()), batch_of())
    out.append(np.asarray(state.params["w"]))
  np.testing.assert_allclose(out[1], out[0], rtol=1e-5)
  np.testing.assert_allclose(out[2], out[0], rtol=1e-5)


# --- refusals -------------------------------------------------------------------------------------------------------


def refusal(call):
  with pytest.raises(ValueError) as error:
    call()
  return str(error.value)


def test_rbg_is_refused():
  with jax.default_prng_impl("rbg"):
    assert "rbg" in refusal(build)


@pytest.mark.parametrize("batch,words", [
    ({}, ["batches"]), ({"x": np.ones((M + 1, H, 2)), "y": np.ones((M + 1, H, 2))}, ["x", "5", "workers=4"]),
    ({"x": np.ones((M, H, 2)), "y": np.ones((M, H + 1, 2))}, ["y", "inner steps"]),
    ({"x": np.ones(M)}, ["x", "inner steps"]),
    ({"x": np.ones((M, 0, 2))}, ["x", "(4, 0, 2)"]), ({"x": {"z": np.ones((2, H))}}, ["x/z", "(2, 3)"]),
], ids=["empty", "workers", "steps", "rank", "nosteps", "nested"])
def test_wrong_batches_are_refused(batch, words):
  init, round_fn = build()
  state = init(params_of())
  for call in (lambda: round_fn(state, batch), lambda: round_fn.lower(state, batch)):
    text = refusal(call)
    assert all(word in text for word in words), text
  round_fn(state, batch_of())  # a refused call consumed nothing


def test_accumulate_must_divide_the_batch():
  init, round_fn = build(accumulate=3)
  text = refusal(lambda: round_fn(init(params_of()), batch_of()))
  assert "accumulate=3" in text and "(4, 3, 4, 3)" in text
  assert "accumulate=0" in refusal(lambda: build(accumulate=0))


@pytest.mark.parametrize("params,words", [
    ({"w": np.ones((3, 2), np.float32), "n": np.ones(2, np.int32)}, ["n", "int32"]),
    ({"w": {"mask": np.ones(2, bool)}}, ["w/mask", "bool"]), ({}, ["params"]),
    ({"deep": {"w": np.ones(3)}}, ["float64", "x64"]),
])
def test_wrong_params_are_refused(params, words):
  text = refusal(lambda: build()[0](params))
  assert all(word in text for word in words), text


@pytest.mark.parametrize("weights", [[1, 2, 3], [1, 2, 3, 0], [1, 2, 3, -1], [1, 2, 3, float("nan")], []])
def test_bad_worker_weights_are_refused(weights):
  assert "worker_weights" in refusal(lambda: build("diloco", worker_weights=weights))


@pytest.mark.parametrize("call,words", [
    (lambda: build(measure=("consensu",)), ["measure", "consensu"]),
    (lambda: build(inner_loop="scan"), ["inner_loop", "scan"]),
    (lambda: fgd.build_round(fgd.methods.make("local"), loss_fn, optax.sgd(0.1), workers=8), ["workers", "8"]),
    (lambda: build(fgd.methods.make("fgd", mix1="hypercube"), workers=6), ["hypercube", "6"]),
    (lambda: build("nolocal"), ["nolocal"]), (lambda: fgd.Workers(M, mesh_of(4, "data")), ["worker"]),
    (lambda: fgd.Workers(6, mesh_of(4)), ["6", "4"]),
], ids=["measure", "inner_loop", "workers", "topology", "method", "mesh", "divide"])
def test_refusals_of_build(call, words):
  text = refusal(call)
  assert all(word in text for word in words), text


def test_alive_of_the_wrong_length_is_refused():
  init, round_fn = build()
  assert "alive" in refusal(lambda: round_fn(init(params_of()), batch_of(), [True] * 3))


def test_a_loss_that_is_no_scalar_is_refused():
  init, round_fn = build(loss=lambda p, b, k: jnp.ones(2) * jnp.sum(p["w"]))
  assert "scalar" in refusal(lambda: round_fn(init(params_of()), batch_of()))


def test_a_state_of_another_number_of_workers_is_refused():
  init, _ = build(workers=2)
  _, round_fn = build(workers=4)
  text = refusal(lambda: round_fn(init(params_of()), batch_of()))
  assert "4 workers" in text


def test_a_state_from_elsewhere_is_brought_to_the_placement():
  params, batch = {"w": np.ones(3, np.float32)}, np.ones((4, 2, 3), np.float32)
  loss = lambda p, b, rng: jnp.sum(p["w"] * b)
  ends = []
  for mesh in (None, jax.make_mesh((4,), ("worker",))):
    _, round_fn = fgd.build_round(fgd.methods.make("diloco"), loss, optax.adam(0.1), workers=fgd.Workers(4, mesh))
    init, _ = fgd.build_round(fgd.methods.make("diloco"), loss, optax.adam(0.1), workers=fgd.Workers(4))
    state, _ = round_fn(init(params), batch)
    ends.append(np.asarray(state.params["w"]))
  np.testing.assert_allclose(ends[0], ends[1], rtol=1e-6)


@pytest.mark.parametrize("call, words", [
    (lambda init, round_fn: round_fn({"w": np.ones(3)}, np.ones((2, 1, 3))), "takes the State"),
    (lambda init, round_fn: round_fn(init({"w": np.ones(3, np.float32)}), np.ones((2, 1, 3), np.float32),
                                     alive=[np.nan, 1]), "alive="),
    (lambda init, round_fn: fgd.build_round(round_fn.method, lambda p, b, r: 0.0, optax.sgd(1.0), workers=fgd.Workers(2),
                                            seed=-1), "seed=-1"),
])
def test_more_refusals(call, words):
  init, round_fn = fgd.build_round(fgd.methods.make("diloco"), lambda p, b, r: jnp.sum(p["w"] * b), optax.sgd(0.1),
                                   workers=fgd.Workers(2))
  with pytest.raises(ValueError, match=words):
    call(init, round_fn)


def test_disable_jit_gets_one_sentence():
  init, round_fn = fgd.build_round(fgd.methods.make("diloco"), lambda p, b, r: jnp.sum(p["w"] * b), optax.sgd(0.1),
                                   workers=fgd.Workers(2))
  state = init({"w": np.ones(3, np.float32)})
  with jax.disable_jit(), pytest.raises(ValueError, match="disable_jit"):
    round_fn(state, np.ones((2, 1, 3), np.float32))
