"""Methods against NumPy references written from the specification: gradients by hand, matrices of the bound mixers."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fgd_jax as fgd

H, BATCH, ROUNDS = 3, 4, 4
START = {"a": np.random.default_rng(99).normal(size=(3, 2)), "b": np.array([0.3, -0.2])}


def least_squares(params, batch, rng):
  """0.5 mean over examples of ||x a + b - y||^2."""
  error = batch["x"] @ params["a"] + params["b"] - batch["y"]
  return 0.5 * jnp.mean(jnp.sum(error ** 2, axis=-1))


def data(m, rounds=ROUNDS, steps=H, seed=0):
  rng = np.random.default_rng(seed)
  shift = rng.normal(size=(m, 1, 1, 2))  # shards differ
  return [{"x": rng.normal(size=(m, steps, BATCH, 3)), "y": rng.normal(size=(m, steps, BATCH, 2)) + shift}
          for _ in range(rounds)]


def gradient(w, x, y):
  """Loss [M] and gradients of `least_squares`, by hand; w leaves [M, ...], x [M, B, 3], y [M, B, 2]."""
  error = np.einsum("mbi,mij->mbj", x, w["a"]) + w["b"][:, None] - y
  return 0.5 * np.mean(np.sum(error ** 2, -1), -1), {"a": np.einsum("mbi,mbj->mij", x, error) / BATCH,
                                                     "b": error.mean(1)}


class Sgd:
  """w' = w - lr g."""

  def __init__(self, lr=0.1):
    self.lr, self.optax = lr, optax.sgd(lr)

  def init(self, w):
    return None

  def step(self, w, g, state):
    return {k: w[k] - self.lr * g[k] for k in w}, None


class AdamW:
  """Loshchilov and Hutter's AdamW with bias correction and decoupled weight decay."""

  def __init__(self, lr=0.03, b1=0.9, b2=0.99, eps=1e-8, decay=0.1):
    self.hyper = lr, b1, b2, eps, decay
    self.optax = optax.adamw(lr, b1=b1, b2=b2, eps=eps, weight_decay=decay)

  def init(self, w):
    return {k: np.zeros_like(v) for k, v in w.items()}, {k: np.zeros_like(v) for k, v in w.items()}, 0

  def step(self, w, g, state):
    lr, b1, b2, eps, decay = self.hyper
    mean, square, t = state
    t += 1
    mean = {k: b1 * mean[k] + (1 - b1) * g[k] for k in w}
    square = {k: b2 * square[k] + (1 - b2) * g[k] ** 2 for k in w}
    new = {k: w[k] - lr * (mean[k] / (1 - b1 ** t) / (np.sqrt(square[k] / (1 - b2 ** t)) + eps) + decay * w[k])
           for k in w}
    return new, (mean, square, t)


INNER = {"sgd": Sgd, "adamw": AdamW}


def mix(w, tree):
  """(W x)_m = sum_j W[m, j] x_j on every leaf; w is a matrix or a function of the leaf's name."""
  return {k: np.tensordot(w(k) if callable(w) else w, v, axes=1) for k, v in tree.items()}


def reference(batches, m, inner, w1, w2, lr, mu, nesterov=True, average=None, mix_state=False, outer=True):
  """Section 4.1 in stacked form: z' = W1 z - lr (D + mu buf'), D = W2 (z - w), buf' = mu buf + D; (z, loss, w)."""
  z = {k: np.repeat(v[None], m, 0) for k, v in START.items()}
  buf = {k: np.zeros_like(v) for k, v in z.items()}
  state = inner.init(z)
  for r, batch in enumerate(batches):
    w, losses = z, []
    for h in range(batch["x"].shape[1]):
      loss, g = gradient(w, batch["x"][:, h], batch["y"][:, h])
      w, state = inner.step(w, g if average is None else mix(average, g), state)
      losses.append(loss)
    end = w
    if outer:
      d = mix(w2(r), {k: z[k] - w[k] for k in z})
      x = mix(w1(r), z)
      if mix_state:
        buf = mix(w1(r), buf)
      buf = {k: mu * buf[k] + d[k] for k in z}
      z = {k: x[k] - lr * ((d[k] + mu * buf[k]) if nesterov else buf[k]) for k in z}
    else:
      z = w
    yield z, np.stack(losses, 1), end


def train(method, m, batches, inner, seed=3, **kwargs):
  """Yields (params, metrics) of each round as NumPy, the bound method first."""
  init, round_fn = fgd.build_round(method, least_squares, inner.optax, workers=fgd.Workers(m), seed=seed, **kwargs)
  state, out = init(START), []
  for batch in batches:
    state, metrics = round_fn(state, batch)
    out.append(jax.tree.map(np.asarray, (state.params, metrics)))
  return round_fn.method, out


def assert_same(out, want, tolerance=1e-12):
  for r, ((params, metrics), (z, loss, _)) in enumerate(zip(out, want, strict=True)):
    for k in z:
      np.testing.assert_allclose(params[k], z[k], rtol=tolerance, atol=tolerance, err_msg=f"round {r} {k}")
    np.testing.assert_allclose(metrics["loss"], loss, rtol=tolerance, atol=tolerance)


def matrices(mixer):
  """r -> W, or r -> (leaf name -> W) for striped mixers."""
  if mixer.topology.name.startswith("striped"):
    return lambda r: lambda name: mixer.matrix(r, stripe=mixer.stripe_of(name))
  return mixer.matrix


