"""Eager, NoLoCo, GASLoC, IsoLoCo and recovered momentum against their NumPy references, and their identities."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references as ref
from test_methods import INNER, START, H, assert_same, data, gradient, least_squares, train

import fgd_jax as fgd

ROUNDS = 4


def compare(method, m, reference, inner="sgd", rounds=ROUNDS, batches=None, tolerance=1e-12, **kwargs):
  """Trains, and compares parameters and losses of all rounds with `reference(bound method, batches, inner optimizer)`."""
  batches = data(m, rounds) if batches is None else batches
  bound, out = train(method, m, batches, INNER[inner](), **kwargs)
  assert_same(out, [(z, loss, w) for z, loss, w, *_ in reference(bound, batches, INNER[inner]())], tolerance)
  return bound, out


# --- Eager ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("delay", [1, 2, 3])
def test_eager(x64, delay, inner):
  compare(fgd.methods.make("eager_diloco", outer_lr=0.4, outer_momentum=0.8, delay=delay), 5,
          lambda bound, batches, opt: ref.eager(START, batches, 5, opt, gradient, 0.4, 0.8, delay), inner, rounds=5)


def test_eager_of_one_worker_is_diloco(x64):
  compare(fgd.methods.make("eager_diloco", outer_lr=0.4, outer_momentum=0.8), 1,
          lambda bound, batches, opt: ref.diloco(START, batches, 1, opt, gradient, 0.4, 0.8))


def test_eager_first_round_counts_missing_gradients_as_zero(x64):
  _, out = train(fgd.methods.make("eager_diloco", outer=optax.sgd(1.0)), 4, data(4, 1), INNER["sgd"]())
  w = next(ref.diloco(START, data(4, 1), 4, INNER["sgd"](), gradient, 1.0, 0.0))[2]
  for k in START:
    np.testing.assert_allclose(out[0][0][k], START[k] - (START[k] - w[k]) / 4, rtol=1e-12)


@pytest.mark.parametrize("alive", [[False] * 3, [True, False, True]])
def test_eager_worker_that_is_out_steps_by_its_own_gradient(x64, alive):
  batches = data(3, 2)
  init, round_fn = fgd.build_round(fgd.methods.make("eager_diloco", outer=optax.sgd(1.0)), least_squares, optax.sgd(0.1),
                                   workers=fgd.Workers(3))
  state, _ = round_fn(init(START), batches[0])
  z = jax.tree.map(np.asarray, state.params)
  state, _ = round_fn(state, batches[1], alive=alive)
  w, _, _ = ref.phase(z, None, batches[1], INNER["sgd"](), gradient)
  for k in START:
    np.testing.assert_allclose(np.asarray(state.params[k])[1], w[k][1], rtol=1e-12)


def test_weights_of_workers_that_are_out(x64):
  """Nobody alive: everyone steps by its own outer gradient, whatever the weights."""
  batches = data(3, 1)
  init, round_fn = fgd.build_round(fgd.methods.make("diloco", outer=optax.sgd(1.0)), least_squares, optax.sgd(0.1),
                                   workers=fgd.Workers(3), worker_weights=[1, 2, 5])
  state, _ = round_fn(init(START), batches[0], alive=[False] * 3)
  w, _, _ = ref.phase(ref.stack(START, 3), None, batches[0], INNER["sgd"](), gradient)
  for k in START:
    np.testing.assert_allclose(state.params[k], w[k], rtol=1e-12)


# --- NoLoCo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("m, n", [(4, 2), (5, 2), (8, 4), (4, 4)])
def test_noloco(x64, m, n, inner):
  bound, _ = compare(fgd.methods.make("noloco", group_size=n, alpha=0.4, beta=0.6, gamma=0.5), m,
                     lambda b, x, opt: ref.noloco(START, x, m, opt, gradient, b.mix.matrix, 0.4, 0.6, 0.5), inner)
  if n > 2:
    degree = np.count_nonzero(bound.mix.matrix(0), axis=1)
    assert (degree == n).all()


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.5])
def test_noloco_in_one_group_is_heavy_ball_diloco(x64, gamma):
  batches = data(4, ROUNDS)
  method = fgd.methods.make("noloco", group_size=4, alpha=0.9, beta=0.7, gamma=gamma)
  heavy = fgd.methods.make("diloco", outer_lr=0.7, outer_momentum=0.9, nesterov=False)
  ours, diloco = (train(x, 4, batches, INNER["adamw"]())[1] for x in (method, heavy))
  for (a, _), (b, _) in zip(ours, diloco):
    for k in START:
      np.testing.assert_allclose(a[k], b[k], rtol=1e-11)


def test_noloco_sends_parameters_beside_the_inner_steps():
  method = fgd.methods.make("noloco")
  init, round_fn = fgd.build_round(method, least_squares, optax.sgd(0.1), workers=fgd.Workers(4))
  state, metrics = round_fn(init(jax.tree.map(jnp.float32, START)), jax.tree.map(jnp.float32, data(4, 1)[0]))
  size = 4 * sum(x.size for x in START.values())
  assert metrics["bytes_overlapped"] == size and metrics["bytes_blocking"] == size
  for r in range(8):  # both means go over the same groups
    np.testing.assert_array_equal(round_fn.method.mix1.matrix(r), round_fn.method.mix2.matrix(r))


def test_noloco_refuses_an_unstable_gamma():
  with pytest.raises(ValueError, match=r"gamma=0.7 exceeds 0.9 of the stability limit.*alpha\^2.*0.380.*force=True"):
    fgd.methods.make("noloco", alpha=0.9, gamma=0.7)
  fgd.methods.make("noloco", alpha=0.9, gamma=0.7, force=True)
  fgd.methods.make("noloco", alpha=0.5, gamma=0.7)
  four = fgd.methods.make("noloco", group_size=4, alpha=0.9, gamma=0.7)
  with pytest.raises(ValueError, match="stability limit"):
    four.bind(16, 0)


@pytest.mark.parametrize("factor, grows", [(0.8, False), (1.3, True)])
@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_stability_limit_of_noloco_by_monte_carlo(x64, alpha, factor, grows):
  """Without progress (w = phi) the spread of 16 workers in pairs grows or decays as 2 (1 - alpha^2) says (specs 5.3)."""
  method = fgd.methods.make("noloco", alpha=alpha, gamma=factor * 2 * (1 - alpha**2), force=True)
  init, round_fn = fgd.build_round(method, lambda p, batch, rng: 0.0 * jnp.sum(p["a"]), optax.sgd(0.0),
                                   workers=fgd.Workers(16), seed=1)
  state = init({"a": np.zeros(64)})
  state = state._replace(params={"a": jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)))})
  sizes = []
  for _ in range(120):
    state, _ = round_fn(state, {"x": np.zeros((16, 1, 1))})
    x = np.asarray(state.params["a"])
    sizes.append(np.mean((x - x.mean(0)) ** 2))
  rate = np.polyfit(np.arange(60), np.log(sizes[60:]), 1)[0]
  assert (rate > 0) == grows, rate


@pytest.mark.parametrize("factor, grows", [(0.98, False), (1.02, True)])
@pytest.mark.parametrize("alpha, n", [(0.5, 2), (0.9, 2), (0.7, 4), (0.9, 8)])
def test_stability_limit_of_noloco_in_expectation(alpha, n, factor, grows):
  """The second moment of (phi, delta) over the mixer's own bank, M = 16; 1 - rho of 16 workers stands for (n-1)/n."""
  m = 16
  kept = 1 - (m - n) / (n * (m - 1))  # (n - 1)/n for many workers, where the limit is the documented one
  gamma = factor * 2 * (1 - alpha**2) / (1 - alpha * (2 * kept - 1))
  assert 2 * (1 - 1 / n) - 1 == pytest.approx((n - 2) / n)  # the two forms agree for many workers
  bank = fgd.mixing.make("random_groups" if n > 2 else "random_pairs", workers=m,
                         **({"group_size": n} if n > 2 else {})).topology.matrices
  eye, project = np.eye(m), np.kron(np.eye(2), np.eye(m) - 1 / m)
  steps = [np.block([[eye + gamma * (w - eye), alpha * eye], [gamma * (w - eye), alpha * eye]]) for w in bank]
  moment, rates = project.copy(), []
  for _ in range(400):
    moment = project @ sum(a @ moment @ a.T for a in steps) @ project / len(steps)
    rates.append(np.log(np.trace(moment)))
    moment /= np.trace(moment)
  assert (np.mean(rates[200:]) > 0) == grows


