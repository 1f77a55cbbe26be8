"""Topologies as data: matrices, closed-form contraction, draws, stripes, refusals and dropped workers."""

import itertools
import math

import numpy as np
import pytest

import fgd_jax as fgd

NAMES = ["identity", "global", "random_pairs", "random_groups", "ring", "lazy_ring", "torus", "exponential",
         "one_peer_exponential", "hypercube", "one_peer_hypercube", "striped_hypercube", "striped_pairs"]
POWERS = {"hypercube", "one_peer_hypercube", "striped_hypercube"}


def groups(m):
  return [k for k in (2, 3, 4) if m % k == 0]


def allowed(name, m):
  if name in POWERS:
    return m & (m - 1) == 0
  if name == "torus":
    return m in (9, 16)
  return name != "random_groups"


CASES = [(n, m, {}) for n in NAMES for m in (1, 2, 3, 4, 5, 8, 9, 16) if allowed(n, m)]
CASES += [("random_groups", m, {"group_size": k}) for m in (2, 3, 4, 6, 8, 9, 16) for k in groups(m)]
IDS = ["-".join([n, str(m), *map(str, o.values())]) for n, m, o in CASES]


def stripes(name, m):
  """How many stripes the specification gives: one for each matching of the bank."""
  if not name.startswith("striped"):
    return [None]
  if m == 1:
    return [0]
  return list(range(int(math.log2(m)) if "hypercube" in name else m - 1 + m % 2))


def squared_contraction(w):
  """lambda_max((W - J)^T (W - J)) of one matrix."""
  m = len(w)
  d = w - 1 / m
  return np.linalg.eigvalsh(d.T @ d)[-1]


def assert_doubly_stochastic(w, m):
  assert w.shape == (m, m) and w.dtype == np.float64
  assert np.all(w >= -1e-15)
  np.testing.assert_allclose(w.sum(0), 1, atol=1e-14)
  np.testing.assert_allclose(w.sum(1), 1, atol=1e-14)


@pytest.mark.parametrize("name,m,options", CASES, ids=IDS)
def test_matrix_is_doubly_stochastic(name, m, options):
  mixer = fgd.mixing.make(name, workers=m, seed=3, **options)
  for r, s in itertools.product((0, 1, 2, 7, 10 ** 6), stripes(name, m)):
    assert_doubly_stochastic(mixer.matrix(r) if s is None else mixer.matrix(r, stripe=s), m)


@pytest.mark.parametrize("name,m,options", CASES, ids=IDS)
def test_matrix_with_dropped_workers(name, m, options):
  """Dropped workers keep their value and reach nobody; the mean over all workers is kept."""
  mixer = fgd.mixing.make(name, workers=m, seed=3, **options)
  rng = np.random.default_rng(0)
  for r, s in itertools.product(range(4), stripes(name, m)):
    alive = rng.random(m) < 0.7
    kwargs = {"alive": alive} if s is None else {"alive": alive, "stripe": s}
    w = mixer.matrix(r, **kwargs)
    assert_doubly_stochastic(w, m)
    eye = np.eye(m)
    np.testing.assert_array_equal(w[~alive][:, alive], 0)
    np.testing.assert_array_equal(w[alive][:, ~alive], 0)
    np.testing.assert_allclose(w[~alive], eye[~alive], atol=1e-15)
    if name == "global" and alive.any():
      np.testing.assert_allclose(w[np.ix_(alive, alive)], 1 / alive.sum(), atol=1e-15)


def test_all_alive_and_none_alive():
  for name, m, options in CASES:
    mixer = fgd.mixing.make(name, workers=m, **options)
    kwargs = {} if stripes(name, m) == [None] else {"stripe": 0}
    np.testing.assert_array_equal(mixer.matrix(1, alive=[True] * m, **kwargs), mixer.matrix(1, **kwargs))
    np.testing.assert_allclose(mixer.matrix(1, alive=[False] * m, **kwargs), np.eye(m), atol=1e-15)


