"""Aggregators of outer gradients against NumPy oracles (np.linalg.svd, float64) written from the specification."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgd_jax.outer.merge import AGGREGATORS, make_aggregator, polar, radial_directional


def exchange(agg, trees, shares=None, alive=None, seed=0):
  """What the exchange does with M workers' trees: payloads, then their mean over the live ones, or all of them."""
  m = len(trees)
  return _exchange(agg.bind(m), jax.tree.map(lambda *x: np.stack(x), *trees), np.ones(m) if shares is None else shares,
                   np.ones(m, bool) if alive is None else np.asarray(alive), jax.random.split(jax.random.key(seed), m))


FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.partial(jax.jit, static_argnums=0, compiler_options=FAST_COMPILE)
def _exchange(agg, stack, shares, alive, keys):
  payloads = jax.vmap(agg.local)(stack, shares, keys)
  if agg.gathers:
    return agg.merge(payloads, alive)
  live = lambda x: jnp.where(alive.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)
  wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
  mean = jax.tree.map(lambda x: jnp.sum(wide(live(x)), axis=0) / jnp.sum(alive), payloads)
  return agg.finish(mean, jax.tree.map(lambda x: x[0], stack))


def random_trees(m, shapes, seed=0):
  rng = np.random.default_rng(seed)
  return [{k: rng.normal(size=s) for k, s in shapes.items()} for _ in range(m)]


def matrix(rows, cols, values, seed=0):
  """A matrix with these singular values, and its polar factor."""
  rng = np.random.default_rng(seed)
  u, v = (np.linalg.qr(rng.normal(size=(n, len(values))))[0] for n in (rows, cols))
  return (u * values) @ v.T, u @ v.T


def orthogonalized(x):
  u, _, vt = np.linalg.svd(x, full_matrices=False)
  return u @ vt


# Oracles: xs [m, ...] of the live workers, weights already applied where a rule is linear in them; `total` is M.

def mean_oracle(xs, total):
  return np.mean(xs, axis=0)


def task_oracle(xs, total):
  return 0.3 * total * np.mean(xs, axis=0)


def iso_c_oracle(xs, total):
  if xs[0].ndim != 2:
    return mean_oracle(xs, total)
  u, s, vt = np.linalg.svd(np.mean(xs, axis=0), full_matrices=False)
  return np.mean(s) * u @ vt


def ties_oracle(xs, total, drop=0.2):
  trimmed = []
  for x in xs:
    least = np.sort(np.abs(x), axis=None)[::-1][int((1 - drop) * x.size) - 1]
    trimmed.append(np.where(np.abs(x) >= least, x, 0))
  elected, out = np.sign(np.sum(trimmed, axis=0)), np.zeros_like(xs[0])
  for i in np.ndindex(out.shape):
    agree = [x[i] for x in trimmed if elected[i] != 0 and np.sign(x[i]) == elected[i]]
    out[i] = sum(agree) / max(1, len(agree))
  return out


def tsv_m_oracle(xs, total):
  if xs[0].ndim != 2:
    return mean_oracle(xs, total)
  k = max(1, int(min(xs[0].shape) / total))
  us, ss, vs = zip(*[np.linalg.svd(x, full_matrices=False) for x in xs])
  u, v = np.concatenate([u[:, :k] for u in us], 1), np.concatenate([vt[:k].T for vt in vs], 1)
  return orthogonalized(u) @ np.diag(np.concatenate([s[:k] for s in ss])) @ orthogonalized(v).T


