"""The decoder against a plain NumPy one, and against what algebra says of it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgd_jax.models import LlamaConfig, count_params, make, stack_layers, unstack_layers
from fgd_jax.models.llama import causal_attention, rope_table, rotate

TINY = LlamaConfig(vocab_size=19, dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24)
PAPER = LlamaConfig(vocab_size=128256, dim=2048, layers=16, heads=32, kv_heads=8, ffn_dim=8192)


def wide(config):
  return dataclasses.replace(config, dtype="float64", param_dtype="float64")


def tokens_of(config, batch=2, length=7, seed=0):
  return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length)), jnp.int32)


@functools.cache
def cached_init(config, seed):
  return make(config).init(jax.random.key(seed))


def init_of(model, seed=0):
  """The same parameters as model.init(key(seed)), compiled once for all tests of a shape; a fresh dict each time."""
  numerics = dataclasses.replace(model.config, dtype="float32", remat=False, attention="einsum")
  return jax.tree.map(jnp.asarray, cached_init(numerics, seed))


def stacked(*trees):
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def paths(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def some_params(model, seed=5):
  """Every leaf, norm scales too, drawn with deviation 0.3, so that no term of the decoder is negligible."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), shapes)


def max_difference(a, b):
  return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.max(np.abs(np.asarray(x) - np.asarray(y)))), a, b)))


# --- an independent decoder: NumPy, float64, loops over batch, heads and positions ---


def numpy_logits(params, tokens, config):
  p = {name: np.asarray(leaf, np.float64) for name, leaf in paths(params).items()}
  head_dim = config.dim // config.heads

  def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_eps) * scale

  def turn(x):  # [L, H], pair (i, i + H/2) as one complex number
    half = head_dim // 2
    angle = np.arange(len(x))[:, None] * config.rope_theta ** (-2.0 * np.arange(half) / head_dim)
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=-1)

  def attention(x, name):
    q, k, v = (x @ p[f"{name}/{part}/kernel"] for part in "qkv")
    out = np.zeros_like(q)
    for head in range(config.heads):
      mine = slice(head * head_dim, (head + 1) * head_dim)
      group = head * config.kv_heads // config.heads
      theirs = slice(group * head_dim, (group + 1) * head_dim)
      qh, kh, vh = turn(q[:, mine]), turn(k[:, theirs]), v[:, theirs]
      for t in range(len(x)):
        weight = np.exp(kh[: t + 1] @ qh[t] / math.sqrt(head_dim))
        out[t, mine] = weight @ vh[: t + 1] / weight.sum()
    return out @ p[f"{name}/o/kernel"]

  def mlp(x, name):
    gate = x @ p[f"{name}/gate/kernel"]
    return (gate / (1 + np.exp(-gate)) * (x @ p[f"{name}/up/kernel"])) @ p[f"{name}/down/kernel"]

  rows = []
  for sequence in np.asarray(tokens):
    x = p["embed/embedding"][sequence]
    for i in range(config.layers):
      x = x + attention(norm(x, p[f"layers_{i}/attn_norm/scale"]), f"layers_{i}/attn")
      x = x + mlp(norm(x, p[f"layers_{i}/mlp_norm/scale"]), f"layers_{i}/mlp")
    rows.append(norm(x, p["final_norm/scale"]) @ (p["embed/embedding"].T if config.tied else p["lm_head/kernel"]))
  return np.stack(rows)


@pytest.mark.parametrize(("kv_heads", "tied"), [(4, False), (2, False), (1, True)])
def test_equals_numpy_decoder(kv_heads, tied):
  with jax.enable_x64(True):
    config = wide(dataclasses.replace(TINY, kv_heads=kv_heads, tied=tied, rope_theta=50.0))
    model = make(config)
    params = some_params(model)
    tokens = tokens_of(config)
    logits, loss = jax.jit(lambda p: (model.apply(p, tokens), model.loss(p, {"tokens": tokens})))(params)
    reference = numpy_logits(params, tokens, config)
    assert logits.dtype == jnp.float64
    np.testing.assert_allclose(logits, reference, rtol=0, atol=1e-12 * np.abs(reference).max())
    # the loss: minus the log probability of the next token, averaged
    with np.errstate(all="raise"):
      log_probs = reference - np.log(np.exp(reference).sum(-1, keepdims=True))
    nll = [-log_probs[b, t, tokens[b, t + 1]] for b in range(2) for t in range(6)]
    np.testing.assert_allclose(loss, np.mean(nll), rtol=1e-12)
    # float32 of the same parameters is close, and not more than close
    narrow = make(dataclasses.replace(config, dtype="float32", param_dtype="float32"))
    narrow = jax.jit(narrow.apply)(params, tokens)
    assert 1e-10 < np.abs(narrow - reference).max() / np.abs(reference).max() < 1e-4


