"""Streaming and pipelined DiLoCo: hand-derived histories, NumPy references, fragments of all kinds, identities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import references as ref
from test_methods import INNER, data, gradient, least_squares

import fgd_jax as fgd
from fgd_jax.mixing.fragments import make_fragments

START = {"a": np.random.default_rng(99).normal(size=(3, 2)), "b": np.array([0.3, -0.2])}
H, ROUNDS = 6, 4
WHOLE = [[("a", None), ("b", None)]]
BY_LEAF = [[("a", None)], [("b", None)]]
FLAT = [[("a", (slice(0, 2), slice(None)))], [("a", (slice(2, 3), slice(None))), ("b", None)]]  # 8 parameters, 4 each
PARTITIONS = [(["a", "b"], "strided", BY_LEAF), (2, "flat", FLAT), (1, "strided", WHOLE)]


def run(method, m, batches, inner, devices=1, **kwargs):
  """[(params, outer parameters, metrics)] of each round."""
  mesh = None if devices == 1 else jax.make_mesh((devices,), ("worker",))
  init, round_fn = fgd.build_round(method, least_squares, inner.optax, workers=fgd.Workers(m, mesh), seed=3, **kwargs)
  state, out = init(START), []
  for batch in batches:
    state, metrics = round_fn(state, batch)
    out.append(jax.tree.map(np.asarray, (state.params, round_fn.eval_params(state), metrics)))
  return out


def check(out, want, live=True, tolerance=1e-12):
  for r, ((params, outer, metrics), (z, loss, _, theta)) in enumerate(zip(out, want, strict=True)):
    np.testing.assert_allclose(metrics["loss"], loss, rtol=tolerance, atol=tolerance, err_msg=f"round {r}")
    for k in START:
      np.testing.assert_allclose(outer[k], theta[k], rtol=tolerance, atol=tolerance, err_msg=f"round {r} outer {k}")
      if live:
        np.testing.assert_allclose(params[k], z[k], rtol=tolerance, atol=tolerance, err_msg=f"round {r} {k}")


# --- hand-derived histories --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay, blend", list(ref.HISTORIES))
def test_histories_by_hand(x64, delay, blend):
  gradients = {k: jnp.asarray(v) for k, v in ref.HISTORY_GRADIENTS.items()}
  loss = lambda p, batch, rng: sum(gradients[k][batch["worker"][0].astype(int)] * p[k] for k in p)
  method = fgd.methods.make("streaming_diloco", fragments=["a", "b"], delay=delay, blend=blend, outer_lr=1.0,
                            outer_momentum=0.0)
  init, round_fn = fgd.build_round(method, loss, optax.sgd(ref.HISTORY_INNER_LR), workers=fgd.Workers(2))
  state = init({k: jnp.asarray(v) for k, v in ref.HISTORY_START.items()})
  batch = {"worker": np.arange(2.0).reshape(2, 1, 1) * np.ones((2, ref.HISTORY_STEPS, 1))}
  for want_a, theta_a, want_b, theta_b in ref.HISTORIES[delay, blend]:
    state, _ = round_fn(state, batch)
    outer = round_fn.eval_params(state)
    np.testing.assert_allclose(state.params["a"], want_a, atol=1e-12)
    np.testing.assert_allclose(state.params["b"], want_b, atol=1e-12)
    np.testing.assert_allclose([outer["a"], outer["b"]], [theta_a, theta_b], atol=1e-12)


# --- references ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("fragments, order, parts", PARTITIONS)
@pytest.mark.parametrize("delay, blend", [(0, 0.0), (0, 0.5), (1, 0.5), (2, 0.3), (3, 0.0), (3, 1.0)])
def test_streaming(x64, fragments, order, parts, delay, blend, inner):
  batches = data(3, ROUNDS, steps=H)
  method = fgd.methods.make("streaming_diloco", fragments=fragments, order=order, delay=delay, blend=blend, outer_lr=0.6,
                            outer_momentum=0.8)
  check(run(method, 3, batches, INNER[inner]()),
        ref.streaming(START, batches, 3, INNER[inner](), gradient, parts, delay, blend, 0.6, 0.8))


@pytest.mark.parametrize("landing", ["add", "blend"])
@pytest.mark.parametrize("guess", ["continue", "own"])
@pytest.mark.parametrize("fragments, order, parts", PARTITIONS)
def test_pipelined(x64, fragments, order, parts, guess, landing):
  batches = data(3, ROUNDS, steps=H)
  method = fgd.methods.make("pipelined_diloco", fragments=fragments, order=order, landing=landing, blend=0.3, guess=guess,
                            outer_lr=0.6, outer_momentum=0.8)
  # With guess="own" the reference jumps at the end of a round, ours at the start of the next: same losses, same outer
  # parameters, other live parameters in between.
  check(run(method, 3, batches, INNER["adamw"]()),
        ref.pipelined(START, batches, 3, INNER["adamw"](), gradient, parts, landing, 0.3, guess, 0.6, 0.8),
        live=guess != "own")


@pytest.mark.parametrize("fragments, order", [(["a", "b"], "strided"), (2, "balanced")])  # a has more elements than b
@pytest.mark.parametrize("guess", ["continue", "own"])
def test_pipelined_with_isotropic_outer_gradients(x64, guess, fragments, order):
  batches = data(3, ROUNDS, steps=H)
  method = fgd.methods.make("pipelined_diloco", fragments=fragments, order=order, aggregator="iso_c", guess=guess,
                            outer_lr=0.6, outer_momentum=0.8)
  check(run(method, 3, batches, INNER["adamw"]()),
        ref.pipelined(START, batches, 3, INNER["adamw"](), gradient, BY_LEAF, "add", 0.0, guess, 0.6, 0.8,
                      flatten=ref.iso_c), live=guess != "own", tolerance=1e-9)


def test_one_isotropic_fragment_without_delay_is_isoloco(x64):
  batches = data(4, ROUNDS, steps=H)
  method = fgd.methods.make("streaming_diloco", fragments=1, delay=0, blend=0.0, aggregator="iso_c", outer_lr=1.8,
                            outer_momentum=0.8)
  want = ((z, loss, w, {k: v[0] for k, v in z.items()})
          for z, loss, w in ref.isoloco(START, batches, 4, INNER["adamw"](), gradient, 1.8, 0.8))
  check(run(method, 4, batches, INNER["adamw"]()), want, tolerance=1e-9)


@pytest.mark.parametrize("options, message", [
    ({"aggregator": "iso_c"}, "order='flat' cuts"), ({"aggregator": "ties"}, "'mean' or 'iso_c'"),
    ({"aggregator": "isoc"}, "isoc")])
def test_aggregators_that_cannot_work_on_fragments(options, message):
  with pytest.raises(ValueError, match=message):
    fgd.methods.make("pipelined_diloco", **options)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name, options", [
    ("streaming_diloco", {"fragments": 3, "order": "flat", "delay": 1}),
    ("streaming_diloco", {"fragments": ["a", "b"], "delay": 0}),
    ("pipelined_diloco", {"fragments": 2, "guess": "own"}),
    ("pipelined_diloco", {"fragments": 2, "codec": ("int8", {"block": 4}), "error_feedback": True})])
def test_placements_agree(x64, name, options, devices):
  batches = data(4, 3, steps=H)
  want, got = (run(fgd.methods.make(name, **options), 4, batches, INNER["adamw"](), devices=n) for n in (1, devices))
  for a, b in zip(want, got):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), a, b)


@pytest.mark.parametrize("form", ["barrier", "packed", "ring"])
def test_forms_of_overlap_agree(x64, form):
  batches = data(4, 3, steps=12)
  method = lambda: fgd.methods.make("streaming_diloco", fragments=2, order="flat", delay=5)
  want = run(method(), 4, batches, INNER["sgd"]())
  got = run(method(), 4, batches, INNER["sgd"](), devices=4, overlap=form)
  for a, b in zip(want, got):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), a, b)


# --- identities ---------------------------------------------------------------------------------------------------------


def test_one_fragment_without_delay_is_diloco(x64):
  batches = data(4, ROUNDS, steps=H)
  method = fgd.methods.make("streaming_diloco", fragments=1, delay=0, blend=0.0, outer_lr=0.7, outer_momentum=0.9)
  want = ((z, loss, w, {k: v[0] for k, v in z.items()})
          for z, loss, w in ref.diloco(START, batches, 4, INNER["adamw"](), gradient, 0.7, 0.9))
  check(run(method, 4, batches, INNER["adamw"]()), want)


def test_blend_one_is_local_training(x64):
  batches = data(3, 2, steps=H)
  method = fgd.methods.make("streaming_diloco", fragments=2, order="flat", delay=2, blend=1.0)
  out = run(method, 3, batches, INNER["sgd"]())
  w = ref.stack(START, 3)
  for batch, (params, _, _) in zip(batches, out):
    w, _, _ = ref.phase(w, None, batch, INNER["sgd"](), gradient)
    for k in START:
      np.testing.assert_allclose(params[k], w[k], rtol=1e-12)


def test_pipelined_outer_chain_is_nesterov_on_its_own_mean(x64):
  """Of one worker and one fragment with an additive landing: theta follows Nesterov with theta - w at departure."""
  batches = data(1, 5, steps=H)
  method = fgd.methods.make("pipelined_diloco", fragments=1, outer_lr=0.5, outer_momentum=0.8)
  out = run(method, 1, batches, INNER["sgd"]())
  theta, buf = dict(START), {k: np.zeros_like(v) for k, v in START.items()}
  for params, outer, _ in out:
    # At the end of a round the live w is where the fragment departs; the outer parameters are evaluated with it completed.
    for k in START:
      theta[k], buf[k] = ref.nesterov(theta[k], theta[k] - params[k][0], buf[k], 0.5, 0.8)
      np.testing.assert_allclose(outer[k], theta[k], rtol=1e-12)


# --- fragments ----------------------------------------------------------------------------------------------------------


def layered(stacked, layers=4):
  rng = np.random.default_rng(0)
  one = lambda: {"attn": {"kernel": rng.normal(size=(2, 3))}, "norm": rng.normal(size=(2,))}
  blocks = [one() for _ in range(layers)]
  tree = {"embed": {"embedding": rng.normal(size=(5, 2))}, "final_norm": rng.normal(size=(2,))}
  if stacked:
    return tree | {"layers": jax.tree.map(lambda *x: np.stack(x), *blocks)}
  return tree | {f"layers_{i}": block for i, block in enumerate(blocks)}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("order, of", [("strided", [0, 1, 0, 1]), ("sequential", [0, 0, 1, 1])])
def test_layers_are_dealt_to_fragments(stacked, order, of):
  tree = layered(stacked)
  parts = make_fragments(3, order, tree)
  assert parts.count == 3 and parts.groups == [(0, 1), (2,)]
  for p in range(2):
    mine = [i for i in range(4) if of[i] == p]
    blocks = layered(False)
    leaves = [x for i in mine for x in jax.tree.leaves(blocks[f"layers_{i}"])]
    want = sorted(float(x) for leaf in leaves for x in np.ravel(leaf))
    got = sorted(float(x) for leaf in parts.take(tree, p).values() for x in np.ravel(leaf))
    np.testing.assert_allclose(got, want, rtol=1e-6)
  assert sorted(parts.take(tree, 2)) == ["embed/embedding", "final_norm"]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("fragments, order, ends", [
    (3, "strided", "own"), (5, "sequential", "own"), (2, "strided", "joined"), (4, "sequential", "joined"),
    (7, "flat", "own"), (1, "strided", "own"), (["embed", "."], "strided", "own")])
def test_fragments_are_a_partition(x64, stacked, fragments, order, ends):
  tree = layered(stacked)
  parts = make_fragments(fragments, order, tree, ends)
  marked = jax.tree.map(np.zeros_like, tree)
  total = 0
  for p in range(parts.count):
    ones = {k: jnp.ones_like(v) for k, v in parts.take(tree, p).items()}
    before = sum(float(jnp.sum(x)) for x in jax.tree.leaves(marked))
    marked = parts.put(jax.tree.map(jnp.asarray, marked), p, ones)
    total += sum(float(jnp.sum(x)) for x in jax.tree.leaves(marked)) - before
    back = parts.put(jax.tree.map(jnp.zeros_like, tree), p, parts.take(tree, p))
    again = parts.take(back, p)
    jax.tree.map(np.testing.assert_array_equal, again, parts.take(tree, p))
  assert all((np.asarray(x) == 1).all() for x in jax.tree.leaves(marked))
  assert total == sum(np.size(x) for x in jax.tree.leaves(tree))
  groups = [jax.tree.map(lambda *x: jnp.stack(x), *[parts.take(tree, p) for p in group]) for group in parts.groups]
  jax.tree.map(np.testing.assert_array_equal, parts.join(groups, jax.tree.map(jnp.zeros_like, tree)), tree)


def test_joined_ends_go_to_the_first_and_last_layers():
  """By the tree's order, which sorts keys: embed and final_norm come before layers_0, unembed after the last."""
  tree = layered(False) | {"unembed": np.ones(3)}
  parts = make_fragments(2, "sequential", tree, "joined")
  outside = [{key for key in parts.take(tree, p) if not key.startswith("layers")} for p in range(2)]
  assert outside == [{"embed/embedding", "final_norm"}, {"unembed"}]


