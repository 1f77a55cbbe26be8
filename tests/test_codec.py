"""Codecs against NumPy in float64: numbers, bytes on the wire, symmetry, bias, non-finite values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from fgd_jax.mixing.codec import CODECS, make_codec

NAMES = ["bf16", "int8", "int4", "e3m0", "topk"]
SCALED = ["int8", "int4", "e3m0"]
STOCHASTIC = [(name, {"stochastic": True}) for name in SCALED]
SHAPES = [(), (7,), (4, 512), (2, 3, 300), (2, 1, 3, 85), (3, 4099)]
EMPTY = [(0,), (3, 0), (0, 5), (2, 0, 256)]


def gaussian(shape, seed=0, dtype=np.float64):
  """Values over several powers of two of magnitude, so that the blocks differ."""
  rng = np.random.default_rng(seed)
  return np.asarray(rng.normal(size=shape) * np.exp2(rng.integers(-3, 4, size=shape))).astype(dtype)


def by_block(x, block, function):
  """Applies function([n]) -> [n] to every `block` consecutive values; the last block may be shorter."""
  flat = np.asarray(x, np.float64).reshape(-1)
  parts = [function(flat[i:i + block]) for i in range(0, len(flat), block)]
  return np.concatenate([np.zeros(0), *parts]).reshape(np.shape(x))


def nearest_level(values, levels):
  """Each value's sign times the level nearest to its magnitude; the levels are times the float32 absolute maximum."""
  levels = np.float64(np.float32(np.abs(values).max())) * levels
  return np.sign(values) * levels[np.abs(np.abs(values)[:, None] - levels).argmin(1)]


def largest(values, k):
  kept = np.argsort(-np.abs(values), kind="stable")[:k]
  out = np.zeros_like(values)
  out[kept] = values[kept].astype(np.float32)
  return out


def eight_bits(x):
  """Rounded to eight significant bits, ties to even: bfloat16 in its normal range."""
  mantissa, exponent = np.frexp(np.asarray(x, np.float64))
  return np.ldexp(np.rint(mantissa * 256), exponent - 8)


E3M0 = np.array([0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1])


def oracle(name, x, block=256, chunk=4096, ratio=1 / 32):
  if name == "bf16":
    return eight_bits(x)
  if name == "topk":
    k = max(1, round(ratio * min(chunk, np.size(x))))
    return by_block(x, chunk, lambda v: largest(v, k))
  levels = {"int8": np.arange(128) / 127, "int4": np.arange(8) / 7, "e3m0": E3M0}[name]
  return by_block(x, block, lambda v: nearest_level(v, levels))


def jit(function):
  """Compiles quickly; the programs are small."""
  return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def trip(codec):
  return jit(lambda xs, key: [codec.roundtrip(x, key) for x in xs])


