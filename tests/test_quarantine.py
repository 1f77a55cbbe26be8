"""Workers with numbers that are not finite: left out, restored, reported; the others never see them."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_methods import INNER, START, H, data, gradient, least_squares

import fgd_jax as fgd
from fgd_jax.quarantine import CAUSES

M, SICK = 4, 2
OUTER = {"outer_lr": 0.6, "outer_momentum": 0.8}
METHODS = {
    "local": {}, "data_parallel": {}, "diloco": OUTER, "isoloco": {}, "eager_diloco": OUTER, "noloco": {}, "gasloc": {},
    "GlobalM1": {}, "GlobalM1LocalM2": {}, "LocalM1M2": {},
    "streaming_diloco": {"fragments": 3, "order": "flat", "delay": 1}, "pipelined_diloco": {"fragments": 3},
}


def poisoned(batches, rounds, worker=SICK):
  """Batches in which this worker's data is NaN in some rounds."""
  out = [{k: np.array(v) for k, v in batch.items()} for batch in batches]
  for r in rounds:
    out[r]["y"][worker] = np.nan
  return out


def train(method, batches, devices=None, m=M, inner=None, alive=None, **kwargs):
  """(state, [metrics]) after all rounds."""
  mesh = None if devices is None else jax.make_mesh((devices,), ("worker",), devices=jax.devices()[:devices])
  kwargs = {"quarantine": True, **kwargs}
  init, round_fn = fgd.build_round(method, least_squares, inner or optax.adamw(0.03), workers=fgd.Workers(m, mesh), seed=3,
                                   **kwargs)
  state, out = init(START), []
  for r, batch in enumerate(batches):
    state, metrics = round_fn(state, batch, alive=None if alive is None else alive[r])
    out.append(jax.tree.map(np.asarray, metrics))
  return state, out, round_fn


def finite(state):
  return all(np.all(np.isfinite(x)) for x in jax.tree.leaves(jax.tree.map(np.asarray, state[:3]))
             if np.issubdtype(x.dtype, np.floating))


# --- against references ----------------------------------------------------------------------------------------------


def mixed(matrix, tree, healthy):
  """A mean is over the healthy. Elsewhere the healthy keep the weight of sick neighbours themselves, and the sick take the
  average of their healthy neighbours."""
  w = np.array(matrix)
  if np.all(w == 1 / len(w)):
    return {k: np.broadcast_to(v[healthy].mean(0), v.shape) for k, v in tree.items()}
  for i, j in itertools.product(range(len(w)), repeat=2):
    if i != j and healthy[i] and not healthy[j]:
      w[i, i] += w[i, j]
      w[i, j] = 0
  for i in np.flatnonzero(~healthy):
    w[i, ~healthy] = 0
    w[i] = w[i] / w[i].sum() if w[i].sum() > 0 else np.eye(len(w))[i]
  return {k: np.tensordot(w, v, axes=1) for k, v in tree.items()}


def reference(batches, inner, bound, lr, mu):
  """FGD and DiLoCo (section 4.1 in stacked form) with sick workers, whose steps are thrown away; SGD or AdamW inside."""
  z = {k: np.repeat(v[None], M, 0) for k, v in START.items()}
  buf, state = {k: np.zeros_like(v) for k, v in z.items()}, inner.init(z)
  for r, batch in enumerate(batches):
    w = z
    for h in range(H):
      _, g = gradient(w, batch["x"][:, h], batch["y"][:, h])
      w, state = inner.step(w, g, state)
    healthy = np.all([np.isfinite(v).reshape(M, -1).all(1) for v in w.values()], axis=0)
    pick = lambda new, old: {k: np.where(healthy.reshape(-1, *[1] * (v.ndim - 1)), v, old[k]) for k, v in new.items()}
    w = pick(w, z)
    if state is not None:  # AdamW: moments start again, the count goes on
      mean, square, count = state
      state = pick(mean, {k: 0 for k in z}), pick(square, {k: 0 for k in z}), count
    d = mixed(bound.mix2.matrix(r), {k: z[k] - w[k] for k in z}, healthy)
    w1 = np.eye(M) if not hasattr(bound, "mix1") else bound.mix1.matrix(r)
    x = {k: np.tensordot(w1, v, axes=1) for k, v in z.items()}
    buf = {k: mu * buf[k] + d[k] for k in z}
    z = {k: x[k] - lr * (d[k] + mu * buf[k]) for k in z}
  return z