@pytest.mark.parametrize("stacked", [False, True])
def test_a_traced_fragment_is_the_same(stacked):
  tree = jax.tree.map(jnp.asarray, layered(stacked))
  parts = make_fragments(3, "strided", tree)
  group = parts.groups[0]
  for p in group:
    got = jax.jit(lambda p: parts.take(tree, p, group))(jnp.int32(p))
    jax.tree.map(np.testing.assert_array_equal, got, parts.take(tree, p))
    doubled = {k: 2 * v for k, v in got.items()}
    put = jax.jit(lambda p: parts.put(tree, p, doubled, group))(jnp.int32(p))
    jax.tree.map(np.testing.assert_array_equal, put, parts.put(tree, p, doubled))


def test_stacked_and_numbered_layers_train_alike(x64):
  def loss(params, batch, rng):
    x = batch["x"] @ params["embed"]["embedding"]
    blocks = ([jax.tree.map(lambda a: a[i], params["layers"]) for i in range(4)] if "layers" in params else
              [params[f"layers_{i}"] for i in range(4)])
    for block in blocks:
      x = x + jnp.tanh(x @ block["attn"]["kernel"])[:, :2] * block["norm"]
    return jnp.mean((x * params["final_norm"] - batch["y"]) ** 2)

  rng = np.random.default_rng(1)
  batches = [{"x": rng.normal(size=(2, H, 4, 5)), "y": rng.normal(size=(2, H, 4, 2))} for _ in range(3)]
  outer = []
  for stacked in (False, True):
    method = fgd.methods.make("streaming_diloco", fragments=3, delay=1)
    init, round_fn = fgd.build_round(method, loss, optax.sgd(0.05), workers=fgd.Workers(2))
    state = init(layered(stacked))
    for batch in batches:
      state, _ = round_fn(state, batch)
    tree = jax.tree.map(np.asarray, round_fn.eval_params(state))
    if not stacked:
      tree["layers"] = jax.tree.map(lambda *x: np.stack(x), *[tree.pop(f"layers_{i}") for i in range(4)])
    outer.append(tree)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14), *outer)