def eye(m):
  return lambda r: np.eye(m)


def mean(m):
  return lambda r: np.full((m, m), 1 / m)


# --- references -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_diloco(x64, m, inner):
  """Section 1.1 with the defaults 0.7 / 0.9; the inner AdamW state is the worker's and survives the round."""
  _, out = train(fgd.methods.make("diloco"), m, data(m), INNER[inner]())
  assert_same(out, reference(data(m), m, INNER[inner](), eye(m), mean(m), 0.7, 0.9))
  for params, metrics in out:
    assert metrics["bytes_overlapped"] == 0
    assert metrics["bytes_blocking"] == pytest.approx(2 * (m - 1) / m * 8 * 8)  # 8 float64
    for x in params.values():
      np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))


@pytest.mark.parametrize("inner,m", [("sgd", 1), ("sgd", 5), ("adamw", 2), ("adamw", 8)])
def test_data_parallel(x64, m, inner):
  """Gradients averaged before each inner step; all H all-reduces are counted."""
  _, out = train(fgd.methods.make("data_parallel"), m, data(m), INNER[inner]())
  assert_same(out, reference(data(m), m, INNER[inner](), None, None, 0, 0, average=np.full((m, m), 1 / m), outer=False))
  assert out[0][1]["bytes_blocking"] == pytest.approx(H * 2 * (m - 1) / m * 64) and out[0][1]["bytes_overlapped"] == 0


@pytest.mark.parametrize("inner,m", [("sgd", 2), ("adamw", 5)])
def test_local(x64, m, inner):
  _, out = train(fgd.methods.make("local"), m, data(m), INNER[inner]())
  assert_same(out, reference(data(m), m, INNER[inner](), None, None, 0, 0, outer=False))
  assert out[0][1]["bytes_blocking"] == out[0][1]["bytes_overlapped"] == 0


PAIRS = [
    (1, "global", "random_pairs"), (1, "random_pairs", "identity"),
    (2, "global", "identity"), (2, "ring", "random_pairs"), (2, "identity", "identity"),
    (5, "global", "random_pairs"), (5, "random_pairs", "random_pairs"), (5, "exponential", "one_peer_exponential"),
    (5, "striped_pairs", "lazy_ring"),
    (8, "global", "identity"), (8, "global", "random_pairs"), (8, "random_pairs", "random_pairs"),
    (8, "random_pairs", "identity"), (8, "identity", "random_pairs"), (8, "identity", "global"),
    (8, "ring", ("random_groups", {"group_size": 4})), (8, "lazy_ring", "ring"),
    (8, ("random_groups", {"group_size": 2}), "exponential"), (8, "one_peer_exponential", "one_peer_hypercube"),
    (8, "hypercube", "striped_hypercube"), (8, "striped_pairs", "striped_pairs"), (8, "striped_hypercube", "hypercube"),
]


@pytest.mark.parametrize("m,mix1,mix2", PAIRS)
def test_fgd(x64, m, mix1, mix2):
  """Section 4.1 with 0.5 / 0.8; AdamW and SGD in turn."""
  inner = AdamW if PAIRS.index((m, mix1, mix2)) % 2 else Sgd
  method = fgd.methods.make("fgd", mix1=mix1, mix2=mix2, outer_lr=0.5, outer_momentum=0.8)
  bound, out = train(method, m, data(m, 5), inner())
  w1, w2 = matrices(bound.mix1), matrices(bound.mix2)
  assert_same(out, reference(data(m, 5), m, inner(), w1, w2, 0.5, 0.8))


def test_fgd_torus(x64):
  bound, out = train(fgd.methods.make("fgd", mix1="torus", mix2="random_pairs", outer_lr=0.7, outer_momentum=0.9), 9,
                     data(9), Sgd())
  assert_same(out, reference(data(9), 9, Sgd(), bound.mix1.matrix, bound.mix2.matrix, 0.7, 0.9))


def test_inner_steps_start_from_z_not_from_the_mixed_parameters(x64):
  """Section 4.1: 'the inner steps start from z, not from x'; the first loss of round 1 is that of the unmixed z."""
  _, out = train(fgd.methods.make("GlobalM1"), 5, data(5), Sgd())
  z, batch = out[0][0], data(5)[1]
  np.testing.assert_allclose(out[1][1]["loss"][:, 0], gradient(z, batch["x"][:, 0], batch["y"][:, 0])[0], rtol=1e-12)
  assert np.ptp(z["b"], axis=0).max() > 1e-3


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix1,lr,mu", [("global", 0.4, 0.8), ("random_pairs", 0.5, 0.6)])
def test_mix_outer_state(x64, mix1, lr, mu):
  """GlobalM1S: Mix1 carries the momentum along with the parameters, and the bytes say so."""
  method = fgd.methods.make("fgd", mix1=mix1, mix2="identity", outer_lr=lr, outer_momentum=mu, mix_outer_state="mix1")
  bound, out = train(method, 8, data(8), Sgd())
  assert_same(out, reference(data(8), 8, Sgd(), bound.mix1.matrix, eye(8), lr, mu, mix_state=True))
  assert out[0][1]["bytes_overlapped"] == pytest.approx(2 * 64 * (2 * 7 / 8 if mix1 == "global" else 1))
  assert out[0][1]["bytes_blocking"] == 0