@pytest.mark.parametrize("name, options, inner", [
    ("diloco", {}, "adamw"), ("GlobalM1LocalM2", {}, "adamw"), ("LocalM1M2", {}, "sgd"), ("GlobalM1", {}, "sgd"),
    ("fgd", {"mix1": "ring", "mix2": "ring"}, "sgd"),
    ("fgd", {"mix1": "identity", "mix2": ("random_groups", {"group_size": 2})}, "sgd")])
def test_mixes_are_renormalised(x64, name, options, inner):
  """Two workers, sick in different and in the same rounds."""
  batches = poisoned(poisoned(data(M, 5), (1, 3)), (3, 4), worker=1)
  method = fgd.methods.make(name, **options, **OUTER)
  state, metrics, round_fn = train(method, batches, inner=INNER[inner]().optax)
  want = reference(batches, INNER[inner](), round_fn.method, 0.6, 0.8)
  for k in START:
    np.testing.assert_allclose(np.asarray(state.params[k]), want[k], rtol=1e-11, atol=1e-11)
  assert [m["quarantine"].tolist() for m in metrics] == [[0] * 4, [0, 0, 1, 0], [0] * 4, [0, 1, 1, 0], [0, 1, 0, 0]]
  assert CAUSES[1] == "loss"


@pytest.mark.parametrize("option", [*({"aggregator": a} for a in ("mean", "rda", "dare", "ties", "iso_cts")),
                                    {"codec": "e3m0"}, {"codec": "bf16"}, {"codec": "topk", "error_feedback": True},
                                    {"aggregator": "ties", "codec": "int8"}], ids=str)
def test_diloco_without_a_worker_is_the_mean_over_the_healthy(x64, option):
  """The others end where they end when the worker is dropped from outside, and the sick one with them."""
  batches = poisoned(data(M, 2), (1,))
  alive = [None, np.arange(M) != SICK]
  method = fgd.methods.make("diloco", **option, **OUTER)
  sgd = optax.sgd(0.1)
  state, _, _ = train(method, batches, inner=sgd)
  want, _, _ = train(method, batches, inner=sgd, alive=alive, quarantine=False)
  for k in START:
    got, other = np.asarray(state.params[k]), np.asarray(want.params[k])
    np.testing.assert_allclose(got[[0, 1, 3]], other[[0, 1, 3]], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got[SICK], got[0], rtol=1e-12, atol=1e-12)
  assert finite(state)


def test_data_parallel_leaves_out_gradients(x64):
  """A worker whose loss is NaN in one step: the mean gradient of that step is over the others; all stay identical."""
  batches = data(M, 1)
  batches[0]["y"][SICK, 1] = np.nan
  state, metrics, _ = train(fgd.methods.make("data_parallel"), batches, inner=optax.sgd(0.1))
  w = {k: np.repeat(v[None], M, 0) for k, v in START.items()}
  for h in range(H):
    _, g = gradient(w, batches[0]["x"][:, h], batches[0]["y"][:, h])
    use = [m for m in range(M) if h != 1 or m != SICK]
    w = {k: w[k] - 0.1 * g[k][use].mean(0) for k in w}
  for k in START:
    np.testing.assert_allclose(np.asarray(state.params[k]), w[k], rtol=1e-12, atol=1e-12)
  assert metrics[0]["quarantine"].tolist() == [0, 0, 1, 0]


def test_fragments_that_lost_steps_are_left_out(x64):
  """Streaming with one fragment, no delay, blend 0 is DiLoCo, also with a sick worker."""
  batches = poisoned(data(M, 4), (1, 2))
  diloco, _, _ = train(fgd.methods.make("diloco", **OUTER), batches)
  streaming, metrics, _ = train(fgd.methods.make("streaming_diloco", fragments=1, delay=0, blend=0.0, **OUTER), batches)
  for k in START:
    np.testing.assert_allclose(np.asarray(streaming.params[k]), np.asarray(diloco.params[k]), rtol=1e-12, atol=1e-12)
  assert [int(m["quarantine"][SICK]) for m in metrics] == [0, 1, 1, 0]