# --- bytes and errors -----------------------------------------------------------------------------------------------------


def test_bytes_of_a_cycle():
  size = 4 * sum(x.size for x in START.values())
  for name, options, overlapped in (("streaming_diloco", {"delay": 1}, True), ("streaming_diloco", {"delay": 0}, False),
                                    ("pipelined_diloco", {}, True)):
    method = fgd.methods.make(name, fragments=["a", "b"], **options)
    init, round_fn = fgd.build_round(method, least_squares, optax.sgd(0.1), workers=fgd.Workers(4))
    _, metrics = round_fn(init(jax.tree.map(jnp.float32, START)), jax.tree.map(jnp.float32, data(4, 1, steps=H)[0]))
    both = metrics["bytes_overlapped"], metrics["bytes_blocking"]
    assert both == ((1.5 * size, 0.0) if overlapped else (0.0, 1.5 * size))


@pytest.mark.parametrize("options, message", [
    ({"fragments": 4}, "fragments=4 must divide the inner steps of a round, H=6"),
    ({"fragments": 2, "order": "flat", "delay": 4}, "delay=4 must be at most H / fragments = 3"),
])
def test_rounds_that_fragments_cannot_share_are_refused(options, message):
  init, round_fn = fgd.build_round(fgd.methods.make("streaming_diloco", **options), least_squares, optax.sgd(0.1),
                                   workers=fgd.Workers(2))
  with pytest.raises(ValueError, match=message):
    layers = {f"layers_{i}": jnp.ones(2) for i in range(4)}
    start = layers if options["fragments"] == 4 else jax.tree.map(jnp.float32, START)
    round_fn(init(start), jax.tree.map(jnp.float32, data(2, 1, steps=H)[0]))