def test_gradient_equals_finite_differences():
  with jax.enable_x64(True):
    model = make(wide(TINY))
    params = some_params(model)
    batch = {"tokens": tokens_of(TINY)}
    loss = jax.jit(lambda p: model.loss(p, batch))
    direction = some_params(model, seed=9)
    slope = sum(
      jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (jax.jit(jax.grad(loss))(params), direction)), strict=True)
    )
    step = [loss(jax.tree.map(lambda p, d, s=s: p + s * d, params, direction)) for s in (1e-5, -1e-5)]
    np.testing.assert_allclose(slope, (step[0] - step[1]) / 2e-5, rtol=1e-7)


# --- shapes, paths, counts ---


def test_paper_shape_has_1498_million_parameters():
  shapes = jax.eval_shape(make(PAPER).init, jax.random.key(0))
  embedding = 128256 * 2048
  attention = 2048 * 2048 + 2 * 2048 * (8 * 64) + 2048 * 2048
  layer = attention + 3 * 2048 * 8192 + 2 * 2048
  total = 2 * embedding + 16 * layer + 2048
  assert count_params(shapes) == total
  assert abs(total / 1.498e9 - 1) < 1e-3
  subset = {k: v for k, v in shapes.items() if k in ("embed", "lm_head", "layers_0", "layers_1")}
  assert round(100 * count_params(subset) / total, 1) == 43.2
  scanned = jax.eval_shape(make(dataclasses.replace(PAPER, scan_layers=True)).init, jax.random.key(0))
  assert count_params(scanned) == total
  assert scanned["layers"]["attn"]["k"]["kernel"].shape == (16, 2048, 512)
  tied = jax.eval_shape(make(dataclasses.replace(PAPER, tied=True)).init, jax.random.key(0))
  assert count_params(tied) == total - embedding


@pytest.mark.parametrize("scan_layers", [False, True])
def test_parameters_are_plain_dicts_with_fixed_paths(scan_layers):
  config = dataclasses.replace(TINY, scan_layers=scan_layers)
  params = init_of(make(config))
  layer = {
    "attn/q/kernel": (16, 16),
    "attn/k/kernel": (16, 8),
    "attn/v/kernel": (16, 8),
    "attn/o/kernel": (16, 16),
    "mlp/gate/kernel": (16, 24),
    "mlp/up/kernel": (16, 24),
    "mlp/down/kernel": (24, 16),
    "attn_norm/scale": (16,),
    "mlp_norm/scale": (16,),
  }
  expected = {"embed/embedding": (19, 16), "final_norm/scale": (16,), "lm_head/kernel": (16, 19)}
  if scan_layers:
    expected |= {f"layers/{name}": (2, *shape) for name, shape in layer.items()}
  else:
    expected |= {f"layers_{i}/{name}": shape for i in range(2) for name, shape in layer.items()}
  assert {name: leaf.shape for name, leaf in paths(params).items()} == expected

  def plain(tree):
    return isinstance(tree, jax.Array) or (type(tree) is dict and all(map(plain, tree.values())))

  assert plain(params)
  tied = make(dataclasses.replace(config, tied=True))
  assert "lm_head" not in jax.eval_shape(tied.init, jax.random.key(0))