def test_mix_outer_state_without_a_mix1_changes_nothing(x64):
  make = lambda **o: fgd.methods.make("fgd", mix1="identity", mix2="random_pairs", outer_lr=0.4, **o)
  plain, mixed = train(make(), 4, data(4), Sgd())[1], train(make(mix_outer_state="mix1"), 4, data(4), Sgd())[1]
  np.testing.assert_array_equal(plain[-1][0]["a"], mixed[-1][0]["a"])


@pytest.mark.parametrize("name", ["diloco", "data_parallel"])
def test_worker_weights(x64, name):
  """Section 1.1: Delta = sum a_m Delta_m with a = weights / their sum."""
  weights = np.array([1.0, 2.0, 5.0])
  share = np.repeat(weights[None] / weights.sum(), 3, 0)
  _, out = train(fgd.methods.make(name), 3, data(3), Sgd(), worker_weights=list(weights))
  if name == "diloco":
    want = reference(data(3), 3, Sgd(), eye(3), lambda r: share, 0.7, 0.9)
  else:
    want = reference(data(3), 3, Sgd(), None, None, 0, 0, average=share, outer=False)
  assert_same(out, want)


def test_equal_worker_weights_are_no_weights(x64):
  a = train(fgd.methods.make("diloco"), 3, data(3), Sgd(), worker_weights=[7, 7, 7])[1]
  assert_same(a, reference(data(3), 3, Sgd(), eye(3), mean(3), 0.7, 0.9))


def test_worker_weights_keep_the_weighted_mean_under_gossip(x64):
  """With any doubly stochastic Mix2 the workers' mean moves by the weighted outer gradient."""
  weights = np.array([1.0, 3.0, 2.0, 2.0])
  method = fgd.methods.make("fgd", mix1="global", mix2="random_pairs", outer_lr=1.0, outer_momentum=0.0)
  _, out = train(method, 4, data(4, 1), Sgd(), worker_weights=list(weights))
  _, _, end = next(iter(reference(data(4, 1), 4, Sgd(), eye(4), eye(4), 1, 0)))
  for k, start in START.items():
    delta = np.tensordot(weights / weights.sum(), start[None] - end[k], axes=1)
    np.testing.assert_allclose(out[0][0][k].mean(0), start - delta, rtol=1e-12, atol=1e-14)


def test_outer_takes_any_optax_transform(x64):
  """outer=optax.adam against the textbook Adam on the mixed outer gradients, from x."""
  method = fgd.methods.make("fgd", mix1="ring", mix2="random_pairs", outer=optax.adam(0.05, b1=0.8, b2=0.9, eps=1e-6))
  bound, out = train(method, 5, data(5), Sgd())
  z = {k: np.repeat(v[None], 5, 0) for k, v in START.items()}
  adam, state = AdamW(0.05, 0.8, 0.9, 1e-6, 0.0), None
  for r, batch in enumerate(data(5)):
    w = z
    for h in range(H):
      w, _ = Sgd().step(w, gradient(w, batch["x"][:, h], batch["y"][:, h])[1], None)
    d, x = mix(bound.mix2.matrix(r), {k: z[k] - w[k] for k in z}), mix(bound.mix1.matrix(r), z)
    z, state = adam.step(x, d, state or adam.init(x))
    for k in z:
      np.testing.assert_allclose(out[r][0][k], z[k], rtol=1e-11, atol=1e-12)


def test_outer_sgd_equals_outer_lr(x64):
  a = train(fgd.methods.make("diloco", outer=optax.sgd(0.7, momentum=0.9, nesterov=True)), 2, data(2), Sgd())[1]
  assert_same(a, reference(data(2), 2, Sgd(), eye(2), mean(2), 0.7, 0.9))


def test_outer_lr_may_be_a_schedule_over_rounds(x64):
  method = fgd.methods.make("diloco", outer_lr=lambda count: 0.8 / (1 + count), outer_momentum=0.0)
  _, out = train(method, 2, data(2), Sgd())
  z = START
  for r, (params, _) in enumerate(out):
    w = {k: np.repeat(v[None], 2, 0) for k, v in z.items()}
    for h in range(H):
      w, _ = Sgd().step(w, gradient(w, data(2)[r]["x"][:, h], data(2)[r]["y"][:, h])[1], None)
    z = {k: z[k] - 0.8 / (1 + r) * (z[k] - w[k].mean(0)) for k in z}
    np.testing.assert_allclose(params["a"][1], z["a"], rtol=1e-12)


@pytest.mark.parametrize("name", ["diloco", "fgd", "GlobalM1"])
@pytest.mark.parametrize("other", [{"outer_lr": 0.5}, {"outer_momentum": 0.5},
                                   {"outer_lr": 0.5, "outer_momentum": 0.5}])
def test_outer_and_outer_lr_together_are_refused(name, other):
  with pytest.raises(ValueError, match="outer"):
    fgd.methods.make(name, outer=optax.sgd(1.0), **other)