def iso_cts_oracle(xs, total, common=0.8):
  if xs[0].ndim != 2:
    return mean_oracle(xs, total)
  r, xs = min(xs[0].shape), [x / len(xs) for x in xs]
  t = round((r - int(common * r)) / total) * total
  uc, sc, vtc = (y[..., :r - t] if n < 2 else y[:r - t] for n, y in enumerate(np.linalg.svd(sum(xs), full_matrices=False)))
  us, ss, vs = [], [], []
  for x in xs:
    u, s, vt = np.linalg.svd(x - uc @ uc.T @ x, full_matrices=False)
    us, ss, vs = us + [u[:, :t // total]], ss + [s[:t // total]], vs + [vt[:t // total].T]
  u, s, v = np.concatenate([*us, uc], 1), np.concatenate([*ss, sc]), np.concatenate([*vs, vtc.T], 1)
  return np.mean(s) * orthogonalized(u) @ orthogonalized(v).T


def rda_oracle(xs, weights):
  w = np.asarray(weights) / np.sum(weights)
  direction = sum(wi * x / np.linalg.norm(x) for wi, x in zip(w, xs))
  return sum(wi * np.linalg.norm(x) for wi, x in zip(w, xs)) * direction / np.linalg.norm(direction)


ORACLES = {"mean": (mean_oracle, {}), "task_arithmetic": (task_oracle, {"scale": 0.3}), "iso_c": (iso_c_oracle, {}),
           "ties": (ties_oracle, {"drop": 0.2}), "tsv_m": (tsv_m_oracle, {}), "iso_cts": (iso_cts_oracle, {}),
           "dare": (mean_oracle, {"drop": 0.0}), "rda": (None, {})}


def expected(name, xs, shares, total):
  if name == "rda":
    return rda_oracle(xs, shares)
  return ORACLES[name][0]([s * x for s, x in zip(shares, xs)], total)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_oracle(x64, name):
  """Weights, a tall, a wide and a 1-D leaf, all workers live, and one dead whose rows are NaN; all zeros give zeros."""
  m, agg = 3, make_aggregator(name, ORACLES[name][1])
  assert agg.name == name and agg.gathers == (name in ("iso_cts", "ties", "tsv_m"))
  trees = random_trees(m, {"w": (20, 11), "x": (7, 20), "b": (10,)})
  for dead in ((), (1,)):
    live = [i for i in range(m) if i not in dead]
    shares = np.random.default_rng(9).uniform(0.5, 1.5, m)
    shares = shares / np.mean(shares[live])
    sent = [jax.tree.map(lambda x: x * np.nan, t) if i in dead else t for i, t in enumerate(trees)]
    got = exchange(agg, sent, shares, [i in live for i in range(m)])
    for k in ("w", "x", "b"):
      want = expected(name, [trees[i][k] for i in live], shares[live], m)
      np.testing.assert_allclose(got[k], want, atol=1e-10, err_msg=f"{k}, dead {dead}")
  zero = exchange(agg, [jax.tree.map(np.zeros_like, t) for t in trees], shares)
  assert all((x == 0).all() for x in zero.values())


@pytest.mark.parametrize("name,options", [("mean", {}), ("ties", {"drop": 0}), ("tsv_m", {}), ("rda", {}),
                                          ("task_arithmetic", {})])
def test_one_worker_is_the_identity(x64, name, options):
  tree = random_trees(1, {"w": (6, 9), "b": (4,), "embed": (5, 3)})
  got = exchange(make_aggregator(name, options), tree)
  for k, x in tree[0].items():
    np.testing.assert_allclose(got[k], x, atol=1e-12)


def test_iso_cts_of_one_worker_is_iso_c(x64):
  tree = random_trees(1, {"w": (9, 6)})
  np.testing.assert_allclose(exchange(make_aggregator("iso_cts"), tree)["w"], iso_c_oracle([tree[0]["w"]], 1),
                             atol=1e-12)


def iso_c(x):
  return np.asarray(exchange(make_aggregator("iso_c"), [{"w": x}])["w"])


def test_iso_c_properties(x64):
  x = matrix(12, 8, np.geomspace(1, 1e-2, 8))[0]
  flat = iso_c(x)
  assert np.linalg.norm(flat, "nuc") == pytest.approx(np.linalg.norm(x, "nuc"), rel=1e-12)
  np.testing.assert_allclose(iso_c(flat), flat, atol=1e-13)  # idempotent; equal singular values: the identity
  np.testing.assert_allclose(iso_c(1e-30 * x), 1e-30 * flat, rtol=1e-9)  # scale-free, also where squares underflow


@pytest.mark.parametrize("dtype,condition,atol", [("float64", 1e3, 1e-11), ("float64", 1e6, 1e-9), ("float32", 1e3, 2e-5)])
def test_polar_accuracy(x64, dtype, condition, atol):
  x, factor = matrix(48, 24, np.geomspace(1, 1 / condition, 24))
  got = jax.jit(polar, compiler_options=FAST_COMPILE)(jnp.asarray(x, dtype))
  assert got.dtype == dtype and np.abs(got - factor).max() < atol


@pytest.mark.parametrize("dtype,atol", [("float64", 1e-12), ("float32", 1e-5)])
def test_iso_c_keeps_zero_singular_values(x64, dtype, atol):
  """A = sum(s)/r over the non-zero directions alone; rows of unseen tokens stay zero; zero stays zero."""
  values = np.array([3.0, 2.0, 1.0, 0.5])
  x, factor = matrix(16, 10, values)
  got = iso_c(x.astype(dtype))
  np.testing.assert_allclose(got, np.sum(values) / 10 * factor, atol=atol)
  assert np.linalg.svd(got, compute_uv=False)[4:].max() < atol
  x = np.random.default_rng(1).normal(size=(16, 10)) * (np.arange(16) < 7)[:, None]
  got = iso_c(x.astype(dtype))
  assert (got[7:] == 0).all() and np.linalg.matrix_rank(got, tol=1e-4) == 7
  assert (iso_c(np.zeros((16, 10), dtype)) == 0).all()


def test_tsv_m_of_equal_workers(x64):
  """Where workers agree their triples are repeated, not independent: the result is what they agree on."""
  x = np.outer(np.arange(1.0, 7), [1.0, -2, 2])
  np.testing.assert_allclose(exchange(make_aggregator("tsv_m"), [{"w": x}] * 2)["w"], x, atol=1e-12)


def test_orthogonal_outer_gradients_shrink_under_the_mean_only(x64):
  m = 8
  columns = np.linalg.qr(np.random.default_rng(0).normal(size=(64, m)))[0].T
  trees = [{"w": 5 * q.reshape(8, 8)} for q in columns]
  assert np.linalg.norm(exchange(make_aggregator("mean"), trees)["w"]) == pytest.approx(5 / np.sqrt(m))
  assert np.linalg.norm(exchange(make_aggregator("rda"), trees)["w"]) == pytest.approx(5)
  trees = random_trees(m, {"w": (100, 100)})  # near-orthogonal
  norm = np.mean([np.linalg.norm(t["w"]) for t in trees])
  assert np.linalg.norm(exchange(make_aggregator("mean"), trees)["w"]) / norm == pytest.approx(0.354, abs=0.01)
  assert np.linalg.norm(exchange(make_aggregator("rda"), trees)["w"]) / norm == pytest.approx(1, abs=1e-12)


def test_rda_plain_paths_and_vanishing_direction(x64):
  trees = random_trees(2, {"embed/embedding": (6, 3), "lm_head/kernel": (3, 6)})
  opposite = np.array([[3.0, 4.0], [-6.0, -8.0]])
  trees = [t | {"opposite": x} for t, x in zip(trees, opposite)]
  got = exchange(make_aggregator("rda"), trees)
  for path, oracle in (("embed/embedding", mean_oracle), ("lm_head/kernel", rda_oracle)):
    np.testing.assert_allclose(got[path], oracle([t[path] for t in trees], (1, 1)), atol=1e-12)
  assert (got["opposite"] == 0).all()
  fallback = jax.jit(radial_directional)(jnp.asarray(opposite), jnp.ones(2))  # as published: the weighted mean
  np.testing.assert_allclose(fallback, [-1.5, -2.0])


def test_radial_directional(x64):
  rng = np.random.default_rng(0)
  stack, weights = rng.normal(size=(4, 3, 5)), np.array([2.0, 0.0, 1.0, 5.0])
  stack[1] = np.nan  # a missing learner
  want = rda_oracle(stack[weights > 0], weights[weights > 0])
  np.testing.assert_allclose(jax.jit(radial_directional)(jnp.asarray(stack), jnp.asarray(weights)), want, atol=1e-13)
  assert (jax.jit(radial_directional)(jnp.asarray(stack), jnp.zeros(4)) == 0).all()


@pytest.mark.parametrize("name", [n for n in AGGREGATORS if n not in ("mean", "task_arithmetic")])
def test_stacked_layers_are_separate_layers(x64, name):
  """Each layer of a stacked leaf against the oracle; dare, whose masks are random, against the unstacked model."""
  layers = [random_trees(2, {"q": (8, 6), "b": (5,)}, seed=i) for i in range(2)]
  scanned = [{"layers": jax.tree.map(lambda *x: np.stack(x), *[layer[m] for layer in layers])} for m in range(2)]
  agg = make_aggregator(name, {"drop": 0.4} if name == "dare" else ORACLES[name][1])
  got = exchange(agg, scanned)["layers"]
  if name == "dare":
    single = exchange(agg, [{f"layers_{i}": layers[i][m] for i in range(2)} for m in range(2)])
  for i, layer in enumerate(layers):
    for k in ("q", "b"):
      want = single[f"layers_{i}"][k] if name == "dare" else expected(name, [t[k] for t in layer], np.ones(2), 2)
      np.testing.assert_allclose(got[k][i], want, atol=1e-12)


def test_fused_axes_are_those_of_one_layer(x64):
  trees = random_trees(2, {"layers/qkv": (3, 6, 4, 2)})
  got = exchange(make_aggregator("iso_c", {"fused": [["qkv", 2, 2]]}), trees)["layers/qkv"]
  for i, part in np.ndindex(3, 2):
    want = iso_c_oracle([t["layers/qkv"][i, :, :, part] for t in trees], 2)
    np.testing.assert_allclose(got[i, :, :, part], want, atol=1e-12)


@pytest.mark.parametrize("name", ["iso_c", "tsv_m"])
def test_what_is_a_matrix(x64, name):
  """Fused projections are split, 3-D kernels flattened when told to, excluded paths and all else averaged."""
  shapes = {"equal": (8, 12), "sizes": (8, 8), "heads": (6, 2, 3), "blocked": (6, 2, 2, 4), "other": (3, 4, 2),
            "head": (8, 6)}
  if name == "tsv_m":
    shapes = {k: shapes[k] for k in ("heads", "blocked", "head")}
  trees = random_trees(3, shapes)
  agg = make_aggregator(name, {"fused": [("equal", 1, 3), ("sizes", -1, (6, 2)), ("blocked", 1, 2)],
                               "matrices": [("heads", 2)], "exclude": "^head$"})
  assert hash(agg) == hash(make_aggregator(name, {"fused": agg.fused, "matrices": agg.matrices, "exclude": "^head$"}))
  got = exchange(agg, trees)
  xs = {k: [t[k] for t in trees] for k in shapes}
  oracle = lambda parts: ORACLES[name][0](parts, 3)
  for k, parts in {"equal": ((0, 4), (4, 8), (8, 12)), "sizes": ((0, 6), (6, 8)), "blocked": ((0, 1), (1, 2))}.items():
    for part in (slice(*p) for p in parts if k in shapes):
      pieces = [x[:, part].reshape(len(x), -1) for x in xs[k]]
      np.testing.assert_allclose(got[k][:, part].reshape(pieces[0].shape), oracle(pieces), atol=1e-10, err_msg=k)
  np.testing.assert_allclose(got["heads"].reshape(12, 3), oracle([x.reshape(12, 3) for x in xs["heads"]]), atol=1e-10)
  for plain in {"other", "head"} & set(shapes):
    np.testing.assert_allclose(got[plain], np.mean(xs[plain], axis=0), atol=1e-12)


@pytest.mark.parametrize("exact", [True, False])
def test_dare(x64, exact):
  """Exact: int((1 - drop) n) elements stay. The expectation is the input, also where (1 - drop) n is no whole number."""
  agg, x = make_aggregator("dare", {"drop": 0.3, "exact": exact}), jnp.asarray([1.0, -2, 3, 4, -5, 6, 7, 8, -9])
  keys = jax.random.split(jax.random.key(1), 4000)
  send = jax.jit(jax.vmap(lambda k: agg.local({"w": x}, 1.0, k)["w"]), compiler_options=FAST_COMPILE)
  sent = np.asarray(send(keys))
  kept = np.sum(sent != 0, axis=1)
  if exact:
    assert (kept == int(0.7 * 9)).all()
  else:
    assert kept.min() < 6 < kept.max() and np.mean(kept) == pytest.approx(6.3, abs=0.1)
  np.testing.assert_allclose(sent.mean(0) / x, 1, atol=5 * np.sqrt(0.5 / len(keys)))
  keep = 6 / 9 if exact else 0.7
  np.testing.assert_allclose(sent[sent != 0], np.broadcast_to(x / keep, sent.shape)[sent != 0])


def test_dare_streams(x64):
  """Leaves and workers draw masks of their own."""
  agg, x = make_aggregator("dare", {"drop": 0.5}), jnp.ones(64)
  trees = [jax.jit(agg.local)({"layers_0": x, "w": x}, 1.0, jax.random.key(i)) for i in range(2)]
  masks = {tuple(np.asarray(leaf) != 0) for t in trees for leaf in jax.tree.leaves(t)}
  assert len(masks) == 4


@pytest.mark.parametrize("name", ["iso_c", "ties", "dare", "rda"])
def test_jit_vmap_and_dtypes(name):
  """Two replicas of the whole exchange in one program; bfloat16 leaves come back so, with float32 arithmetic inside."""
  agg = make_aggregator(name, ORACLES[name][1]).bind(3)
  trees = [jax.tree.map(lambda *x: np.stack(x), *random_trees(2, {"w": (9, 7), "layers": (6,)}, seed=m)) for m in range(3)]
  stack = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *trees)
  stack["w"] = stack["w"].astype(jnp.bfloat16)
  keys = jax.random.split(jax.random.key(0), 3)
  got = jax.vmap(lambda x: _exchange(agg, x, jnp.ones(3), jnp.ones(3, bool), keys))(stack)
  assert got["w"].dtype == jnp.bfloat16 and got["layers"].dtype == jnp.float32 and got["layers"].shape == (2, 6)
  for replica, xs in enumerate(np.asarray(stack["w"], np.float64)):
    want = expected(name, list(xs), np.ones(3), 3)
    np.testing.assert_allclose(np.asarray(got["w"][replica], np.float64), want, atol=0.01 * np.abs(want).max())


@pytest.mark.parametrize("name,options,words", [
    ("median", None, "aggregator='median' is unknown; choose one of mean, task_arithmetic"),
    ("mean", {"drop": 0.1}, "mean takes no options"),
    ("ties", {"keep": 3}, r"aggregator_options=\{'keep': 3\}: ties takes drop"),
    ("dare", 0.1, "aggregator_options=0.1: dare takes drop, exact"),
    ("mean", {"workers": 3}, "mean takes no options"),
    ("ties", {"drop": 1.0}, r"drop=1.0 must be a number in \[0, 1\)"),
    ("dare", {"drop": "a"}, "drop='a' must be a number"),
    ("dare", {"exact": 1}, "exact=1 must be True or False"),
    ("iso_cts", {"common": 1.5}, r"common=1.5 must be a number in \[0, 1\]"),
    ("tsv_m", {"keep": 0}, "keep=0 must be a whole number"),
    ("task_arithmetic", {"scale": None}, "scale=None must be a number"),
    ("iso_c", {"exclude": "("}, "exclude='\\(' is not a regular expression"),
    ("rda", {"plain": 3}, "plain=3 is not a regular expression"),
    ("iso_c", {"fused": [("qkv", 1)]}, r"fused has \('qkv', 1\); pass a list of \(pattern, axis, parts\)"),
    ("iso_c", {"matrices": "qkv"}, r"matrices has 'qkv'; pass a list of \(pattern, row_axes\)"),
])
def test_wrong_options(name, options, words):
  with pytest.raises(ValueError, match=words) as error:
    make_aggregator(name, options)
  assert "\n" not in str(error.value)


def test_wrong_uses():
  tree = {"qkv": jnp.ones((4, 6)), "o": jnp.ones((2, 3, 4))}
  finish = lambda **options: make_aggregator("iso_c", options).finish(tree, tree)
  for fused in (("qkv", 1, 4), ("qkv", 2, 2), ("qkv", 1, (2, 2)), ("qkv", 1, 0)):
    with pytest.raises(ValueError, match=r"fused: qkv of shape \(4, 6\) cannot be split"):
      finish(fused=[fused])
  with pytest.raises(ValueError, match="row_axes=3 must leave both rows and columns of the 3 axes of o"):
    finish(matrices=[("o", 3)])
  with pytest.raises(ValueError, match="workers=None"):
    make_aggregator("task_arithmetic").finish(tree, tree)
  with pytest.raises(TypeError, match="mean does not gather"):
    make_aggregator("mean").merge(tree, jnp.ones(4, bool))