def test_init_distribution():
  config = LlamaConfig(vocab_size=64, dim=128, layers=2, heads=4, kv_heads=2, ffn_dim=256)
  params = make(config).init(jax.random.key(3))
  flat = paths(params)
  for i in range(2):
    residual = 1 / math.sqrt(2 * 2)
    for name, fan_in, scale in (
            ("attn/q", 128, 1), ("attn/k", 128, 1), ("attn/v", 128, 1), ("attn/o", 128, residual),
            ("mlp/gate", 128, 1), ("mlp/up", 128, 1), ("mlp/down", 256, residual),
        ):  # fmt: skip
      kernel = np.asarray(flat[f"layers_{i}/{name}/kernel"])
      # 8192 draws or more: the standard deviation is known to 0.8 % (one sigma)
      assert kernel.std() == pytest.approx(scale / math.sqrt(fan_in), rel=0.04)
      assert abs(kernel.mean()) < 5 * kernel.std() / math.sqrt(kernel.size)
  kernels = [np.asarray(leaf).ravel() for name, leaf in flat.items() if leaf.ndim == 2]
  for i, a in enumerate(kernels):  # no two matrices (of one layer or of different layers) share their draws
    for b in kernels[:i]:
      n = min(a.size, b.size)
      assert abs(np.corrcoef(a[:n], b[:n])[0, 1]) < 6 / math.sqrt(n)


def test_both_layouts_start_from_the_same_numbers():
  scanned = make(dataclasses.replace(TINY, scan_layers=True))
  assert max_difference(stack_layers(init_of(make(TINY))), init_of(scanned)) == 0
  assert max_difference(init_of(scanned, 1), init_of(scanned)) > 0


def test_stacking_round_trip():
  config = dataclasses.replace(TINY, layers=11)  # 10 sorts before 2 as text
  params = some_params(make(config))
  stacked = stack_layers(params)
  assert set(stacked) == {"embed", "final_norm", "lm_head", "layers"}
  last = params["layers_10"]["mlp"]["up"]["kernel"]
  np.testing.assert_array_equal(stacked["layers"]["mlp"]["up"]["kernel"][10], last)
  back = unstack_layers(stacked)
  assert jax.tree.structure(back) == jax.tree.structure(params)
  assert max_difference(back, params) == 0
  assert count_params(stacked) == count_params(params) == count_params(jax.eval_shape(stack_layers, params))
  with pytest.raises(ValueError, match="without a gap"):
    stack_layers({k: v for k, v in params.items() if k != "layers_4"})
  with pytest.raises(ValueError, match="without a gap"):
    stack_layers(stacked)
  with pytest.raises(ValueError, match="entry 'layers'"):
    unstack_layers(params)


# --- the forms of one computation ---


def test_scanned_equals_plain_with_and_without_remat():
  with jax.enable_x64(True):
    params = some_params(make(wide(TINY)))
    tokens = tokens_of(TINY)
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((2, 7, 19)) / 100)

    def run(scan_layers, remat):
      model = make(dataclasses.replace(wide(TINY), scan_layers=scan_layers, remat=remat))

      def value(p):
        logits = model.apply(p, tokens)
        return jnp.vdot(weights, logits), logits

      mine = stack_layers(params) if scan_layers else params
      (_, logits), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(mine)
      return logits, unstack_layers(grads) if scan_layers else grads

    plain = run(False, False)
    assert all(float(jnp.abs(leaf).max()) > 1e-4 for leaf in jax.tree.leaves(plain))
    for scan_layers, remat in ((True, False), (True, True)):  # (False, True) stands in the next test
      assert max_difference(run(scan_layers, remat), plain) < 1e-12


def test_under_vmap_map_and_shard_map():
  with jax.enable_x64(True):
    plain, remat, scanned = (
      make(dataclasses.replace(wide(TINY), remat=remat, scan_layers=scan))
      for remat, scan in ((False, False), (True, False), (True, True))
    )
    trees = [some_params(plain, seed) for seed in range(2)]
    batches = [{"tokens": tokens_of(TINY, seed=seed)} for seed in range(2)]
    expected = stacked(*map(jax.jit(jax.grad(plain.loss)), trees, batches))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("worker",))
    spec = jax.sharding.PartitionSpec("worker")

    @jax.jit
    def at_once(p, b):
      inside = jax.vmap(jax.grad(remat.loss))
      return jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(p, b)

    @jax.jit
    def in_turn(p, b):
      return jax.lax.map(lambda pb: jax.grad(scanned.loss)(*pb), (p, b))

    assert max_difference(at_once(stacked(*trees), stacked(*batches)), expected) < 1e-12
    grads = in_turn(stacked(*map(stack_layers, trees)), stacked(*batches))
    assert max_difference(jax.vmap(unstack_layers)(grads), expected) < 1e-12