# --- GASLoC -----------------------------------------------------------------------------------------------------------

EDGES = ("edges", {"edges": ((0, 1, 1.0), (1, 2, 0.5), (3, 4, 0.8), (0, 4, 0.3))})


@pytest.mark.parametrize("momentum_mixing", ["local", "mixed"])
@pytest.mark.parametrize("topology", ["random_pairs", "two_random_pairs", EDGES, "global", "ring"])
def test_gasloc(x64, topology, momentum_mixing):
  options = {"eta": 0.6, "alpha": 0.8, "gamma": 0.4, "momentum_mixing": momentum_mixing}
  compare(fgd.methods.make("gasloc", topology=topology, **options), 5,
          lambda b, batches, opt: ref.gasloc(START, batches, 5, opt, gradient, b.mix.matrix, 0.6, 0.8, 0.4,
                                             momentum_mixing == "mixed"), "adamw")


def test_gasloc_matrices_are_weighted_laplacians():
  bound = fgd.methods.make("gasloc", topology=EDGES, alpha=0.8).bind(5, 0)
  laplacian = np.zeros((5, 5))
  for i, j, weight in EDGES[1]["edges"]:
    e = np.eye(5)[i] - np.eye(5)[j]
    laplacian += 0.5 * weight * np.outer(e, e)
  np.testing.assert_allclose(bound.mix.matrix(0), np.eye(5) - 0.8 * laplacian, atol=1e-15)
  pairs = fgd.methods.make("gasloc", alpha=0.5).bind(6, 0)
  for r in range(5):
    w = pairs.mix.matrix(r)
    assert set(np.unique(w)) == {0.0, 0.25, 0.75}  # alpha/2 of the partner
    np.testing.assert_allclose(w.sum(0), 1)
  two = fgd.methods.make("gasloc", topology=("two_random_pairs", {"weight": 0.8})).bind(6, 0).mix.matrix(2)
  np.testing.assert_allclose(np.diag(two), 1 - 0.8)
  assert (np.count_nonzero(two, axis=1) == 3).all()


