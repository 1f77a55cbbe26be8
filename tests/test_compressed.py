"""Codecs inside the methods: what is mixed, what is kept for the next round, and what is counted."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references as ref
from test_methods import INNER, data, gradient, least_squares

import fgd_jax as fgd

START = {"a": np.random.default_rng(99).normal(size=(3, 2)), "b": np.array([0.3, -0.2])}
CODECS = ["bf16", "int8", "int4", "e3m0", ("e3m0", {"stochastic": True}), ("topk", {"ratio": 0.5})]


def int8(x):
  """One block of a small array: absmax scale in float32, 127 levels, ties away from zero do not occur."""
  scale = np.float64(np.float32(np.abs(x).max()))
  return np.round(x / scale * 127) * scale / 127 if scale else x


def by_worker(compress):
  return lambda stack: np.stack([compress(x) for x in stack])


def build(method, m=3, devices=1, params=START, **kwargs):
  mesh = None if devices == 1 else jax.make_mesh((devices,), ("worker",))
  init, round_fn = fgd.build_round(method, least_squares, optax.sgd(0.1), workers=fgd.Workers(m, mesh), seed=3, **kwargs)
  return init(params), round_fn


def test_diloco_averages_what_each_worker_compressed(x64):
  batches = data(3, 4)
  state, round_fn = build(fgd.methods.make("diloco", codec="int8"))
  z, buf = dict(START), {k: np.zeros_like(v) for k, v in START.items()}
  for batch in batches:
    state, _ = round_fn(state, batch)
    w, _, _ = ref.phase(ref.stack(z, 3), None, batch, INNER["sgd"](), gradient)
    for k in z:
      z[k], buf[k] = ref.nesterov(z[k], by_worker(int8)(z[k] - w[k]).mean(0), buf[k], 0.7, 0.9)
      for worker in range(3):
        np.testing.assert_allclose(np.asarray(state.params[k])[worker], z[k], rtol=1e-11, atol=1e-13)


def test_data_parallel_compresses_gradients(x64):
  batches = data(3, 2)
  state, round_fn = build(fgd.methods.make("data_parallel", codec="int8"))
  w = ref.stack(START, 3)
  for batch in batches:
    state, metrics = round_fn(state, batch)
    for h in range(batch["x"].shape[1]):
      _, g = gradient(w, batch["x"][:, h], batch["y"][:, h])
      w = {k: w[k] - 0.1 * by_worker(int8)(g[k]).mean(0) for k in w}
    for k in START:
      np.testing.assert_allclose(state.params[k], w[k], rtol=1e-11, atol=1e-13)
  assert metrics["bytes_blocking"] == 3 * 2 * ((6 + 4) + (2 + 4))  # H steps, M - 1 messages; codes and a scale


@pytest.mark.parametrize("delay", [0, 2])
def test_streaming_compresses_before_the_mean(x64, delay):
  batches = data(3, 4, steps=6)
  state, round_fn = build(fgd.methods.make("streaming_diloco", fragments=["a", "b"], delay=delay, codec="int8", outer_lr=0.6,
                                           outer_momentum=0.8))
  want = ref.streaming(START, batches, 3, INNER["sgd"](), gradient, [[("a", None)], [("b", None)]], delay, 0.5, 0.6, 0.8,
                       compress=by_worker(int8))
  for batch, (z, _, _, _) in zip(batches, want):
    state, _ = round_fn(state, batch)
    for k in START:
      np.testing.assert_allclose(state.params[k], z[k], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("codec", CODECS)
def test_error_feedback_telescopes(x64, codec):
  """Outer SGD of rate 1 on constant outer gradients: z_0 - z_T = sum of what was sent = sum of gradients - last error."""
  slopes = np.random.default_rng(1).normal(size=(3, 3, 2))
  loss = lambda p, batch, rng: jnp.sum(p["a"] * batch["slope"][0])
  batch = {"slope": np.broadcast_to(slopes[:, None, None], (3, 2, 1, 3, 2))}
  method = fgd.methods.make("diloco", codec=codec, error_feedback=True, outer=optax.sgd(1.0))
  init, round_fn = fgd.build_round(method, loss, optax.sgd(0.1), workers=fgd.Workers(3))
  state = init({"a": START["a"]})
  for r in range(1, 8):
    state, _ = round_fn(state, batch)
    error = np.asarray(state.method_state[1]["a"])
    sent = r * 2 * 0.1 * slopes - error  # by every worker so far
    np.testing.assert_allclose(np.asarray(state.params["a"])[0], START["a"] - sent.mean(0), atol=1e-12)
  assert np.abs(error).max() < 3 * 0.2 * np.abs(slopes).max()  # bounded, while the sum of gradients grows


@pytest.mark.parametrize("name, codec, devices, options", [
    ("diloco", ("e3m0", {"stochastic": True}), 2, {"error_feedback": True}),
    ("diloco", "topk", 4, {}),
    ("GlobalM1LocalM2", "int4", 2, {}),
    ("GlobalM1LocalM2", "bf16", 4, {}),
    ("LocalM1M2", "int8", 4, {}),
    ("eager_diloco", "topk", 2, {}),
    ("noloco", "int8", 4, {"group_size": 4}),
    ("diloco", "int8", 2, {"aggregator": "ties"}),
    ("pipelined_diloco", "e3m0", 2, {"fragments": 2}),
])
def test_placements_agree(x64, name, codec, devices, options):
  batches = data(4, 2, steps=4)
  results = []
  for n in (1, devices):
    state, round_fn = build(fgd.methods.make(name, codec=codec, **options), 4, n)
    for batch in batches:
      state, metrics = round_fn(state, batch)
    results.append(jax.tree.map(np.asarray, (state.params, metrics)))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), *results)


@pytest.mark.parametrize("name, options", [
    ("GlobalM1", {"outer": optax.sgd(1.0)}), ("gasloc", {"gamma": 0.0}),
    ("fgd", {"mix1": "random_pairs", "mix2": "identity", "outer": optax.sgd(1.0)})])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_compressed_parameters_keep_the_mean(x64, name, options, codec):
  """What a codec takes from a worker's parameters the worker adds back: the mean moves as without a codec in that step."""
  batches = data(4, 3)
  means = []
  for c in (None, codec):
    state, round_fn = build(fgd.methods.make(name, codec=c, **options), 4)
    state, _ = round_fn(state, batches[0])
    means.append({k: np.asarray(v).mean(0) for k, v in state.params.items()})
  for k in START:
    np.testing.assert_allclose(means[0][k], means[1][k], atol=1e-13)