def test_a_fragment_in_flight_counts_until_it_has_departed(x64):
  """Linear loss, SGD: one fragment, one step in flight, outer SGD 1, blend 0; worker 2 is sick in round 1 alone.

  theta_0 = 0. What departs at the start of round 1 holds round 0 of everybody: theta = -eta H mean(g). What departs at the
  start of round 2 leaves worker 2 out, whose displacement lacks steps: with a step in flight after the arrival every other
  worker moved by eta (H - 1) g_m since then.
  """
  g = np.random.default_rng(0).normal(size=(M, 1, 2))
  loss = lambda p, batch, rng: jnp.sum(p["a"] * batch[0])
  init, round_fn = fgd.build_round(
      fgd.methods.make("streaming_diloco", fragments=1, delay=1, blend=0.0, outer_lr=1.0, outer_momentum=0.0), loss,
      optax.sgd(0.1), workers=fgd.Workers(M), quarantine=True)
  state = init({"a": np.zeros(2)})
  for r in range(3):
    batch = np.repeat(g[:, None], 3, 1)
    if r == 1:
      batch[SICK, 2] = np.nan  # in the last step, after the fragment of round 0 arrived
    state, _ = round_fn(state, batch)
  others = [m for m in range(M) if m != SICK]
  theta_1 = -0.1 * 3 * g[:, 0].mean(0)
  theta_2 = theta_1 - 0.1 * 2 * g[others, 0].mean(0)
  np.testing.assert_allclose(round_fn.eval_params(state)["a"], theta_2, rtol=1e-12)


# --- every method -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_watching_changes_nothing_where_all_are_healthy(x64, name):
  got, metrics, _ = train(fgd.methods.make(name, **METHODS[name]), data(M, 3))
  want, _, _ = train(fgd.methods.make(name, **METHODS[name]), data(M, 3), quarantine=False)
  assert [int(m["quarantine"].sum()) for m in metrics] == [0, 0, 0]
  strip = lambda ms: [{k: v for k, v in fs.items() if k != "sick"} for fs in ms] if "fragments" in METHODS[name] else ms
  pairs = zip(jax.tree.leaves((*got[:2], strip(got[2]))), jax.tree.leaves((*want[:2], strip(want[2]))), strict=True)
  for a, b in pairs:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name, devices", [*((name, None) for name in METHODS), ("GlobalM1LocalM2", 4), ("diloco", 2),
                                           ("streaming_diloco", 4), ("data_parallel", 4), ("gasloc", 2)])
def test_all_but_one_sick_for_two_rounds_and_then_well(x64, name, devices):
  """Numbers stay finite everywhere, and the one that is healthy learns: its own loss falls over the rounds."""
  batches = data(M, 4)
  for worker in (0, 1, 3):
    batches = poisoned(batches, (1, 2), worker)
  fixed = {k: v[2] for k, v in batches[0].items()}
  for batch in batches:  # the healthy one sees the same data every round
    for k in batch:
      batch[k][2] = fixed[k]
  inner = None if name == "isoloco" else optax.sgd(0.05, momentum=0.9)  # its large outer steps need small inner ones
  state, metrics, _ = train(fgd.methods.make(name, **METHODS[name]), batches, devices, inner=inner)
  assert finite(state)
  assert [m["quarantine"].astype(bool).tolist() for m in metrics] == [
      [False] * 4, [True, True, False, True], [True, True, False, True], [False] * 4]
  losses = [m["loss"][2].mean() for m in metrics]
  assert losses[3] < losses[0]


@pytest.mark.parametrize("name", ["GlobalM1LocalM2", "diloco", "gasloc", "noloco", "streaming_diloco"])
def test_placements_agree(x64, name):
  batches = poisoned(poisoned(data(M, 3), (1,)), (1, 2), worker=0)
  states = [train(fgd.methods.make(name, **METHODS[name]), batches, devices, inner=optax.sgd(0.1, momentum=0.9))[0]
            for devices in (None, 4 if name != "diloco" else 2)]
  for other in states[1:]:
    for a, b in zip(jax.tree.leaves(other[:3]), jax.tree.leaves(states[0][:3]), strict=True):
      np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name, form", [("streaming_diloco", "packed"), ("streaming_diloco", "ring"), ("diloco", "host"),
                                        ("GlobalM1LocalM2", "host"), ("GlobalM1LocalM2", "packed")])