def test_gasloc_on_a_complete_graph_is_diloco(x64):
  method = fgd.methods.make("gasloc", topology="global", eta=0.7, alpha=1.0, gamma=0.9, momentum_mixing="mixed")
  compare(method, 4, lambda b, batches, opt: ref.diloco(START, batches, 4, opt, gradient, 0.7, 0.9), "adamw")


@pytest.mark.parametrize("inner", INNER)
def test_workers_with_fewer_steps(x64, inner):
  steps = [H, 1, 2, 0]
  method = fgd.methods.make("gasloc", eta=0.6, gamma=0.4, inner_steps=steps)
  compare(method, 4, lambda b, batches, opt: ref.gasloc(START, batches, 4, opt, gradient, b.mix.matrix, 0.6, 1.0, 0.4, False,
                                                        steps=steps), inner)


def test_gasloc_refuses():
  with pytest.raises(ValueError, match="inner_steps=.*each of the 4 workers"):
    fgd.methods.make("gasloc", inner_steps=[1, 2]).bind(4, 0)
  with pytest.raises(ValueError, match="directed"):
    fgd.methods.make("gasloc", topology="one_peer_exponential").bind(8, 0)
  with pytest.raises(ValueError, match="no option 'outer_lr'"):
    fgd.methods.make("gasloc", outer_lr=0.7)
  init, round_fn = fgd.build_round(fgd.methods.make("gasloc", inner_steps=[9, 1]), least_squares, optax.sgd(0.1),
                                   workers=fgd.Workers(2))
  with pytest.raises(ValueError, match="inner_steps=.*from 0 to H=3"):
    round_fn(init(jax.tree.map(jnp.float32, START)), jax.tree.map(jnp.float32, data(2, 1)[0]))
  for options in ({"gamma": 0.9}, {"alpha": 3.0, "topology": "ring", "gamma": 0.0}):
    with pytest.warns(UserWarning, match="stability limit"):
      fgd.methods.make("gasloc", **options).bind(4)
  for options, message in (({"inner_steps": 3}, "inner_steps=3"), ({"inner_steps": [1.5, 2]}, "inner_steps="),
                           ({"inner_steps": [1, -2]}, "inner_steps="), ({"topology": ("edges", {"edges": 3})},
                                                                        "edges: 3 must"),
                           ({"topology": ("two_random_pairs", {"weight": "a"})}, "weight='a'"),
                           ({"codec": "int8", "error_feedback": True}, "error_feedback=True")):
    with pytest.raises(ValueError, match=message):
      fgd.methods.make("gasloc", **options).bind(4)