@pytest.mark.parametrize("name,options,words", [
    ("dilloco", {}, ["dilloco", "diloco"]), ("diloco", {"outer_rate": 1}, ["outer_rate", "outer_lr"]),
    ("local", {"outer_lr": 0.7}, ["outer_lr"]), ("data_parallel", {"mix2": "ring"}, ["mix2"]),
    ("diloco", {"outer_momentum": 1.0}, ["outer_momentum", "1.0"]), ("diloco", {"outer_lr": -1}, ["outer_lr", "-1"]),
    ("fgd", {"mix_outer_state": "mix2"}, ["mix_outer_state", "mix2"]), ("GlobalM1", {"mix3": "ring"}, ["mix3"]),
])
def test_refusals_of_make(name, options, words):
  with pytest.raises(ValueError) as error:
    fgd.methods.make(name, **options)
  assert all(word in str(error.value) for word in words), str(error.value)


def test_unknown_topology_is_refused_when_bound():
  with pytest.raises(ValueError, match="ringg"):
    fgd.build_round(fgd.methods.make("fgd", mix1="ringg"), least_squares, optax.sgd(0.1), workers=fgd.Workers(2))


# --- presets and defaults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,options,mix1,mix2,lr,mu", [
    ("GlobalM1", {}, "global", "identity", 0.4, 0.8),
    ("GlobalM1LocalM2", {}, "global", "random_pairs", 0.7, 0.9),
    ("LocalM1M2", {}, "random_pairs", "random_pairs", 0.7, 0.9),
    ("fgd", {"mix1": "global", "mix2": "random_pairs"}, "global", "random_pairs", 0.7, 0.9),
    ("fgd", {"mix1": "global", "mix2": "identity"}, "global", "identity", 0.4, 0.8),
    ("fgd", {"mix1": "global", "mix2": ("identity", {})}, "global", "identity", 0.4, 0.8),
    ("GlobalM1", {"outer_lr": 0.3}, "global", "identity", 0.3, 0.8),
    ("GlobalM1", {"outer_momentum": 0.5}, "global", "identity", 0.4, 0.5),
    ("LocalM1M2", {"outer_lr": 0.3, "outer_momentum": 0.5}, "random_pairs", "random_pairs", 0.3, 0.5),
])
def test_presets_and_their_defaults(x64, name, options, mix1, mix2, lr, mu):
  """Design 3.1: 0.7 / 0.9, GlobalM1 0.4 / 0.8; the trajectory shows it, so it holds for the bound method."""
  bound, out = train(fgd.methods.make(name, **options), 4, data(4, 2), Sgd())
  assert (bound.mix1.topology.name, bound.mix2.topology.name) == (mix1, mix2)
  assert_same(out, reference(data(4, 2), 4, Sgd(), bound.mix1.matrix, bound.mix2.matrix, lr, mu))


def test_bytes_of_the_presets():
  for name, overlapped, blocking in (("GlobalM1", 2 * 7 / 8, 0), ("GlobalM1LocalM2", 2 * 7 / 8, 1), ("LocalM1M2", 1, 1),
                                     ("diloco", 0, 2 * 7 / 8)):
    init, round_fn = fgd.build_round(fgd.methods.make(name), least_squares, optax.sgd(0.1), workers=fgd.Workers(8))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), START)
    got = round_fn.traffic(round_fn.abstract_state(params).params, data(8)[0])
    assert got == pytest.approx((32 * overlapped, 32 * blocking)), name


# --- identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix1", ["identity", "global"])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_fgd_with_global_mix2_is_diloco(x64, mix1, momentum):
  kwargs = {"outer_lr": 0.6, "outer_momentum": momentum}
  a = train(fgd.methods.make("fgd", mix1=mix1, mix2="global", **kwargs), 5, data(5, 3), AdamW())[1]
  b = train(fgd.methods.make("diloco", **kwargs), 5, data(5, 3), AdamW())[1]
  for (x, _), (y, _) in zip(a, b):
    for k in x:
      np.testing.assert_allclose(x[k], y[k], rtol=1e-13, atol=1e-14)


def test_diloco_of_one_worker_and_one_step_is_the_inner_optimizer(x64):
  """Outer SGD with lr 1; user reports 1.15: one worker runs and equals plain training."""
  batches = data(1, 8, steps=1)
  _, out = train(fgd.methods.make("diloco", outer=optax.sgd(1.0)), 1, batches, AdamW())
  w, inner = {k: v[None] for k, v in START.items()}, AdamW()
  state = inner.init(w)
  for batch, (params, _) in zip(batches, out):
    w, state = inner.step(w, gradient(w, batch["x"][:, 0], batch["y"][:, 0])[1], state)
    for k in w:
      np.testing.assert_allclose(params[k], w[k], rtol=1e-12, atol=1e-13)


def test_one_outer_step_without_momentum_and_lr_one_is_plain_averaging(x64):
  """User reports 1.2."""
  method = fgd.methods.make("diloco", outer_lr=1.0, outer_momentum=0.0)
  out = train(method, 5, data(5, 1), Sgd())[1]
  _, _, end = next(iter(reference(data(5, 1), 5, Sgd(), eye(5), eye(5), 1, 0)))
  for k in START:
    np.testing.assert_allclose(out[0][0][k], np.broadcast_to(end[k].mean(0), end[k].shape), rtol=1e-13, atol=1e-14)


def test_one_inner_sgd_step_and_outer_sgd_is_large_batch_data_parallelism(x64):
  batches = data(4, 5, steps=1)
  a = train(fgd.methods.make("diloco", outer_lr=1.0, outer_momentum=0.0), 4, batches, Sgd())[1]
  b = train(fgd.methods.make("data_parallel"), 4, batches, Sgd())[1]
  np.testing.assert_allclose(a[-1][0]["a"], b[-1][0]["a"], rtol=1e-12)