def test_forms_of_overlap_agree(x64, name, form):
  batches = poisoned(data(M, 3, steps=18), (1,))
  method = fgd.methods.make(name, **(METHODS[name] | ({"delay": 6} if name.startswith("streaming") else {})))
  want, _, _ = train(method, batches, inner=optax.sgd(0.1))
  got, metrics, _ = train(method, batches, 4, inner=optax.sgd(0.1), overlap=form)
  assert metrics[1]["quarantine"].tolist() == [0, 0, 1, 0]
  for a, b in zip(jax.tree.leaves(got[:3]), jax.tree.leaves(want[:3]), strict=True):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["diloco", "GlobalM1LocalM2", "LocalM1M2", "data_parallel", "streaming_diloco"])
def test_no_collective_more(name):
  """The flag travels in the messages: the compiled program has the same collectives with and without quarantine."""
  def collectives(quarantine):
    mesh = jax.make_mesh((M,), ("worker",), devices=jax.devices()[:M])
    init, round_fn = fgd.build_round(fgd.methods.make(name, **METHODS[name]), least_squares, optax.sgd(0.1),
                                     workers=fgd.Workers(M, mesh), quarantine=quarantine)
    params = {k: np.asarray(v, np.float32) for k, v in START.items()}
    batch = {k: v.astype(np.float32) for k, v in data(M, 1)[0].items()}
    text = round_fn.lower(init(params), batch).compile().as_text()
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", text))
            for kind in ("all-reduce", "collective-permute", "all-gather", "all-to-all", "reduce-scatter")}

  watched, plain = collectives(True), collectives(False)
  assert sum(plain.values()) > 0 and watched == plain


def test_parameters_and_outer_steps_that_are_not_finite_have_their_cause(x64):
  """Causes 2 (the inner step overflows, the loss does not) and 3 (the outer step does)."""
  loss = lambda p, batch, rng: jnp.sum(p["a"]) * 0 + jnp.sum(jnp.where(batch > 0, p["a"], 0) * 0 + batch[0])
  blow_up = optax.GradientTransformation(lambda p: (), lambda g, s, p: (
      jax.tree.map(lambda g, p: g + jnp.where(p > 0, jnp.inf, 0), g, p), s))
  init, round_fn = fgd.build_round(fgd.methods.make("local"), loss, blow_up, workers=fgd.Workers(2), quarantine=True)
  state, metrics = round_fn(init({"a": np.ones(2)}), np.zeros((2, 1, 1)))
  assert metrics["quarantine"].tolist() == [2, 2] and finite(state)

  explode = optax.GradientTransformation(lambda p: (), lambda g, s, p: (jax.tree.map(lambda g: g / 0.0, g), s))
  init, round_fn = fgd.build_round(fgd.methods.make("diloco", outer=explode), lambda p, batch, rng: jnp.sum(p["a"] * batch),
                                   optax.sgd(0.1), workers=fgd.Workers(2), quarantine=True)
  state, metrics = round_fn(init({"a": np.ones(2)}), np.ones((2, 1, 1)))
  assert metrics["quarantine"].tolist() == [3, 3]
  np.testing.assert_array_equal(np.asarray(state.params["a"]), 1)


# --- workers that come back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, devices", [("diloco", None), ("LocalM1M2", 4), ("streaming_diloco", 2)])
def test_rejoin_copies_the_donor(x64, name, devices):
  """Parameters, method state and counts are the donor's, the inner optimizer's numbers as at the start; others stay."""
  state, _, round_fn = train(fgd.methods.make(name, **METHODS.get(name, {})), data(M, 2), devices)
  before = jax.tree.map(np.array, state[:3])
  after = jax.tree.map(np.asarray, round_fn.rejoin(state, 1, 3)[:3])
  for tree, (a, b) in enumerate(zip(after, before)):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
      np.testing.assert_array_equal(x[[0, 2, 3]], y[[0, 2, 3]])
      fresh = tree == 1 and np.issubdtype(x.dtype, np.floating)
      np.testing.assert_array_equal(x[1], 0 if fresh else y[3])


def test_a_diloco_worker_that_rejoins_is_one_of_them_again(x64):
  batches = data(M, 4)
  init, round_fn = fgd.build_round(fgd.methods.make("diloco"), least_squares, optax.sgd(0.1), workers=fgd.Workers(M))
  state = init(START)
  for r, batch in enumerate(batches):
    state, _ = round_fn(state, batch, alive=None if r != 1 else np.arange(M) != 0)
    if r == 1:
      state = round_fn.rejoin(state, 0, 1)
  for x in jax.tree.leaves(state.params):
    np.testing.assert_allclose(np.asarray(x), np.broadcast_to(np.asarray(x)[1], x.shape), rtol=1e-13)