@pytest.mark.parametrize("name", ["exponential", "one_peer_exponential"])
def test_directed_topologies_drop_the_whole_permutation(name):
  alive = np.arange(8) != 5
  mixer = fgd.mixing.make(name, workers=8)
  for r in range(3):
    np.testing.assert_allclose(mixer.matrix(r, alive=alive), np.eye(8), atol=1e-15)


def test_symmetric_topologies_drop_only_the_links_of_a_dropped_worker():
  """Ring (1/3, 1/3, 1/3) at M=5 without worker 0: its neighbours put its weight on themselves."""
  want = np.array([[3, 0, 0, 0, 0], [0, 2, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 2]]) / 3
  got = fgd.mixing.make("ring", workers=5).matrix(0, alive=[False, True, True, True, True])
  np.testing.assert_allclose(got, want, atol=1e-15)


def test_dropped_pair_leaves_both_at_weight_one():
  for m in (5, 8):
    mixer = fgd.mixing.make("random_pairs", workers=m)
    for r in range(6):
      whole, alive = mixer.matrix(r), np.arange(m) != 2
      want = whole.copy()
      partner = int(np.argmax(np.where(np.arange(m) == 2, 0, whole[2]))) if whole[2, 2] < 1 else 2
      for i in {2, partner}:
        want[i] = np.eye(m)[i]
      np.testing.assert_allclose(mixer.matrix(r, alive=alive), want, atol=1e-15)


# --- definitions, written out from the specification ---------------------------------------------------------------


def circulant(m, weights):
  """W[i, i + offset] += weight."""
  w = np.zeros((m, m))
  for offset, weight in weights:
    for i in range(m):
      w[i, (i + offset) % m] += weight
  return w


def levels(m):
  return math.ceil(math.log2(m))