def test_the_two_nesterov_forms(x64):
  """Section 0.3: y_r = theta_r - lr g_r; theta_{r+1} = y_r + mu (y_r - y_{r-1}), y_{-1} = theta_0."""
  lr, mu = 0.7, 0.9
  out = train(fgd.methods.make("diloco", outer_lr=lr, outer_momentum=mu), 2, data(2, 6), Sgd())[1]
  theta, before = START, START
  for batch, (params, _) in zip(data(2, 6), out):
    w = {k: np.repeat(v[None], 2, 0) for k, v in theta.items()}
    for h in range(H):
      w, _ = Sgd().step(w, gradient(w, batch["x"][:, h], batch["y"][:, h])[1], None)
    y = {k: theta[k] - lr * (theta[k] - w[k].mean(0)) for k in theta}
    theta, before = {k: y[k] + mu * (y[k] - before[k]) for k in y}, y
    for k in theta:
      np.testing.assert_allclose(params[k][0], theta[k], rtol=1e-11, atol=1e-12)


def test_heavy_ball_momentum(x64):
  out = train(fgd.methods.make("diloco", nesterov=False, outer_lr=0.5, outer_momentum=0.6), 2, data(2), Sgd())[1]
  assert_same(out, reference(data(2), 2, Sgd(), eye(2), mean(2), 0.5, 0.6, nesterov=False))


# --- golden trajectories: constant gradients, worked out by hand ----------------------------------------------------


def linear(params, batch, rng):
  """<g, w> with the gradient g given in the batch, a pytree like the parameters."""
  return sum(jnp.vdot(w, g) for w, g in zip(jax.tree.leaves(params), jax.tree.leaves(batch)))


def constant_run(method, gradients, start, rounds, steps=2, lr=0.1, **kwargs):
  """Params after each round; `gradients` leaves [M, ...] are the same in every step."""
  m = len(jax.tree.leaves(gradients)[0])
  init, round_fn = fgd.build_round(method, linear, optax.sgd(lr), workers=fgd.Workers(m), **kwargs)
  state, out = init(start), []
  batch = jax.tree.map(lambda g: np.repeat(g[:, None], steps, 1), gradients)
  for _ in range(rounds):
    state, metrics = round_fn(state, batch)
    out.append(jax.tree.map(np.asarray, state.params))
  return round_fn, out, metrics


@pytest.mark.parametrize("name,want", [
    # Delta = (0.2, 0.6): two steps of 0.1 with gradients 1 and 3. DiLoCo: mean 0.4, lr 0.7, mu 0.9.
    # step = 0.7 (0.4 + 0.9 buf), buf = 0.4, 0.76, 1.084
    ("diloco", [(0.468, 0.468), (-0.2908, -0.2908), (-1.25372, -1.25372)]),
    # lr 0.4, mu 0.8: steps 0.144/0.432, 0.1952/0.5856, 0.23616/0.70848 from x = 1, 0.712, 0.3216
    ("GlobalM1", [(0.856, 0.568), (0.5168, 0.1264), (0.08544, -0.38688)]),
    # two workers: the pair is everybody, so DiLoCo's numbers
    ("GlobalM1LocalM2", [(0.468, 0.468), (-0.2908, -0.2908), (-1.25372, -1.25372)]),
    ("LocalM1M2", [(0.468, 0.468), (-0.2908, -0.2908), (-1.25372, -1.25372)]),
    ("local", [(0.8, 0.4), (0.6, -0.2), (0.4, -0.8)]),
    ("data_parallel", [(0.6, 0.6), (0.2, 0.2), (-0.2, -0.2)]),
])
def test_golden_trajectories(x64, name, want):
  _, out, _ = constant_run(fgd.methods.make(name), np.array([1.0, 3.0]), np.array(1.0), rounds=3)
  np.testing.assert_allclose(np.stack(out), want, rtol=0, atol=1e-14)


def test_golden_global_mix1_only_with_outer_sgd(x64):
  """z' = mean z - Delta: (0.8, 0.4), then 0.6 - (0.2, 0.6), then 0.2 - (0.2, 0.6)."""
  method = fgd.methods.make("GlobalM1", outer=optax.sgd(1.0))
  _, out, _ = constant_run(method, np.array([1.0, 3.0]), np.array(1.0), rounds=3)
  np.testing.assert_allclose(np.stack(out), [(0.8, 0.4), (0.4, 0.0), (0.0, -0.4)], atol=1e-15)


def test_golden_mix_outer_state(x64):
  """GlobalM1S at 0.4 / 0.8: round 1 starts from the mean momentum 0.4, buf = 0.32 + (0.2, 0.6) = (0.52, 0.92)."""
  method = fgd.methods.make("GlobalM1", mix_outer_state="mix1")
  _, out, _ = constant_run(method, np.array([1.0, 3.0]), np.array(1.0), rounds=2)
  np.testing.assert_allclose(np.stack(out), [(0.856, 0.568), (0.712 - 0.4 * 0.616, 0.712 - 0.4 * 1.336)], atol=1e-14)


# --- the mean -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix1,mix2", [("random_pairs", "random_pairs"), ("ring", "identity"),
                                       ("global", "random_pairs"),
                                       ("one_peer_exponential", "exponential"), ("striped_pairs", "random_groups")])