# --- IsoLoCo and other aggregators ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER)
def test_isoloco(x64, inner):
  # 1e-9: the polar factor is taken without an SVD
  compare(fgd.methods.make("isoloco"), 5, lambda b, batches, opt: ref.isoloco(START, batches, 5, opt, gradient, 1.8, 0.8),
          inner,
          tolerance=1e-9)


def test_isoloco_on_equal_singular_values_is_diloco(x64):
  """With loss -sum(c * w), constant gradients c = a multiple of an orthogonal matrix: Iso-C changes nothing."""
  q = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
  loss = lambda p, batch, rng: jnp.mean(batch["x"]) * jnp.sum(p["a"] * q)
  batches = [{"x": 1 + np.arange(3.0).reshape(3, 1, 1) * np.ones((3, 2, 1))}] * 3
  final = []
  for name, options in (("isoloco", {"outer_lr": 0.7, "outer_momentum": 0.9}), ("diloco", {})):
    init, round_fn = fgd.build_round(fgd.methods.make(name, **options), loss, optax.sgd(0.1), workers=fgd.Workers(3))
    state = init({"a": np.eye(4)})
    for batch in batches:
      state, _ = round_fn(state, batch)
    final.append(np.asarray(state.params["a"]))
  np.testing.assert_allclose(final[0], final[1], rtol=1e-9, atol=1e-9)


def ties(deltas, drop):
  """Per tensor: the largest magnitudes, the elected sign, the mean of those that agree (methods-related.md, 9)."""
  kept = []
  for d in deltas:
    k = int((1 - drop) * d.size)
    least = np.sort(np.abs(d).ravel())[d.size - max(1, k)]
    kept.append(np.where(np.abs(d) >= least, d, 0))
  kept = np.stack(kept)
  sign = np.sign(kept.sum(0))
  agrees = (np.sign(kept) == sign) & (sign != 0)
  return np.where(agrees, kept, 0).sum(0) / np.maximum(1, agrees.sum(0))


def radial(deltas):
  norms = [np.linalg.norm(d) for d in deltas]
  direction = np.mean([d / n for d, n in zip(deltas, norms)], axis=0)
  return np.mean(norms) * direction / np.linalg.norm(direction)


