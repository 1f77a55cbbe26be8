"""Measures of disagreement against their definitions in float64 NumPy."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgd_jax import measure
from fgd_jax.mixing import path_of

LN2 = math.log(2)
pairwise_js = jax.jit(measure.pairwise_js)


def softmax(logits):
  p = np.exp(logits - logits.max(-1, keepdims=True))
  return p / p.sum(-1, keepdims=True)


def kl(p, q):
  with np.errstate(divide="ignore", invalid="ignore"):
    return np.where(p > 0, p * np.log(p / q), 0).sum(-1)


def jsd(a, b):
  """JSD = KL(p || mid)/2 + KL(q || mid)/2 of the softmax of two logits, natural logarithm."""
  p, q = softmax(a), softmax(b)
  mid = (p + q) / 2
  return 0.5 * kl(p, mid) + 0.5 * kl(q, mid)


def entropy(p):
  return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)


def logits_of(*shape, seed=0, scale=2.0):
  return np.random.default_rng(seed).normal(size=shape) * scale


# --- Jensen-Shannon -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-3, 1, 10, 200])
def test_js_matches_the_definition(x64, scale):
  a, b = logits_of(4, 9, 17, seed=1, scale=scale), logits_of(4, 9, 17, seed=2, scale=scale)
  np.testing.assert_allclose(measure.js_divergence(jnp.asarray(a), jnp.asarray(b)), jsd(a, b), rtol=1e-9, atol=1e-16)
  want = np.mean(np.sqrt(jsd(a, b) / LN2))
  np.testing.assert_allclose(measure.js_distance(jnp.asarray(a), jnp.asarray(b)), want, rtol=1e-6)


def test_js_by_hand(x64):
  """p = (1, 0), q = (1/2, 1/2): mid = (3/4, 1/4), JSD = ln(4/3)/2 + (ln(2/3) + ln 2)/4."""
  a, b = np.array([0.0, -np.inf]), np.array([0.0, 0.0])
  want = 0.5 * math.log(4 / 3) + 0.5 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2))
  assert float(measure.js_divergence(jnp.asarray(a), jnp.asarray(b))) == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_js_of_equal_logits_is_exactly_zero(dtype):
  a = jnp.asarray(logits_of(5, 33), dtype)
  assert np.all(np.asarray(measure.js_divergence(a, a)) == 0)
  assert float(measure.js_distance(a, a)) == 0
  got = pairwise_js(jnp.stack([a] * 4))
  assert float(got["js_distance"]) == 0 and float(got["js_divergence"]) == 0
  assert float(got["js_generalised"]) == pytest.approx(0, abs=1e-5 if dtype == np.float32 else 0.1)


def test_js_is_exactly_symmetric():
  for seed in range(5):
    a, b = (jnp.asarray(logits_of(50, 12, seed=s), jnp.float32) for s in (seed, seed + 100))
    np.testing.assert_array_equal(measure.js_divergence(a, b), measure.js_divergence(b, a))
    assert float(measure.js_distance(a, b)) == float(measure.js_distance(b, a))


@pytest.mark.parametrize("scale", [0, 1e-4, 1, 30, 1e4])
def test_js_stays_in_range(scale):
  a, b = (jnp.asarray(logits_of(64, 12, seed=s, scale=scale), jnp.float32) for s in (1, 2))
  divergence = np.asarray(measure.js_divergence(a, b))
  assert np.all((divergence >= 0) & (divergence <= np.float32(LN2)))
  assert 0 <= float(measure.js_distance(a, b)) <= 1


def test_js_ignores_a_constant_shift(x64):
  a, b = jnp.asarray(logits_of(6, 8, seed=1)), jnp.asarray(logits_of(6, 8, seed=2))
  np.testing.assert_allclose(measure.js_divergence(a + 50, b - 3), measure.js_divergence(a, b), rtol=1e-9)


def test_disjoint_supports_have_distance_one():
  a, b = np.full((3, 4), -np.inf, np.float32), np.full((3, 4), -np.inf, np.float32)
  a[:, :2], b[:, 2:] = 0.3, 0.7
  np.testing.assert_allclose(measure.js_divergence(jnp.asarray(a), jnp.asarray(b)), LN2, rtol=1e-6)
  assert float(measure.js_distance(jnp.asarray(a), jnp.asarray(b))) == pytest.approx(1, abs=1e-6)


def masked_logits():
  x = logits_of(4, 6, 10, seed=3)
  x[0, :, :3] = -np.inf
  x[1, :, 2:5] = -np.inf
  x[:, :, 9] = -np.inf  # a token that nobody may predict
  return x


def test_minus_infinity_gives_no_nan(x64):
  x = masked_logits()
  for a, b in itertools.combinations(range(4), 2):
    np.testing.assert_allclose(measure.js_divergence(jnp.asarray(x[a]), jnp.asarray(x[b])), jsd(x[a], x[b]), rtol=1e-9)
  assert np.all(np.asarray(measure.js_divergence(jnp.asarray(x[0]), jnp.asarray(x[0]))) == 0)


def generalised(x):
  """H(mean distribution) - mean entropy, averaged over positions; leaves of x are [M, positions, V]."""
  p = softmax(x)
  return np.mean(entropy(p.mean(0)) - entropy(p).mean(0))


@pytest.mark.parametrize("m", [2, 3, 5])
def test_pairwise_js(x64, m):
  x = logits_of(m, 2, 7, 11, seed=m)
  got = pairwise_js(jnp.asarray(x))
  pairs = list(itertools.combinations(range(m), 2))
  np.testing.assert_allclose(got["js_distance"], np.mean([np.sqrt(jsd(x[a], x[b]) / LN2) for a, b in pairs]), rtol=1e-8)
  np.testing.assert_allclose(got["js_divergence"], np.mean([jsd(x[a], x[b]) for a, b in pairs]), rtol=1e-8)
  np.testing.assert_allclose(got["js_generalised"], generalised(x), rtol=1e-8)


def test_generalised_js_of_two_workers_is_the_jsd(x64):
  x = logits_of(2, 30, 5)
  got = pairwise_js(jnp.asarray(x))
  np.testing.assert_allclose(got["js_generalised"], got["js_divergence"], rtol=1e-9)


def test_generalised_js_of_disjoint_workers_is_ln_m():
  x = np.where(np.eye(4, dtype=bool)[:, None, :], 0, -1e4).astype(np.float32)
  got = pairwise_js(jnp.asarray(x))
  assert float(got["js_generalised"]) == pytest.approx(math.log(4), rel=1e-6)
  assert float(got["js_distance"]) == pytest.approx(1, rel=1e-6)


def test_pairwise_js_with_minus_infinity(x64):
  x = masked_logits()
  got = pairwise_js(jnp.asarray(x))
  pairs = list(itertools.combinations(range(4), 2))
  np.testing.assert_allclose(got["js_divergence"], np.mean([jsd(x[a], x[b]) for a, b in pairs]), rtol=1e-9)
  np.testing.assert_allclose(got["js_generalised"], generalised(x), rtol=1e-9)


def test_pairwise_js_of_one_worker_is_zero():
  got = pairwise_js(jnp.asarray(logits_of(1, 3, 4), jnp.float32))
  assert {k: float(v) for k, v in got.items()} == {"js_distance": 0, "js_divergence": 0, "js_generalised": 0}


def test_js_works_under_jit():
  x = jnp.asarray(logits_of(3, 4, 6), jnp.float32)
  eager, compiled = measure.pairwise_js(x), pairwise_js(x)
  for name, value in eager.items():
    np.testing.assert_allclose(compiled[name], value, rtol=1e-5)


# --- distance of parameters ----------------------------------------------------------------------------------------


def params_of(m, dtype=np.float64, seed=0):
  rng = np.random.default_rng(seed)
  return {"embed": rng.normal(size=(m, 4, 3)).astype(dtype), "layers": [rng.normal(size=(m, 5)).astype(dtype),
                                                                        rng.normal(size=m).astype(dtype)]}


def double_loop(tree, m):
  """Mean over ordered pairs a != b of ||x_a - x_b||^2."""
  total = 0.0
  for a in range(m):
    for b in range(m):
      if a != b:
        total += sum(np.sum((x[a].astype(np.float64) - x[b].astype(np.float64)) ** 2) for x in jax.tree.leaves(tree))
  return total / (m * (m - 1))


@pytest.mark.parametrize("m", [2, 3, 5, 8])
def test_pairwise_squared_distance(x64, m):
  tree = params_of(m)
  got = measure.pairwise_squared_distance(jax.tree.map(jnp.asarray, tree))
  assert got.dtype == jnp.float64
  np.testing.assert_allclose(got, double_loop(tree, m), rtol=1e-13)


def test_pairwise_squared_distance_by_hand():
  """Workers at 0, 1 and 3 on a line: squared distances 1, 9, 4, mean 14/3."""
  assert float(measure.pairwise_squared_distance(jnp.asarray([0.0, 1.0, 3.0]))) == pytest.approx(14 / 3, rel=1e-6)


def test_pairwise_squared_distance_of_close_workers_keeps_its_digits():
  """A spread of 1e-3 around 100 in float32: no cancellation against the square of the common part."""
  tree = {"x": (100 + 1e-3 * np.random.default_rng(0).normal(size=(8, 1000))).astype(np.float32)}
  got = measure.pairwise_squared_distance(jax.tree.map(jnp.asarray, tree))
  np.testing.assert_allclose(got, double_loop(tree, 8), rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("m", [1, 3, 7, 8])
def test_equal_workers_have_distance_exactly_zero(m, dtype):
  x = jnp.asarray(np.random.default_rng(0).normal(size=50) / 3, dtype)
  assert float(measure.pairwise_squared_distance({"x": jnp.stack([x] * m)})) == 0


def test_low_precision_is_summed_in_float32():
  tree = {"x": np.asarray(jnp.asarray(np.random.default_rng(0).normal(size=(4, 3000)), jnp.bfloat16))}
  got = measure.pairwise_squared_distance(jax.tree.map(jnp.asarray, tree))
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, double_loop(tree, 4), rtol=1e-4)


def test_by_block_sums_to_the_total(x64):
  tree = params_of(5)
  blocks = measure.by_block(jax.tree.map(jnp.asarray, tree), lambda path: path.split("/")[0], path_of)
  assert set(blocks) == {"embed", "layers"}
  np.testing.assert_allclose(sum(float(v) for v in blocks.values()), double_loop(tree, 5), rtol=1e-13)
  np.testing.assert_allclose(blocks["layers"], double_loop(tree["layers"], 5), rtol=1e-13)