def test_global_mix1_compresses_displacements_not_parameters(x64):
  """GlobalM1 with 4-bit codes: workers stay near each other at large parameters, since only z - ref is coded."""
  big = {k: v + 100.0 for k, v in START.items()}
  batches = data(4, 6)
  spreads = []
  for codec in (None, "int4", "e3m0"):
    state, round_fn = build(fgd.methods.make("GlobalM1", codec=codec), 4, params=big)
    for batch in batches:
      batch = {"x": batch["x"] * 0.01, "y": batch["y"]}
      state, _ = round_fn(state, batch)
    spreads.append(max(float(np.ptp(np.asarray(v), axis=0).max()) for v in state.params.values()))
    # the reference is the same on all workers
    if codec:
      for leaf in jax.tree.leaves(state.method_state["ref"]):
        np.testing.assert_array_equal(np.asarray(leaf), np.broadcast_to(np.asarray(leaf)[:1], leaf.shape))
  assert spreads[1] < 3 * spreads[0] and spreads[2] < 5 * spreads[0]


def test_coarse_codecs_are_refused_for_parameters():
  with pytest.raises(ValueError, match="codec='int4' is too coarse for parameters.*mix1='random_pairs'"):
    fgd.methods.make("LocalM1M2", codec="int4")
  with pytest.raises(ValueError, match="too coarse"):
    fgd.methods.make("gasloc", codec="e3m0")


@pytest.mark.parametrize("codec, per_block", [("bf16", 2 * 256), ("int8", 256 + 4), ("int4", 128 + 4), ("e3m0", 128 + 4),
                                              (("topk", {"ratio": 1 / 32, "chunk": 256}), 8 * 6)])