@pytest.mark.parametrize("m", [2, 3, 4, 5, 8, 9, 16])
def test_static_definitions(m):
  third, n = 1 / 3, levels(m)
  want = {
      "identity": np.eye(m), "global": np.full((m, m), 1 / m),
      "ring": circulant(m, [(0, third), (1, third), (-1, third)]),
      "lazy_ring": circulant(m, [(0, 0.5), (1, 0.25), (-1, 0.25)]),
      "exponential": circulant(m, [(0, 1 / (n + 1))] + [(2 ** k, 1 / (n + 1)) for k in range(n)]),
  }
  if m & (m - 1) == 0:
    cube = np.eye(m)
    for i, k in itertools.product(range(m), range(n)):
      cube[i, i ^ (1 << k)] = 1
    want["hypercube"] = cube / (n + 1)
  for name, w in want.items():
    mixer = fgd.mixing.make(name, workers=m)
    for r in (0, 5):
      np.testing.assert_allclose(mixer.matrix(r), w, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("m,a,b", [(9, 3, 3), (12, 3, 4), (16, 4, 4), (20, 4, 5)])
def test_torus(m, a, b):
  """Weights 1/5 on the squarest torus; beta = max |1 + 2 cos(2 pi i/a) + 2 cos(2 pi j/b)| / 5."""
  mixer = fgd.mixing.make("torus", workers=m)
  w = mixer.matrix(0)
  np.testing.assert_array_equal((w > 0).sum(1), 5)
  np.testing.assert_allclose(w[w > 0], 1 / 5)
  np.testing.assert_allclose(w, w.T)
  beta = max(abs(1 + 2 * math.cos(2 * math.pi * i / a) + 2 * math.cos(2 * math.pi * j / b)) / 5
             for i in range(a) for j in range(b) if (i, j) != (0, 0))
  assert mixer.contraction() == pytest.approx(beta ** 2, abs=1e-12)
  if m == 16:
    assert beta == pytest.approx(0.6)


@pytest.mark.parametrize("m", [2, 4, 5, 8, 16])
def test_one_peer_definitions(m):
  n = levels(m)
  peer = fgd.mixing.make("one_peer_exponential", workers=m)
  for r in range(2 * n + 1):
    want = circulant(m, [(0, 0.5), (2 ** (r % n), 0.5)])
    np.testing.assert_allclose(peer.matrix(r), want, atol=1e-15)
  if m & (m - 1) == 0:
    cube = fgd.mixing.make("one_peer_hypercube", workers=m)
    for r in range(2 * n + 1):
      want = 0.5 * np.eye(m)
      for i in range(m):
        want[i, i ^ (1 << (r % n))] += 0.5
      np.testing.assert_allclose(cube.matrix(r), want, atol=1e-15)


@pytest.mark.parametrize("name", ["one_peer_exponential", "one_peer_hypercube"])
@pytest.mark.parametrize("m", [2, 4, 8, 16])
def test_one_peer_product_is_the_mean(name, m):
  mixer, n = fgd.mixing.make(name, workers=m), levels(m)
  for start in range(n + 1):
    product = np.eye(m)
    for r in range(start, start + n):
      product = mixer.matrix(r) @ product
    np.testing.assert_allclose(product, 1 / m, atol=1e-15)
  assert mixer.contraction(rounds=n) == pytest.approx(0, abs=1e-12)
  if n > 1:
    assert mixer.contraction() == pytest.approx((n - 1) / n, abs=1e-12)


# --- contraction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [2, 3, 4, 5, 8, 9, 16, 32])
def test_contraction_closed_forms(m):
  rho = lambda name, **o: fgd.mixing.make(name, workers=m, **o).contraction()
  modes = np.arange(1, m)
  assert rho("identity") == pytest.approx(1, abs=1e-12)
  assert rho("global") == pytest.approx(0, abs=1e-12)
  pairs = 0.5 if m % 2 else (m - 2) / (2 * (m - 1))
  assert rho("random_pairs") == pytest.approx(pairs, abs=1e-12)
  assert rho("striped_pairs") == pytest.approx(pairs, abs=1e-12)
  cos = np.cos(2 * np.pi * modes / m)
  assert rho("ring") == pytest.approx(np.max(((1 + 2 * cos) / 3) ** 2), abs=1e-12)
  assert rho("lazy_ring") == pytest.approx(np.max(((1 + cos) / 2) ** 2), abs=1e-12)
  n = levels(m)
  eigen = 1 + sum(np.exp(2j * np.pi * modes * 2 ** k / m) for k in range(n))
  assert rho("exponential") == pytest.approx(np.max(np.abs(eigen / (n + 1)) ** 2), abs=1e-12)
  peer = np.mean([np.cos(np.pi * modes * 2 ** k / m) ** 2 for k in range(n)], axis=0)
  assert rho("one_peer_exponential") == pytest.approx(np.max(peer), abs=1e-12)
  if m & (m - 1) == 0:
    assert rho("exponential") == pytest.approx(((n - 1) / (n + 1)) ** 2, abs=1e-12)
    assert rho("hypercube") == pytest.approx(((n - 1) / (n + 1)) ** 2, abs=1e-12)
    assert rho("one_peer_hypercube") == pytest.approx((n - 1) / n, abs=1e-12)
    assert rho("striped_hypercube") == pytest.approx((n - 1) / n, abs=1e-12)


@pytest.mark.parametrize("name,values", [
    ("random_pairs", (0.333, 0.429, 0.467, 0.484)), ("ring", (0.111, 0.648, 0.901, 0.975)),
    ("lazy_ring", (0.250, 0.729, 0.925, 0.981)), ("exponential", (0.111, 0.250, 0.360, 0.444)),
])
def test_contraction_table(name, values):
  """The table of rho at M = 4, 8, 16, 32 in the specification (three decimals)."""
  for m, value in zip((4, 8, 16, 32), values):
    assert fgd.mixing.make(name, workers=m).contraction() == pytest.approx(value, abs=6e-4)


@pytest.mark.parametrize("m,k", [(2, 2), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (6, 6), (8, 2), (8, 4), (8, 8),
                                 (16, 2), (16, 4), (16, 8)])
def test_random_groups_contraction(m, k):
  mixer = fgd.mixing.make("random_groups", workers=m, group_size=k)
  assert mixer.contraction() == pytest.approx((m - k) / (k * (m - 1)), abs=1e-12)


@pytest.mark.parametrize("m,k", [(9, 3), (12, 4)])
def test_random_groups_contraction_of_a_pool(m, k):
  """Where the bank is not balanced the factor is that of the draws, not below the balanced one (trace argument)."""
  mixer = fgd.mixing.make("random_groups", workers=m, group_size=k, seed=1)
  draws = [mixer.matrix(r) for r in range(1000)]
  average = sum((w - 1 / m).T @ (w - 1 / m) for w in draws) / len(draws)
  assert mixer.contraction() == pytest.approx(np.linalg.eigvalsh(average)[-1], rel=0.08)
  assert (m - k) / (k * (m - 1)) <= mixer.contraction() < 0.5


@pytest.mark.parametrize("m,k", [(8, 4), (16, 4), (6, 3)])
def test_random_groups_average_inside_groups(m, k):
  mixer = fgd.mixing.make("random_groups", workers=m, group_size=k)
  for r in range(20):
    w = mixer.matrix(r)
    np.testing.assert_array_equal((w > 0).sum(1), k)
    np.testing.assert_allclose(w[w > 0], 1 / k)
    np.testing.assert_allclose(w @ w, w, atol=1e-15)
  assert fgd.mixing.make("random_groups", workers=8).matrix(0)[0].max() == pytest.approx(1 / 4)  # default group_size 4


def test_random_groups_of_all_is_the_mean():
  np.testing.assert_allclose(fgd.mixing.make("random_groups", workers=4).matrix(2), 1 / 4)


@pytest.mark.parametrize("name,m", [("ring", 8), ("exponential", 8), ("hypercube", 8)])
def test_contraction_over_rounds_of_normal_matrices(name, m):
  mixer = fgd.mixing.make(name, workers=m)
  assert mixer.contraction(rounds=3) == pytest.approx(mixer.contraction() ** 3, abs=1e-12)


@pytest.mark.parametrize("m", [5, 8])
def test_contraction_over_rounds_of_random_pairs(m):
  """E[W^T (I - J) W] is a multiple of I - J, so independent rounds multiply."""
  mixer = fgd.mixing.make("random_pairs", workers=m)
  assert mixer.contraction(rounds=4) == pytest.approx(mixer.contraction() ** 4, abs=1e-12)


@pytest.mark.parametrize("m", [5, 6])
def test_one_peer_exponential_product_off_powers_of_two(m):
  n, modes = levels(m), np.arange(1, m)
  product = np.prod([np.cos(np.pi * modes * 2 ** k / m) ** 2 for k in range(n)], axis=0)
  mixer = fgd.mixing.make("one_peer_exponential", workers=m)
  assert mixer.contraction(rounds=n) == pytest.approx(np.max(product), abs=1e-12)


# --- random pairs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [2, 3, 4, 5, 8, 9, 16])
def test_random_pairs_bank(m):
  """M - 1 perfect matchings (odd M: M with one idle worker); every pair in exactly one of them."""
  mixer = fgd.mixing.make("random_pairs", workers=m, seed=11)
  bank = {mixer.matrix(r).tobytes(): mixer.matrix(r) for r in range(60 * m)}
  assert len(bank) == (m if m % 2 else m - 1)
  total = np.zeros((m, m))
  for w in bank.values():
    np.testing.assert_array_equal(w, w.T)
    np.testing.assert_allclose(w @ w, w)  # a projection: pairs average
    assert np.sum(np.diag(w) == 1) == m % 2
    assert np.sum(w == 0.5) == 2 * (m - m % 2)
    total += w
  off = total[~np.eye(m, dtype=bool)]
  np.testing.assert_allclose(off, 0.5)


@pytest.mark.parametrize("m", [4, 5, 8])
def test_random_pairs_monte_carlo(m):
  """The draw over rounds is uniform and independent: counts within 5 standard errors, measured contraction near rho."""
  mixer, rounds = fgd.mixing.make("random_pairs", workers=m, seed=5), 4000
  keys = [mixer.matrix(r).tobytes() for r in range(rounds)]
  bank = sorted(set(keys))
  counts = np.array([keys.count(k) for k in bank])
  expected = rounds / len(bank)
  assert np.all(np.abs(counts - expected) < 5 * math.sqrt(expected))
  repeats = np.mean([a == b for a, b in zip(keys, keys[1:])])
  assert abs(repeats - 1 / len(bank)) < 5 * math.sqrt(1 / len(bank) / rounds)
  x = np.random.default_rng(0).normal(size=m)
  x -= x.mean()
  ratio = np.mean([np.sum((np.frombuffer(k).reshape(m, m) @ x) ** 2) for k in keys]) / np.sum(x ** 2)
  rho = 0.5 if m % 2 else (m - 2) / (2 * (m - 1))
  assert ratio == pytest.approx(rho, rel=0.05)


@pytest.mark.parametrize("name,options", [("random_pairs", {}), ("random_groups", {}), ("striped_pairs", {})])
def test_draw_is_a_pure_function_of_seed_and_round(name, options):
  kwargs = {"stripe": 0} if name.startswith("striped") else {}
  draw = lambda seed, rounds: {r: fgd.mixing.make(name, workers=8, seed=seed, **options).matrix(r, **kwargs)
                               for r in rounds}
  forward, backward, other = draw(1, range(40)), draw(1, reversed(range(40))), draw(2, range(40))
  assert all(np.array_equal(forward[r], backward[r]) for r in range(40))
  same = np.mean([np.array_equal(forward[r], other[r]) for r in range(40)])
  assert same < 0.5  # 1/7 expected
  assert len({w.tobytes() for w in forward.values()}) > 1


def test_draw_does_not_touch_the_global_generator():
  np.random.seed(0)
  before = np.random.get_state()[1].copy()
  fgd.mixing.make("random_pairs", workers=8, seed=1).matrix(3)
  np.testing.assert_array_equal(before, np.random.get_state()[1])


@pytest.mark.parametrize("seed", [0, 1, 12345, 2 ** 31])
def test_mixes_of_a_method_draw_different_streams(seed):
  """Two independent draws from 7 matchings agree in 1/7 of the rounds (200 rounds: 0.143 +- 0.025)."""
  method = fgd.methods.make("LocalM1M2").bind(8, seed)
  again = fgd.methods.make("LocalM1M2").bind(8, seed)
  agree = [np.array_equal(method.mix1.matrix(r), method.mix2.matrix(r)) for r in range(200)]
  assert 0.04 < np.mean(agree) < 0.27
  assert all(np.array_equal(method.mix1.matrix(r), again.mix1.matrix(r)) for r in range(20))
  assert all(np.array_equal(method.mix2.matrix(r), again.mix2.matrix(r)) for r in range(20))


def test_build_round_seed_feeds_the_mixers():
  import optax
  bound = [fgd.build_round(fgd.methods.make("LocalM1M2"), lambda p, b, k: 0.0, optax.sgd(0.1), workers=fgd.Workers(8),
                           seed=s)[1].method for s in (0, 0, 1)]
  same = lambda a, b: np.mean([np.array_equal(a.mix1.matrix(r), b.mix1.matrix(r)) for r in range(100)])
  assert same(bound[0], bound[1]) == 1
  assert same(bound[0], bound[2]) < 0.4


def test_streams_of_neighbouring_seeds_do_not_overlap():
  """mix2 of seed s is not mix1 of seed s + 1: runs with consecutive seeds must be independent."""
  for s in range(4):
    a, b = (fgd.methods.make("LocalM1M2").bind(8, x) for x in (s, s + 1))
    for p, q in itertools.product((a.mix1, a.mix2), (b.mix1, b.mix2)):
      assert np.mean([np.array_equal(p.matrix(r), q.matrix(r)) for r in range(100)]) < 0.4


# --- stripes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,m", [("striped_hypercube", 4), ("striped_hypercube", 8), ("striped_pairs", 5),
                                    ("striped_pairs", 8)])