def test_zero_inner_lr_only_mixes(x64, mix1, mix2):
  """User reports 1.19: z' = W1 z, so the mean stays; workers start apart."""
  method = fgd.methods.make("fgd", mix1=mix1, mix2=mix2, outer_lr=0.7, outer_momentum=0.9)
  init, round_fn = fgd.build_round(method, linear, optax.sgd(0.0), workers=fgd.Workers(8), seed=5)
  z = {"w": np.random.default_rng(0).normal(size=(8, 5)), "v": np.random.default_rng(1).normal(size=8)}
  state = init(jax.tree.map(lambda x: x[0], z))._replace(params=jax.tree.map(jnp.asarray, z))
  batch = jax.tree.map(lambda x: np.ones((8, 2, *x.shape[1:])), z)
  for r in range(3):
    state, _ = round_fn(state, batch)
    want = mix(matrices(round_fn.method.mix1)(r), z)
    for k in z:
      np.testing.assert_allclose(state.params[k], want[k], rtol=1e-12, atol=1e-13)
      np.testing.assert_allclose(np.mean(state.params[k], 0), z[k].mean(0), rtol=1e-12, atol=1e-13)
    z = jax.tree.map(np.asarray, state.params)


def test_mean_of_fgd_follows_nesterov(x64):
  """Constant gradients: every doubly stochastic FGD has DiLoCo's mean trajectory."""
  g = np.random.default_rng(0).normal(size=(5, 3))
  start, lr, mu = np.zeros(3), 0.5, 0.8
  _, want, _ = constant_run(fgd.methods.make("diloco", outer_lr=lr, outer_momentum=mu), g, start, rounds=4)
  for mix1, mix2 in (("random_pairs", "random_pairs"), ("identity", "identity"), ("exponential", "ring")):
    _, out, _ = constant_run(fgd.methods.make("fgd", mix1=mix1, mix2=mix2, outer_lr=lr, outer_momentum=mu), g, start,
                             rounds=4)
    np.testing.assert_allclose(np.stack(out).mean(1), np.stack(want).mean(1), rtol=1e-12, atol=1e-14)


# --- subset ---------------------------------------------------------------------------------------------------------


UNSTACKED = {"embed": {"embedding": np.zeros((5, 2))}, "layers_0": {"w": np.zeros((2, 2))},
             "layers_1": {"w": np.zeros((2, 2))}, "layers_10": {"w": np.zeros((2, 2))}, "norm": {"scale": np.zeros(2)},
             "lm_head": {"kernel": np.zeros((2, 5))}}
STACKED = {"embed": {"embedding": np.zeros((5, 2))}, "layers": {"w": np.zeros((4, 2, 3)), "b": np.zeros((4, 3))},
           "final": {"scale": np.zeros(2)}, "lm_head": {"kernel": np.zeros((2, 5))}}


def gradients_like(tree, m, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: rng.normal(size=(m, *x.shape)), tree)


def check_subset(tree, method, covered, m=6, rounds=3, lr=0.5, mu=0.8):
  """Covered entries (a pytree of masks) follow Mix2, the others the worker's own outer gradient; bytes are theirs."""
  g = gradients_like(tree, m)
  round_fn, out, metrics = constant_run(method, g, tree, rounds)
  def leaf(path, start, g, mask, *got):
    z, buf = np.repeat(start[None], m, 0), np.zeros_like(g)
    for r in range(rounds):
      delta = 0.2 * g  # two inner steps of 0.1
      mixed = np.tensordot(round_fn.method.mix2.matrix(r), delta, axes=1)
      d = np.where(mask, mixed, delta)
      buf = mu * buf + d
      z = np.tensordot(round_fn.method.mix1.matrix(r), z, axes=1) - lr * (d + mu * buf)
      np.testing.assert_allclose(got[r], z, rtol=1e-12, atol=1e-13, err_msg=f"{path}")
  masks = jax.tree.map(lambda x, c: np.broadcast_to(c, x.shape), tree, covered)
  jax.tree_util.tree_map_with_path(leaf, tree, g, masks, *out)
  total = sum(x.size for x in jax.tree.leaves(tree))
  assert metrics["bytes_overlapped"] == pytest.approx(8 * total * 2 * (m - 1) / m)
  assert metrics["bytes_blocking"] == 8 * sum(x.sum() for x in jax.tree.leaves(masks))


def subset_method(subset):
  return fgd.methods.make("fgd", mix1="global", mix2="random_pairs", subset=subset, outer_lr=0.5, outer_momentum=0.8)


def test_subset_by_regular_expression(x64):
  covered = jax.tree.map(lambda _: False, UNSTACKED)
  covered["layers_1"] = {"w": True}
  covered["norm"] = {"scale": True}
  check_subset(UNSTACKED, subset_method(r"^layers_1/|scale"), covered)


def test_subset_by_rules_with_a_slice(x64):
  """Stacked leaves: the rule's slice along its axis; the first rule that matches counts."""
  covered = jax.tree.map(lambda _: False, STACKED)
  covered["layers"] = {"w": np.arange(4)[:, None, None] < 1, "b": np.array([False, True, True])[None]}
  covered["lm_head"] = {"kernel": True}
  rules = [("layers/w", 0, slice(0, 1)), ("layers/b", 1, slice(1, 3)), "lm_head", ("layers", 0, slice(0, 4))]
  check_subset(STACKED, subset_method(rules), covered)