MERGES = {"ties": ({"drop": 0.3}, lambda d: ties(d, 0.3)), "rda": ({}, radial),
          "task_arithmetic": ({"scale": 0.2}, lambda d: 0.2 * d.sum(0)), "mean": ({}, lambda d: d.mean(0))}


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", MERGES)
def test_aggregators_in_the_round(x64, name, devices):
  options, rule = MERGES[name]
  m, batches = 4, data(4, 3)
  mesh = None if devices == 1 else jax.make_mesh((devices,), ("worker",))
  init, round_fn = fgd.build_round(fgd.methods.make("diloco", aggregator=name, aggregator_options=options), least_squares,
                                   optax.sgd(0.1), workers=fgd.Workers(m, mesh))
  state = init(START)
  z, buf = {k: v for k, v in START.items()}, {k: np.zeros_like(v) for k, v in START.items()}
  for batch in batches:
    state, metrics = round_fn(state, batch)
    w, _, _ = ref.phase(ref.stack(z, m), None, batch, INNER["sgd"](), gradient)
    for k in z:
      z[k], buf[k] = ref.nesterov(z[k], rule(z[k] - w[k]), buf[k], 0.7, 0.9)
      for worker in range(m):
        np.testing.assert_allclose(np.asarray(state.params[k])[worker], z[k], rtol=1e-11, atol=1e-12)
  size = 8 * sum(x.size for x in START.values())
  norms = 8 * len(START) if name == "rda" else 0
  wanted = 3 * size if name == "ties" else 2 * 3 / 4 * (size + norms)  # M - 1 messages, or an all-reduce
  assert metrics["bytes_blocking"] == pytest.approx(wanted) and metrics["bytes_overlapped"] == 0


def test_dropped_workers_do_not_count_in_gathering_aggregators(x64):
  batches = data(3, 1)
  init, round_fn = fgd.build_round(fgd.methods.make("diloco", aggregator="ties", outer=optax.sgd(1.0)), least_squares,
                                   optax.sgd(0.1), workers=fgd.Workers(3))
  state, _ = round_fn(init(START), batches[0], alive=[True, False, True])
  w, _, _ = ref.phase(ref.stack(START, 3), None, batches[0], INNER["sgd"](), gradient)
  for k in START:
    d = START[k] - w[k]
    merged = ties(d[[0, 2]], 0.1)
    for worker, delta in ((0, merged), (1, d[1]), (2, merged)):
      np.testing.assert_allclose(np.asarray(state.params[k])[worker], START[k] - delta, rtol=1e-12, atol=1e-12)


def test_worker_weights_reach_the_aggregators(x64):
  weights, batches = [1.0, 2.0, 5.0], data(3, 1)
  share = np.asarray(weights) / 8
  w, _, _ = ref.phase(ref.stack(START, 3), None, batches[0], INNER["sgd"](), gradient)
  for name in ("mean", "rda"):
    init, round_fn = fgd.build_round(fgd.methods.make("diloco", aggregator=name, outer=optax.sgd(1.0)), least_squares,
                                     optax.sgd(0.1), workers=fgd.Workers(3), worker_weights=weights)
    state, _ = round_fn(init(START), batches[0])
    for k in START:
      d = START[k] - w[k]
      norms = np.sqrt((d.reshape(3, -1) ** 2).sum(1))
      direction = np.einsum("m,m...->...", share / norms, d)
      want = (np.einsum("m,m...->...", share, d) if name == "mean" else
              (share @ norms) * direction / np.linalg.norm(direction))
      np.testing.assert_allclose(np.asarray(state.params[k])[0], START[k] - want, rtol=1e-11, atol=1e-12)


# --- recovered momentum ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("retain", [0.0, 0.8])
def test_recovered_momentum(x64, retain, inner):
  method = fgd.methods.make("fgd", mix1="global", mix2="identity", momentum="recovered", retain=retain, outer_lr=0.5,
                            outer_momentum=0.75)
  compare(method, 4, lambda b, batches, opt: ref.recovered(START, batches, 4, opt, gradient, 0.5, 0.75, retain), inner,
          rounds=6)


def test_recovered_momentum_spread_is_the_spread_of_outer_gradients(x64):
  """p = 0: z_m' - mean z' = -lr (1 + mu) (Delta_m - mean Delta) (ours.md, 2)."""
  batches = data(4, 5)
  _, out = train(fgd.methods.make("GlobalM1", momentum="recovered", retain=0.0, outer_lr=0.5, outer_momentum=0.75), 4,
                 batches,
                 INNER["sgd"]())
  before = ref.stack(START, 4)
  for (z, _), batch in zip(out, batches):
    w, _, _ = ref.phase(before, None, batch, INNER["sgd"](), gradient)
    for k in START:
      delta = before[k] - w[k]
      np.testing.assert_allclose(z[k] - z[k].mean(0), -0.5 * 1.75 * (delta - delta.mean(0)), atol=1e-12)
    before = {k: np.asarray(z[k]) for k in START}