def test_stripes_use_different_matchings_of_the_same_bank(name, m):
  """Stripe i uses matching (i + offset): in each round the stripes cover the bank once."""
  mixer, n = fgd.mixing.make(name, workers=m, seed=2), len(stripes(name, m))
  bank = {mixer.matrix(0, stripe=s).tobytes() for s in range(n)}
  assert len(bank) == n
  offsets = set()
  for r in range(12):
    got = [mixer.matrix(r, stripe=s).tobytes() for s in range(n)]
    assert set(got) == bank
    offsets.add(got[0])
  assert len(offsets) > 1
  with pytest.raises(ValueError, match="stripe"):
    mixer.matrix(0)


def test_stripe_of_is_pure_and_in_range():
  mixer, other = (fgd.mixing.make("striped_pairs", workers=8, seed=s) for s in (0, 9))
  paths = [f"layers_{i}/{kind}/kernel" for i in range(40) for kind in ("attn", "mlp")]
  of = [mixer.stripe_of(p) for p in paths]
  assert all(isinstance(s, int) and 0 <= s < 7 for s in of)
  assert of == [mixer.stripe_of(p) for p in paths] == [other.stripe_of(p) for p in paths]
  counts = np.bincount(of, minlength=7)
  assert counts.min() > 0 and counts.max() < 40  # 80 leaves over 7 stripes
  assert fgd.mixing.make("ring", workers=8).stripe_of(paths[0]) == 0