def test_library_attention_equals_ours():
  rng = np.random.default_rng(0)
  q, k, v = (jnp.asarray(rng.standard_normal((2, 9, n, 8)), jnp.float32) for n in (6, 3, 3))
  np.testing.assert_allclose(causal_attention(q, k, v, "einsum"), causal_attention(q, k, v, "xla"), rtol=0, atol=1e-5)
  model, library = make(TINY), make(dataclasses.replace(TINY, attention="xla"))
  params = some_params(model)
  tokens = tokens_of(TINY)
  ours, theirs = (jax.jit(m.apply)(params, tokens) for m in (model, library))
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)


# --- properties ---


def test_causality():
  model = make(TINY)
  params = some_params(model)
  apply = jax.jit(model.apply)
  tokens = tokens_of(TINY, length=8)
  logits = apply(params, tokens)
  for t in range(8):
    changed = apply(params, tokens.at[:, t].set((tokens[:, t] + 1) % 19))
    np.testing.assert_array_equal(changed[:, :t], logits[:, :t])
    assert np.abs(changed[:, t:] - logits[:, t:]).max(axis=(0, 2)).min() > 1e-4  # and every later one does change


def test_rope_depends_on_relative_position_only():
  with jax.enable_x64(True):
    rng = np.random.default_rng(0)
    q, k = (np.broadcast_to(rng.standard_normal(8), (1, 12, 1, 8)) for _ in range(2))
    rope = rope_table(12, 8, 100.0, jnp.float64)
    turned_q, turned_k = (rotate(jnp.asarray(x), rope)[0, :, 0] for x in (q, k))
    products = np.asarray(turned_q @ turned_k.T)  # [position of q, position of k]
    for offset in range(-11, 12):
      diagonal = np.diagonal(products, offset)
      np.testing.assert_allclose(diagonal, diagonal[0], rtol=0, atol=1e-13)
    assert np.ptp(products[0]) > 0.1
    np.testing.assert_allclose(turned_q[0], q[0, 0, 0], rtol=0, atol=0)  # position 0 is not turned
    np.testing.assert_allclose(jnp.linalg.norm(turned_q, axis=-1), np.linalg.norm(q[0, 0, 0]), rtol=1e-14)