def test_bytes_on_the_wire(codec, per_block):
  """512 parameters are two blocks; a mean is an all-gather of M - 1 messages, a pair swap is one."""
  params = {"a": jnp.ones((16, 32))}
  loss = lambda p, batch, rng: jnp.mean(batch["x"]) * jnp.sum(p["a"])
  batch = {"x": np.ones((4, 2, 1), np.float32)}
  for name, options, overlapped, blocking in (("diloco", {}, 0, 3), ("GlobalM1", {}, 3, 0), ("GlobalM1LocalM2", {}, 3, 1),
                                              ("eager_diloco", {}, 3, 0), ("streaming_diloco", {"delay": 1}, 3, 0),
                                              ("diloco", {"aggregator": "ties"}, 0, 3)):
    init, round_fn = fgd.build_round(fgd.methods.make(name, codec=codec, **options), loss, optax.sgd(0.1),
                                     workers=fgd.Workers(4))
    _, metrics = round_fn(init(params), batch)
    assert metrics["bytes_overlapped"] == overlapped * 2 * per_block, name
    assert metrics["bytes_blocking"] == blocking * 2 * per_block, name


def test_a_codec_that_sends_more_than_none_is_called_so():
  """Mean over M: (M - 1) b bytes a value against 2 (M - 1)/M 4: bf16 (b = 2) sends more from 5 workers, int8 from 8."""
  for codec, workers, warned in (("bf16", 4, False), ("bf16", 5, True), ("int8", 7, False), ("int8", 8, True),
                                 ("int4", 15, False), ("int4", 16, True)):
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      fgd.methods.make("diloco", codec=codec).bind(workers)
    assert bool(caught) == warned, (codec, workers)


def test_who_missed_a_round_comes_back_to_the_others(x64):
  """GlobalM1 with a codec: the reference moves only in rounds in which all take part, so the spread still vanishes."""
  still = {"x": np.zeros((4, 1, 2, 3)), "y": np.zeros((4, 1, 2, 2))}
  loss = lambda p, batch, rng: jnp.sum(batch["x"][0, 0]) * jnp.sum(p["a"] ** 2) + 0.0 * jnp.sum(p["b"])
  init, round_fn = fgd.build_round(fgd.methods.make("GlobalM1", codec="int8", outer=optax.sgd(1.0)), loss, optax.sgd(0.1),
                                   workers=fgd.Workers(4))
  state = init(START)
  for r in range(12):
    batch = data(4, 1, steps=1, seed=r)[0] if r < 3 else still
    state, _ = round_fn(state, batch, alive=[True] * 3 + [r != 1])
  for leaf in state.params.values():
    assert np.ptp(np.asarray(leaf), axis=0).max() < 1e-3


def test_one_worker_compresses_nothing(x64):
  state, round_fn = build(fgd.methods.make("diloco", aggregator="ties", aggregator_options={"drop": 0.0},
                                           codec=("topk", {"ratio": 0.1}),
                                           outer=optax.sgd(1.0)), 1)
  batches = data(1, 1)
  state, metrics = round_fn(state, batches[0])
  w, _, _ = ref.phase(ref.stack(START, 1), None, batches[0], INNER["sgd"](), gradient)
  for k in START:
    np.testing.assert_allclose(state.params[k], w[k], rtol=1e-12)
  assert metrics["bytes_blocking"] == 0


def test_idle_and_dropped_workers(x64):
  """Odd M: who is idle uses its own compressed gradient; who is dropped its own exact one, and no NaN spreads."""
  batches = data(3, 1)
  method = fgd.methods.make("fgd", mix1="identity", mix2="random_pairs", codec="int8", outer=optax.sgd(1.0))
  state, round_fn = build(method, 3)
  w, _, _ = ref.phase(ref.stack(START, 3), None, batches[0], INNER["sgd"](), gradient)
  matrix = round_fn.method.mix2.matrix(0)
  new, _ = round_fn(state, batches[0])
  for k in START:
    coded = by_worker(int8)(START[k] - w[k])
    np.testing.assert_allclose(new.params[k], START[k] - np.tensordot(matrix, coded, 1), rtol=1e-11, atol=1e-13)
  state, round_fn = build(method, 3)
  state = state._replace(params={k: v.at[2].set(np.nan) for k, v in state.params.items()})
  new, _ = round_fn(state, batches[0], alive=[True, True, False])
  for k in START:
    got = np.asarray(new.params[k])
    assert np.isfinite(got[:2]).all() and np.isnan(got[2]).all()