# --- options and refusals ------------------------------------------------------------------------------------------


def test_name_with_options():
  pair = fgd.mixing.make(("random_groups", {"group_size": 2}), workers=8, seed=4)
  plain = fgd.mixing.make("random_groups", workers=8, seed=4, group_size=2)
  np.testing.assert_array_equal(pair.matrix(3), plain.matrix(3))


@pytest.mark.parametrize("name,m,options,words", [
    ("hypercube", 6, {}, ["hypercube", "6", "power of two"]),
    ("one_peer_hypercube", 6, {}, ["one_peer_hypercube", "6"]),
    ("striped_hypercube", 3, {}, ["striped_hypercube", "3"]),
    ("torus", 8, {}, ["torus", "8"]),
    ("torus", 7, {}, ["torus", "7"]),
    ("torus", 2, {}, ["torus", "2"]),
    ("random_groups", 6, {}, ["group_size", "4", "6"]),
    ("random_groups", 8, {"group_size": 3}, ["group_size", "3", "8"]),
    ("random_groups", 8, {"group_size": 0}, ["group_size", "0"]),
    ("rnig", 8, {}, ["rnig", "ring"]),
    ("ring", 8, {"group_size": 2}, ["ring", "group_size"]),
    ("random_groups", 8, {"size": 2}, ["random_groups", "size"]),
    ("ring", 0, {}, ["workers", "0"]),
])
def test_refusals_name_the_key_and_the_value(name, m, options, words):
  with pytest.raises(ValueError) as error:
    fgd.mixing.make(name, workers=m, **options)
  assert all(word in str(error.value) for word in words), str(error.value)


def test_contraction_refuses_no_rounds():
  with pytest.raises(ValueError, match="rounds"):
    fgd.mixing.make("ring", workers=4).contraction(rounds=0)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "torus"])
def test_one_worker_is_the_identity(name):
  options = {"group_size": 1} if name == "random_groups" else {}
  mixer = fgd.mixing.make(name, workers=1, **options)
  kwargs = {"stripe": 0} if name.startswith("striped") else {}
  np.testing.assert_array_equal(mixer.matrix(0, **kwargs), [[1.0]])


def test_single_matrix_contraction_agrees_with_its_definition():
  for name in ("ring", "lazy_ring", "exponential", "hypercube"):
    mixer = fgd.mixing.make(name, workers=16)
    assert mixer.contraction() == pytest.approx(squared_contraction(mixer.matrix(0)), abs=1e-12)