@pytest.mark.parametrize("subset", [r"^(layers_1|layers_3|lm_head)/", ["^layers_3/", "lm_head|layers_1/"]])
def test_patterns_of_numbered_layers_cover_rows_of_stacked_ones(x64, subset):
  covered = jax.tree.map(lambda _: False, STACKED)
  covered["layers"] = {"w": np.array([False, True, False, True])[:, None, None], "b": np.arange(4)[:, None] % 2 == 1}
  covered["lm_head"] = {"kernel": True}
  check_subset(STACKED, subset_method(subset), covered)


def test_whole_stacked_leaves_win_over_rows(x64):
  covered = jax.tree.map(lambda _: False, STACKED)
  covered["layers"] = {"w": True, "b": np.arange(4)[:, None] == 2}
  check_subset(STACKED, subset_method(["^layers_2/", "^layers/w$"]), covered)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_embeddings_head_early_layers_unstacked(x64, n):
  covered = jax.tree.map(lambda _: False, UNSTACKED)
  covered["embed"], covered["lm_head"] = {"embedding": True}, {"kernel": True}
  for i in range(n):
    covered[f"layers_{i}"] = {"w": True}
  check_subset(UNSTACKED, subset_method(fgd.mixing.embeddings_head_early_layers(n)), covered)


def test_embeddings_head_early_layers_stacked(x64):
  covered = jax.tree.map(lambda _: False, STACKED)
  covered["embed"], covered["lm_head"] = {"embedding": True}, {"kernel": True}
  covered["layers"] = {"w": np.arange(4)[:, None, None] < 2, "b": np.arange(4)[:, None] < 2}
  check_subset(STACKED, subset_method(fgd.mixing.embeddings_head_early_layers(2)), covered)


def test_stacked_and_unstacked_subsets_agree(x64):
  """Three equal layers, two covered: the same numbers whether the layers are stacked or not."""
  plain = {"embed": np.zeros((5, 2)), **{f"layers_{i}": {"w": np.zeros((2, 2))} for i in range(3)}}
  stacked = {"embed": np.zeros((5, 2)), "layers": {"w": np.zeros((3, 2, 2))}}
  g = gradients_like(plain, 4)
  g_stacked = {"embed": g["embed"], "layers": {"w": np.stack([g[f"layers_{i}"]["w"] for i in range(3)], 1)}}
  method = fgd.methods.make("GlobalM1LocalM2-subset")
  _, a, bytes_a = constant_run(method, g, plain, 3)
  _, b, bytes_b = constant_run(method, g_stacked, stacked, 3)
  want = np.stack([a[-1][f"layers_{i}"]["w"] for i in range(3)], 1)
  np.testing.assert_allclose(b[-1]["layers"]["w"], want, atol=1e-14)
  assert bytes_a["bytes_blocking"] == bytes_b["bytes_blocking"] == 8 * (10 + 2 * 4)


def test_subset_preset(x64):
  """GlobalM1LocalM2-subset: embedding, head and the two shallowest layers at 0.7 / 0.9."""
  covered = jax.tree.map(lambda _: False, UNSTACKED)
  for name in ("embed", "lm_head", "layers_0", "layers_1"):
    covered[name] = jax.tree.map(lambda _: True, UNSTACKED[name])
  check_subset(UNSTACKED, fgd.methods.make("GlobalM1LocalM2-subset"), covered, lr=0.7, mu=0.9)


@pytest.mark.parametrize("subset", ["nothing_here", ["embed", "nothing_here"], "(", [("layers", 5, slice(0, 1))],
                                    [("layers", 0, slice(9, 10))], [("layers", 0)]])
def test_impossible_subsets_are_refused(subset):
  with pytest.raises(ValueError, match="subset"):
    init, _ = fgd.build_round(subset_method(subset), linear, optax.sgd(0.1), workers=fgd.Workers(2))
    init(jax.tree.map(np.float32, STACKED))


def test_subset_preset_refuses_a_tree_without_the_names():
  init, _ = fgd.build_round(fgd.methods.make("GlobalM1LocalM2-subset"), linear, optax.sgd(0.1), workers=fgd.Workers(2))
  with pytest.raises(ValueError, match="subset="):
    init({"w": np.zeros(3, np.float32)})


def test_llama_subset_covers_43_percent():
  """Section 4.3: 1.5B Llama 3 shape, embedding + head + 2 blocks = 43.2 % of the parameters."""
  d, layers, ffn, vocab, kv = 2048, 16, 8192, 128256, 8 * 64
  shapes = {"q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d), "gate": (d, ffn), "up": (d, ffn), "down": (ffn, d),
            "n1": (d,), "n2": (d,)}
  shape = lambda *s: jax.ShapeDtypeStruct(s, np.float32)
  tree = {"embed": shape(vocab, d), "head": shape(d, vocab), "norm": shape(d),
          "layers": {k: shape(layers, *s) for k, s in shapes.items()}}
  method = fgd.methods.make("GlobalM1LocalM2-subset")
  _, round_fn = fgd.build_round(method, linear, optax.sgd(0.1), workers=fgd.Workers(8))
  state = round_fn.abstract_state(tree)
  overlapped, blocking = round_fn.traffic(state.params, {"x": shape(8, 1)})
  total = overlapped / (2 * 7 / 8) / 4
  assert total == pytest.approx(1.498e9, rel=1e-3)
  assert blocking / 4 / total == pytest.approx(0.432, abs=5e-4)