def test_loss_of_uniform_logits_is_log_vocabulary():
  model = make(TINY)
  params = init_of(model)
  params["lm_head"]["kernel"] = jnp.zeros_like(params["lm_head"]["kernel"])
  loss = jax.jit(model.loss)(params, {"tokens": tokens_of(TINY)}, jax.random.key(1))
  assert loss.shape == () and loss.dtype == jnp.float32
  assert float(loss) == pytest.approx(math.log(19), rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_first_loss_is_near_log_vocabulary(tied):
  # Logits are sums of dim products of a unit-rms vector with draws of deviation 0.02, so their variance is
  # 0.02^2 dim = 0.0064; independent normal logits have the expected loss ln V + variance / 2.
  model = make(dataclasses.replace(TINY, tied=tied))
  loss = jax.jit(model.loss)(init_of(model), {"tokens": tokens_of(TINY, 16, 33)})
  assert float(loss) == pytest.approx(math.log(19), abs=0.03)


def equations(jaxpr, primitive="dot_general"):
  for equation in jaxpr.eqns:
    if equation.primitive.name == primitive:
      yield equation
    for value in equation.params.values():
      if hasattr(value, "eqns"):
        yield from equations(value, primitive)


def test_bfloat16_computes_narrow_and_keeps_wide():
  narrow = make(dataclasses.replace(TINY, dtype="bfloat16"))
  full = make(TINY)
  params = init_of(narrow)
  tokens = tokens_of(TINY)
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
  loss, grads = jax.jit(jax.value_and_grad(narrow.loss))(params, {"tokens": tokens})
  assert loss.dtype == jnp.float32
  assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
  logits, exact = (jax.jit(m.apply)(params, tokens) for m in (narrow, full))
  assert logits.dtype == jnp.float32
  relative = float(jnp.linalg.norm(logits - exact) / jnp.linalg.norm(exact))
  assert 1e-4 < relative < 3e-2  # bfloat16 keeps 8 bits: 2^-9 = 0.2 % a rounding
  inputs = [v.aval.dtype for e in equations(jax.make_jaxpr(narrow.apply)(params, tokens)) for v in e.invars]
  assert len(inputs) == 2 * (2 * 9 + 1)  # 7 kernels and 2 attention products a layer, and the logits
  assert set(inputs) == {jnp.dtype("bfloat16")}


def test_param_dtype_alone_makes_everything_float64():
  with jax.enable_x64(True):
    params = some_params(make(wide(TINY)))
    short = make(dataclasses.replace(TINY, param_dtype="float64"))
    tokens = tokens_of(TINY)
    assert max_difference(*(jax.jit(m.apply)(params, tokens) for m in (short, make(wide(TINY))))) == 0
    assert "f32" not in str(jax.make_jaxpr(jax.grad(short.loss))(params, {"tokens": tokens}))


def test_learns_a_cycle():
  model = make(TINY)
  batch = {"tokens": (jnp.arange(9)[None] + jnp.arange(4)[:, None]) % 5}

  def step(params, _):
    loss, grads = jax.value_and_grad(model.loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

  _, losses = jax.lax.scan(step, init_of(model), None, length=60)
  assert losses[0] > 2.5 and losses[-1] < 0.1


# --- refusals ---


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"heads": 3}, ("heads", "3", "dim 16")),
    ({"kv_heads": 3}, ("kv_heads", "3", "heads 4")),
    ({"heads": 16, "kv_heads": 16}, ("heads", "16", "even")),
    ({"dim": 0}, ("dim", "0", "positive")),
    ({"layers": -1}, ("layers", "-1", "positive")),
    ({"vocab_size": 1.5}, ("vocab_size", "1.5", "positive integer")),
    ({"ffn_dim": "64"}, ("ffn_dim", "'64'", "positive integer")),
    ({"kv_heads": 0}, ("kv_heads", "0", "positive")),
    ({"rope_theta": 0.0}, ("rope_theta", "0.0", "positive")),
    ({"norm_eps": float("nan")}, ("norm_eps", "nan", "positive")),
    ({"dtype": "float16"}, ("dtype", "float16", "bfloat16")),
    ({"param_dtype": "f32"}, ("param_dtype", "f32", "float32")),
    ({"dtype": "float64", "param_dtype": "float64"}, ("dtype", "float64", "jax_enable_x64")),
    ({"param_dtype": "float64"}, ("param_dtype", "float64", "jax_enable_x64")),
    ({"attention": "flash"}, ("attention", "flash", "einsum")),
    ({"attention": "cudnn"}, ("attention", "cudnn", "bfloat16")),
  ],
)
def test_refuses_with_one_sentence(change, words):
  with pytest.raises(ValueError) as error:
    make(dataclasses.replace(TINY, **change))
  message = str(error.value)
  assert all(word in message for word in words), message
  assert message.endswith(".") and "\n" not in message


@pytest.mark.parametrize(
  "change",
  [
    {"dtype": "float64"},
    {"dtype": "bfloat16", "param_dtype": "float64"},
    {"param_dtype": "float64", "attention": "xla"},
  ],
)
def test_refuses_half_of_float64(change):
  with jax.enable_x64(True), pytest.raises(ValueError, match="float64"):
    make(dataclasses.replace(TINY, **change))


def test_refuses_the_other_layout():
  plain, scanned = make(TINY), make(dataclasses.replace(TINY, scan_layers=True))
  tokens = tokens_of(TINY)
  with pytest.raises(ValueError, match=r"stack_layers\(params\)"):
    scanned.apply(some_params(plain), tokens)
  with pytest.raises(ValueError, match=r"unstack_layers\(params\)"):
    plain.apply(some_params(scanned), tokens)


def test_unknown_token_is_not_silent():
  model = make(TINY)
  loss = jax.jit(model.loss)(init_of(model), {"tokens": tokens_of(TINY).at[0, 6].set(19)})
  assert math.isnan(float(loss))