@pytest.mark.parametrize("options, message", [
    ({"fragments": 0}, "fragments=0"), ({"fragments": []}, "fragments="), ({"fragments": ["("]}, "regular expression"),
    ({"order": "random"}, "order='random'"), ({"ends": "none"}, "ends='none'"), ({"delay": -1}, "delay=-1"),
    ({"blend": 1.5}, "blend=1.5"), ({"outer_lr": -1.0}, "outer_lr"), ({"codec": "int5"}, "int5"),
    ({"speed": 1}, "no option 'speed'")])
def test_bad_options_are_refused_at_once(options, message):
  with pytest.raises(ValueError, match=message):
    fgd.methods.make("streaming_diloco", **options)


def test_partitions_that_parameters_do_not_have():
  with pytest.raises(ValueError, match="different lengths"):
    make_fragments(5, "strided", {"h": {"w": np.ones((8, 3)), "b": np.ones(3)}})
  with pytest.raises(ValueError, match="the same path"):
    make_fragments(1, "strided", {"a/b": np.ones(1), "a": {"b": np.ones(2)}})
  with pytest.raises(ValueError, match="fragments=6: 4 layers .* 5 fragments"):
    make_fragments(6, "strided", layered(False))
  with pytest.raises(ValueError, match="none of the patterns .* matches the parameter 'final_norm'"):
    make_fragments(["embed", "layers"], "strided", layered(False))
  with pytest.raises(ValueError, match="matches no parameter that is left"):
    make_fragments([".", "layers"], "strided", layered(False))
  with pytest.raises(ValueError, match="exceeds the 8 parameters"):
    make_fragments(9, "flat", START)