# --- dropped workers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["diloco", "data_parallel", "GlobalM1LocalM2", "LocalM1M2", "GlobalM1"])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0, 4.0]])
def test_a_dropped_worker_never_reaches_the_others(x64, name, weights):
  """Worker 2 computes NaN and is not alive: the others follow the masked matrices (weights of the living)."""
  m, alive = 4, np.array([True, True, False, True])
  g = np.random.default_rng(0).normal(size=(m, 3))
  method = fgd.methods.make(name)
  init, round_fn = fgd.build_round(method, linear, optax.sgd(0.1), workers=fgd.Workers(m), worker_weights=weights,
                                   seed=2)
  bad = np.where(alive[:, None], g, np.nan)
  state = init(np.zeros(3))
  for r in range(3):
    state, _ = round_fn(state, np.repeat(bad[:, None], 2, 1), alive)
    assert np.all(np.isfinite(np.asarray(state.params)[alive])), f"round {r}"
  a = np.ones(m) if weights is None else np.array(weights)
  share = np.where(alive, a, 0) * alive.sum() / a[alive].sum()
  z, buf, bound = np.zeros((m, 3)), np.zeros((m, 3)), round_fn.method
  lr, mu = (0.4, 0.8) if name == "GlobalM1" else (0.7, 0.9)
  for r in range(3):
    delta = 0.2 * share[:, None] * g
    w2 = bound.mix2.matrix(r, alive=alive)
    if name == "data_parallel":
      z = z - w2 @ delta
      continue
    buf = mu * buf + w2 @ delta
    w1 = np.eye(m) if name == "diloco" else bound.mix1.matrix(r, alive=alive)
    z = w1 @ z - lr * (w2 @ delta + mu * buf)
  np.testing.assert_allclose(np.asarray(state.params)[alive], z[alive], rtol=1e-12, atol=1e-13)


# --- the bound ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method,rho1,rho2", [
    (fgd.methods.make("diloco", outer=optax.sgd(1.0)), 0, 0),
    (fgd.methods.make("GlobalM1", outer=optax.sgd(1.0)), 0, 1),
    (fgd.methods.make("GlobalM1LocalM2", outer=optax.sgd(1.0)), 0, 3 / 7),
    (fgd.methods.make("LocalM1M2", outer=optax.sgd(1.0)), 3 / 7, 3 / 7),
    (fgd.methods.make("fgd", mix1="random_pairs", mix2="identity", outer=optax.sgd(1.0)), 3 / 7, 1),
], ids=["DiLoCo", "GlobalM1", "GlobalM1LocalM2", "LocalM1M2", "LocalM1"])
def test_noise_only_bound_holds_with_equality(method, rho1, rho2):
  """Section 4.2 at M=8: consensus_inner = 2 eta^2 sigma^2 H d (1 + rho2 / (1 - rho1)).

  Statistical error: a round's distance has about 7 d degrees of freedom, so sqrt(2 / (7 * 256)) = 3.3 % from the noise,
  and some 10 % from the draw of the matchings; rounds forget at rate rho1 <= 3/7. The standard error of the mean over
  1500 rounds is measured from 30 batch means and must be below 1 %.
  """
  m, steps, d, eta, sigma, burn, rounds = 8, 2, 256, 0.1, 1.5, 20, 1500
  init, round_fn = fgd.build_round(method, linear, optax.sgd(eta), workers=fgd.Workers(m), measure=("consensus",),
                                   seed=4)
  rng, state, measured = np.random.default_rng(1), init(np.zeros(d, np.float32)), []
  for _ in range(burn + rounds):
    state, metrics = round_fn(state, sigma * rng.standard_normal((m, steps, d), dtype=np.float32))
    measured.append(metrics["consensus_inner"])
  measured = np.asarray(jax.device_get(measured[burn:]), np.float64)
  want = 2 * eta ** 2 * sigma ** 2 * steps * d * (1 + rho2 / (1 - rho1))
  error = np.std(measured.reshape(30, -1).mean(1), ddof=1) / np.sqrt(30) / want
  assert error < 0.01
  assert measured.mean() == pytest.approx(want, rel=0.02)


def test_bound_factors_of_the_presets():
  """1 + rho2 / (1 - rho1) at M=8: 2, 1.43, 1.75 (sections 4.2 and 11)."""
  for name, factor in (("GlobalM1", 2), ("GlobalM1LocalM2", 10 / 7), ("LocalM1M2", 1.75)):
    bound = fgd.methods.make(name).bind(8)
    assert 1 + bound.mix2.contraction() / (1 - bound.mix1.contraction()) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize("name", [*fgd.methods.METHODS, *fgd.methods.PRESETS])
def test_methods_can_be_pickled_bound_or_not(name):
  for method in (fgd.methods.make(name), fgd.methods.make(name).bind(4, 1)):
    again = pickle.loads(pickle.dumps(method))
    assert again == method and type(again) is type(method)


def test_methods_are_reusable_and_unchanged_by_binding():
  method = fgd.methods.make("LocalM1M2")
  before = (method.mix1, method.mix2)
  for m, seed in itertools.product((2, 4), (0, 1)):
    assert method.bind(m, seed).mix1.matrix(0).shape == (m, m)
  assert (method.mix1, method.mix2) == before