def see(codec, arrays, seed=0):
  """What others see of each array, in one program."""
  return trip(make_codec(codec))([jnp.asarray(x) for x in arrays], np.array([0, seed], np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_roundtrip_is_the_reference_in_float64(name, x64):
  arrays = [gaussian(shape) for shape in SHAPES]
  for x, seen in zip(arrays, see(name, arrays), strict=True):
    assert seen.dtype == jnp.float64 and seen.shape == x.shape
    np.testing.assert_allclose(seen, oracle(name, x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_narrow_leaves_are_computed_in_float32_and_keep_their_dtype(name):
  arrays = [gaussian((3, 700), dtype=dtype) for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)]
  for x, seen in zip(arrays, see(name, arrays), strict=True):
    assert seen.dtype == x.dtype
    cast = oracle(name, np.asarray(x, np.float64)).astype(x.dtype).astype(np.float64)
    wrong = np.abs(np.asarray(seen, np.float64) - cast) > float(jnp.finfo(x.dtype).eps) * np.abs(cast)
    assert wrong.mean() <= 0.02 * (x.dtype != jnp.float32)  # narrow values tie, which the reference breaks otherwise
    assert name not in ("bf16", "topk") or not wrong.any()


@pytest.mark.parametrize("name,block", [("int4", 33), ("e3m0", 1)])
def test_block_option_and_odd_blocks(name, block, x64):
  x = gaussian((4, 66))
  np.testing.assert_allclose(see((name, {"block": block}), [x])[0], oracle(name, x, block), rtol=1e-12, atol=0)


@pytest.mark.parametrize("ratio,chunk,k", [(1 / 32, 4096, 31), (0.1, 64, 6), (1e-6, 64, 1)])
def test_topk_options(ratio, chunk, k, x64):
  x = gaussian((10, 99))
  options = {"ratio": ratio, "chunk": chunk}
  seen = np.asarray(see(["topk", options], [x])[0])
  np.testing.assert_array_equal(seen, oracle("topk", x, chunk=chunk, ratio=ratio))
  assert np.count_nonzero(seen.reshape(-1)[:chunk]) == k
  halves = see(("topk", options | {"values": "bf16"}), [x])[0]
  np.testing.assert_array_equal(halves, eight_bits(np.where(seen != 0, x, 0)))


def test_topk_ties_go_to_the_lower_index():
  x = np.array([1.0, -2.0, 2.0, -2.0, 0.5, 2.0, -1.0, 0.0])
  seen = see(("topk", {"ratio": 3 / 8}), [x.astype(np.float32)])[0]
  np.testing.assert_array_equal(seen, [0, -2, 2, -2, 0, 0, 0, 0])


def test_e3m0_thresholds_lie_in_the_middle_of_neighbouring_levels():
  for k in range(-6, 0):
    x = np.array([1.0, 1.4999 * 2.0 ** k, 1.5001 * 2.0 ** k, -1.4999 * 2.0 ** k, 0.9999 / 128, 1.0001 / 128], np.float32)
    expected = [1, 2.0 ** k, 2.0 ** (k + 1), -(2.0 ** k), 0, 1 / 64]
    np.testing.assert_array_equal(see("e3m0", [x])[0], expected)


def test_float64_is_rounded_to_bf16_once(x64):
  x = np.array([1 + 2.0 ** -8 + 2.0 ** -40, 1 + 2.0 ** -8, 1 + 3 * 2.0 ** -8])
  np.testing.assert_array_equal(see("bf16", [x])[0], [1 + 2.0 ** -7, 1, 1 + 2.0 ** -6])


@pytest.mark.parametrize("name,options,shape,rows,width", [
    ("bf16", {}, (3, 5), 3, 10), ("bf16", {}, (), 1, 2), ("int8", {}, (2, 256), 2, 260), ("int8", {}, (257,), 2, 260),
    ("int4", {}, (2, 256), 2, 132), ("e3m0", {}, (2, 256), 2, 132), ("e3m0", {}, (16, 32), 2, 132),
    ("e3m0", {}, (), 1, 5), ("e3m0", {}, (3, 5), 1, 12), ("e3m0", {"block": 5}, (11,), 3, 7),
    ("topk", {}, (4096,), 1, 768), ("topk", {"values": "bf16"}, (4096,), 1, 512), ("topk", {}, (4097,), 2, 768),
    ("topk", {}, (), 1, 6), ("topk", {"ratio": 0.5}, (2, 5), 1, 30),
])
def test_bytes_on_the_wire(name, options, shape, rows, width):
  codec = make_codec((name, options))
  payload = jax.eval_shape(codec.encode, jnp.ones(shape))
  assert payload.dtype == jnp.uint8 and payload.shape == (rows, width)
  assert codec.nbytes(jax.ShapeDtypeStruct(shape, jnp.float32)) == rows * width


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_the_size_of_the_payload(name):
  codec = make_codec(name)
  for shape in SHAPES + EMPTY:
    for dtype in (jnp.bfloat16, jnp.float32):
      x = jax.ShapeDtypeStruct(shape, dtype)
      payload = jax.eval_shape(codec.encode, x)
      assert payload.ndim == 2 and payload.size == codec.nbytes(x)
      assert payload.shape[1] > 0 and (payload.shape[0] == 0) == (x.size == 0)
  for shape, seen in zip(EMPTY, see(name, map(jnp.ones, EMPTY)), strict=True):
    assert seen.shape == shape


@pytest.mark.parametrize("name,levels", [("int4", np.arange(8) / 7), ("e3m0", E3M0)])
def test_a_row_holds_nibbles_and_then_its_scale(name, levels):
  x = gaussian((2, 257), dtype=np.float32)
  rows = np.asarray(jit(make_codec(name).encode)(x))
  assert rows.shape == (3, 132)
  scale = np.ascontiguousarray(rows[:, 128:]).view("<f4").astype(np.float64)
  codes = np.concatenate([rows[:, :128] & 15, rows[:, :128] >> 4], axis=1)
  values = np.where(codes >= 8, -1, 1) * levels[codes & 7] * scale
  np.testing.assert_allclose(values.reshape(-1)[:514].reshape(2, 257), oracle(name, x), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_idempotent_and_odd(name, x64):
  arrays = [gaussian((5, 333), dtype=dtype) for dtype in (jnp.bfloat16, jnp.float64)]
  once = see(name, arrays)
  for seen, twice, negated in zip(once, see(name, once), see(name, [-x for x in arrays]), strict=True):
    seen = np.asarray(seen, np.float64)
    np.testing.assert_allclose(np.asarray(twice, np.float64), seen, rtol=1e-6 if name in ("int8", "int4") else 0, atol=0)
    np.testing.assert_array_equal(np.asarray(negated, np.float64), -seen)


@pytest.mark.parametrize("codec", ["int8", "e3m0", ("e3m0", {"stochastic": True}), ("topk", {"chunk": 256})], ids=str)
def test_aligned_and_unaligned_blocks_agree(codec):
  x, key = gaussian((8, 512), dtype=np.float32), np.zeros(2, np.uint32)
  shapes = [(8, 512), (4096,), (32, 128), (2, 2, 2, 512)]
  rows = jit(lambda xs: [make_codec(codec).encode(x, key) for x in xs])([x.reshape(shape) for shape in shapes])
  for others in rows[1:]:
    np.testing.assert_array_equal(others, rows[0])


def test_e3m0_on_gaussian_data():
  """Figures of specs/methods-related.md, 10.1. Floor rounding would have gain 0.725 and error 0.098."""
  x = np.random.default_rng(1).normal(size=(256, 1024)).astype(np.float32)
  energy = np.sum(np.float64(x) ** 2)
  for codec, gain, error in (("e3m0", 0.965, 0.038), (("e3m0", {"stochastic": True}), 1.0, 0.080)):
    seen = np.asarray(see(codec, [x], seed=2)[0], np.float64)
    assert 0.95 < np.sum(seen * x) / energy < 1.05
    np.testing.assert_allclose(np.sum(seen * x) / energy, gain, atol=3e-3)
    np.testing.assert_allclose(np.sum((seen - x) ** 2) / energy, error, atol=1e-3)


@pytest.mark.parametrize("name,levels", [("int8", np.arange(128) / 127), ("int4", np.arange(8) / 7), ("e3m0", E3M0)])
def test_stochastic_rounding_is_unbiased_between_neighbours(name, levels, x64):
  x = np.concatenate([np.random.default_rng(0).normal(size=29), [0.0, 1e-4, 4.0]]).astype(np.float32).astype(np.float64)
  codec = make_codec((name, {"stochastic": True}))
  draws = 8000
  keys = jax.random.split(jax.random.key(1), draws)
  seen = np.asarray(jit(jax.vmap(lambda key: codec.roundtrip(jnp.asarray(x), key)))(keys))
  levels = 4.0 * levels
  upper = levels[np.minimum(np.searchsorted(levels, np.abs(x), side="right"), len(levels) - 1)]
  lower = levels[np.searchsorted(levels, np.abs(x), side="right") - 1]
  near = lambda level: np.abs(np.abs(seen) - level) < 1e-9
  assert np.all(near(lower) | near(upper)) and np.all(seen * x >= 0)
  deviation = np.sqrt(np.maximum((upper - np.abs(x)) * (np.abs(x) - lower), 0) / draws)
  assert np.all(np.abs(seen.mean(0) - x) <= 5 * deviation + 1e-12)
  assert np.abs(((seen.mean(0) - x) / np.where(deviation > 0, deviation, 1)).sum()) < 5 * np.sqrt(len(x))


@pytest.mark.parametrize("codec", ["bf16", "int8", "e3m0", "topk"], ids=str)
def test_a_non_finite_value_stays_visible_and_in_its_block(codec):
  places = [((2, 8192), 300), ((3, 5500), 16499)]
  for bad in (np.nan, np.inf, -np.inf):
    arrays = [np.ones(shape, np.float32) for shape, _ in places]
    for x, (_, at) in zip(arrays, places, strict=True):
      x.reshape(-1)[at] = bad
    for seen, (_, at) in zip(see(codec, arrays), places, strict=True):
      seen, row = np.asarray(seen).reshape(-1), at // 4096
      assert not np.isfinite(seen[at])
      assert np.all(np.isfinite(seen[:row * 4096])) and np.all(np.isfinite(seen[(row + 1) * 4096:]))


@pytest.mark.parametrize("codec", ["bf16", "int8", "e3m0", "topk", ("int4", {"stochastic": True})], ids=str)
def test_zero_tiny_and_huge_blocks(codec, x64):
  line = np.linspace(-1, 1, 300)
  for size in (0, 1e-300, 1e-45, 1e-42, 2e-38, 1e-37, 1e38, 3.3e38, 1e300):
    with np.errstate(over="ignore", invalid="ignore"):
      arrays = [(size * line).astype(np.float32), size * line]
    for seen in map(np.asarray, see(codec, arrays)):
      if size == 1e300:  # more than float32 holds
        assert not np.any(np.isfinite(seen[[0, -1]]) & (seen[[0, -1]] != 0))
        continue
      assert np.all(np.isfinite(seen)) and np.abs(seen).max() <= size * 1.01
      if size > 1e-38:
        np.testing.assert_allclose(seen[[0, -1]], [-size, size], rtol=5e-3)


@pytest.mark.parametrize("codec", ["topk", ("e3m0", {"stochastic": True})], ids=str)
def test_vmap_and_scan_change_nothing(codec):
  codec = make_codec(codec)

  def three_ways(x, keys):
    _, scanned = jax.lax.scan(lambda c, a: (c, codec.decode(codec.encode(*a), a[0])), 0, (x, keys))
    return jnp.stack([codec.roundtrip(a, k) for a, k in zip(x, keys)]), jax.vmap(codec.roundtrip)(x, keys), scanned

  x = gaussian((3, 3, 300), dtype=np.float32)
  alone, mapped, scanned = jit(three_ways)(x, np.arange(6, dtype=np.uint32).reshape(3, 2))
  np.testing.assert_allclose(mapped, alone, rtol=1e-6)
  np.testing.assert_allclose(scanned, alone, rtol=1e-6)


def test_payloads_travel_inside_shard_map():
  mesh = jax.make_mesh((4,), ("worker",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
  codecs = [make_codec(codec) for codec in ("bf16", "int8", "topk", ("e3m0", {"stochastic": True}))]
  x = gaussian((4, 6, 256), dtype=np.float32)

  def exchange(mine):
    key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("worker"))
    payloads = [jax.lax.ppermute(c.encode(mine[0], key), "worker", [(m, (m + 1) % 4) for m in range(4)]) for c in codecs]
    return [c.decode(p, mine[0])[None] for c, p in zip(codecs, payloads)]

  def alone(x):
    keys = jax.vmap(lambda m: jax.random.fold_in(jax.random.key(0), m))(jnp.arange(4))
    return [jax.vmap(c.roundtrip)(x, keys) for c in codecs]

  spec = PartitionSpec("worker")
  received = jit(jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(x)
  for got, sent in zip(received, jit(alone)(x), strict=True):
    np.testing.assert_allclose(got, np.roll(sent, 1, axis=0), rtol=1e-6)


def test_make_codec():
  assert set(CODECS) == {"none", *NAMES}
  assert make_codec(None) is None and make_codec("none") is None and make_codec(("none", {})) is None
  codec = make_codec(("e3m0", {"block": 128}))
  assert codec.name == "e3m0" and make_codec(codec) is codec
  assert codec == make_codec(["e3m0", {"block": 128}]) and hash(codec) == hash(make_codec(("e3m0", {"block": 128})))
  assert codec != make_codec("e3m0") and make_codec("int4") != make_codec("e3m0")
  assert [make_codec(name).name for name in NAMES] == NAMES


@pytest.mark.parametrize("codec,words", [
    ("fp8", "fp8.*choose one of none, bf16"), (7, "7.*choose one of"), (("e3m0", 3), "e3m0.*option"),
    (("e3m0", {"blocks": 3}), "e3m0.*no option.*blocks.*block, stochastic"),
    (("bf16", {"block": 3}), "'bf16' has no option.*none at all"),
    (("none", {"block": 3}), "'none'.*no option"), (("int8", {"block": 0}), "block=0 must be a positive integer"),
    (("int8", {"block": 2.0}), "block=2.0 must be"), (("int4", {"stochastic": 1}), "stochastic=1 must be True or False"),
    (("topk", {"ratio": 0}), "ratio=0 must be"), (("topk", {"ratio": 1.5}), "ratio=1.5 must be"),
    (("topk", {"chunk": 65537}), "chunk=65537 must be.*65536"), (("topk", {"values": "int8"}), "values='int8' must be"),
], ids=str)
def test_refusals_name_the_value_and_the_remedy(codec, words):
  with pytest.raises(ValueError, match=words) as error:
    make_codec(codec)
  assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_stochastic_codecs_need_a_key_and_integer_leaves_are_refused():
  for codec in map(make_codec, STOCHASTIC):
    with pytest.raises(ValueError, match="needs a key: pass key="):
      codec.encode(jnp.ones(3))
  for name in NAMES:
    with pytest.raises(ValueError, match="int32.*codec=\"none\""):
      make_codec(name).encode(jnp.ones(3, jnp.int32))