def test_recovered_momentum_refuses():
  with pytest.raises(ValueError, match="needs mix1='global' and mix2='identity'"):
    fgd.methods.make("fgd", momentum="recovered")
  with pytest.raises(ValueError, match="retain=1.0"):
    fgd.methods.make("GlobalM1", momentum="recovered", retain=1.0)
  with pytest.raises(ValueError, match="takes no codec"):
    fgd.methods.make("GlobalM1", momentum="recovered", codec="bf16")


def test_globalm1_warns_beyond_its_stability_limit():
  """(1 + mu) / (1 + 2 mu) = 0.679 at mu = 0.9 (ours.md, 3)."""
  with pytest.warns(UserWarning, match=r"0\.679"):
    fgd.methods.make("GlobalM1", outer_lr=0.7, outer_momentum=0.9)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    fgd.methods.make("GlobalM1")
    fgd.methods.make("GlobalM1", outer_lr=0.67, outer_momentum=0.9).bind(4, 0)
    fgd.methods.make("GlobalM1LocalM2", outer_lr=0.7, outer_momentum=0.9)


def test_diloco_mean_is_the_reference(x64):
  compare(fgd.methods.make("diloco"), 4, lambda b, batches, opt: ref.diloco(START, batches, 4, opt, gradient, 0.7, 0.9),
          "adamw")


# --- options of the outer optimizer ------------------------------------------------------------------------------------


def test_outer_clip(x64):
  batches = data(3, 1)
  w, _, _ = ref.phase(ref.stack(START, 3), None, batches[0], INNER["sgd"](), gradient)
  delta = {k: (START[k] - w[k]).mean(0) for k in START}
  norm = np.sqrt(sum((d**2).sum() for d in delta.values()))
  _, out = train(fgd.methods.make("diloco", outer_lr=1.0, outer_momentum=0.0, outer_clip=norm / 2), 3, batches,
                 INNER["sgd"]())
  for k in START:
    np.testing.assert_allclose(out[0][0][k][0], START[k] - delta[k] / 2, rtol=1e-12)
  with pytest.raises(ValueError, match="outer_clip=0 must be a positive"):
    fgd.methods.make("diloco", outer_clip=0)


@pytest.mark.parametrize("name, options", [("diloco", {}), ("GlobalM1LocalM2", {}), ("eager_diloco", {}), ("noloco", {}),
                                           ("gasloc", {}), ("streaming_diloco", {"delay": 0, "blend": 0.0}),
                                           ("pipelined_diloco", {"fragments": 1})])
def test_small_outer_updates_do_not_vanish_in_bfloat16(name, options):
  """Each round moves the outer parameters by far less than half a last digit of bfloat16 at 256 (2.0); the sum must show."""
  lr = {} if name in ("noloco", "gasloc") else {"outer_lr": 0.01, "outer_momentum": 0.0}
  lr |= {"noloco": {"alpha": 0.0, "beta": 0.01, "gamma": 0.0}, "gasloc": {"eta": 0.01, "gamma": 0.0}}.get(name, {})
  loss = lambda p, batch, rng: jnp.sum(p["a"].astype(jnp.float32))
  init, round_fn = fgd.build_round(fgd.methods.make(name, **lr, **options), loss, optax.sgd(2.0), workers=fgd.Workers(2))
  state = init({"a": jnp.full((3,), 256, jnp.bfloat16)})
  batch = {"x": np.zeros((2, 1, 1), np.float32)}
  rounds = 0
  while rounds < 400:  # an inner step moves 256 to 254, so a round moves the outer parameters by 0.02
    state, _ = round_fn(state, batch)
    rounds += 1
  moved = 256 - float(np.asarray(round_fn.eval_params(state)["a"], np.float32)[0])
  assert state.params["a"].dtype == jnp.bfloat16
  assert 400 * 0.01 * 1.5 < moved < 400 * 0.01 * 2.5, moved  # 8 in all; nothing where updates vanish