def test_data_parallel_workers_are_alike_after_one_rejoins(x64):
  batches = data(M, 4)
  init, round_fn = fgd.build_round(fgd.methods.make("data_parallel"), least_squares, optax.adam(0.03), faults=True,
                                   workers=fgd.Workers(M), quarantine=True)
  state = init(START)
  for r, batch in enumerate(batches):
    state = round_fn.rejoin(state, 0, 1) if r == 2 else state
    state, _ = round_fn(state, batch, alive=None if r != 1 else np.arange(M) != 0)
  for x in jax.tree.leaves(state[:2]):
    np.testing.assert_allclose(np.asarray(x), np.broadcast_to(np.asarray(x)[1], x.shape), rtol=1e-12)


@pytest.mark.parametrize("name, form", [("LocalM1M2", "auto"), ("LocalM1M2", "host"), ("streaming_diloco", "auto")])
def test_who_is_down_keeps_everything_and_is_nobodys_concern(x64, name, form):
  """Its data are NaN while it is down: no cause, and its rows are what they were."""
  batches = poisoned(data(M, 2), (1,))
  mesh = jax.make_mesh((M,), ("worker",), devices=jax.devices()[:M]) if form == "host" else None
  init, round_fn = fgd.build_round(fgd.methods.make(name, **METHODS[name]), least_squares, optax.adamw(0.03), faults=True,
                                   workers=fgd.Workers(M, mesh), quarantine=True, overlap=form)
  state, _ = round_fn(init(START), batches[0])
  before = jax.tree.map(np.array, state[:3])
  state, metrics = round_fn(state, batches[1], alive=np.arange(M) != SICK)
  assert metrics["quarantine"].tolist() == [0] * M and finite(state)
  for x, y in zip(jax.tree.leaves(jax.tree.map(np.asarray, state[:3])), jax.tree.leaves(before), strict=True):
    np.testing.assert_array_equal(x[SICK], y[SICK])
  assert np.abs(np.asarray(state.params["a"]) - before[0]["a"])[0].max() > 0


def test_steps_that_are_not_taken_make_nobody_sick(x64):
  batches = data(M, 1)
  batches[0]["y"][SICK, 2:] = np.nan
  method = fgd.methods.make("gasloc", inner_steps=(3, 3, 2, 3))
  state, metrics, _ = train(method, batches)
  assert metrics[0]["quarantine"].tolist() == [0] * M and finite(state)


def test_outer_steps_of_fragments_that_are_not_finite_are_reported():
  params, batch = {"a": np.ones(4, np.float32)}, np.ones((2, 4, 4), np.float32)
  for delay in (0, 1):
    method = fgd.methods.make("streaming_diloco", fragments=2, order="flat", delay=delay, outer_lr=3e38, outer_momentum=0.9)
    init, round_fn = fgd.build_round(method, lambda p, b, rng: 1e3 * jnp.sum(p["a"] * b), optax.sgd(1.0),
                                     workers=fgd.Workers(2), quarantine=True)
    state, causes = init(params), []
    for _ in range(2):
      state, metrics = round_fn(state, batch)
      causes.append(metrics["quarantine"].tolist())
    assert causes[-1] == [3, 3] and finite(state)


def test_an_infinity_that_an_optimizer_starts_with_is_no_fault(x64):
  best = optax.GradientTransformation(lambda p: {"best": jnp.inf}, lambda g, s, p: (jax.tree.map(lambda g: -0.1 * g, g), s))
  _, metrics, _ = train(fgd.methods.make("diloco"), data(M, 1), inner=best)
  assert metrics[0]["quarantine"].tolist() == [0] * M


@pytest.mark.parametrize("build, words", [
    (lambda: fgd.build_round(fgd.methods.make("diloco"), least_squares, optax.sgd(0.1), workers=fgd.Workers(2),
                             worker_weights=[1, 2], quarantine=True), "worker_weights"),
    (lambda: fgd.build_round(fgd.methods.make("fgd", mix2="exponential"), least_squares, optax.sgd(0.1),
                             workers=fgd.Workers(8), quarantine=True), "directed")])
def test_refusals(build, words):
  with pytest.raises(ValueError, match=words):
    build()
