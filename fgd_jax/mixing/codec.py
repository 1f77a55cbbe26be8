"""How the leaves of an exchange are compressed on the wire.

A codec turns a floating leaf into one uint8 matrix [rows, width], and that matrix is what travels: what is sent is what
is counted. A row holds a whole block of values together with its scale or positions. Codes of 4 and 8 bits are sign and
magnitude, so that rounding is odd, C(-x) = -C(x); floor rounding, which shrinks every step, is not offered.

E3M0 is the outer-gradient format of Streaming DiLoCo (arXiv 2501.18512); its blocks and its rounding are ours, as the
paper does not give them. Chunked top-k follows SparseLoCo (arXiv 2508.15706), here without its 2-bit values.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# The magnitudes of the E3M0 codes 0..7, in units of the block's scale.
E3M0_LEVELS = (0.0, *(2.0 ** (code - 7) for code in range(1, 8)))

# What an option may be, as a test and in words. A position in a chunk travels as a uint16.
_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "block": (lambda v: type(v) is int and v > 0, "a positive integer"),
    "stochastic": (lambda v: type(v) is bool, "True or False"),
    "ratio": (lambda v: type(v) in (int, float) and 0 < v <= 1, "a number above 0 and at most 1"),
    "chunk": (lambda v: type(v) is int and 0 < v <= 2 ** 16, "an integer from 1 to 65536"),
    "values": (lambda v: v in ("float32", "bf16"), "\"float32\" or \"bf16\""),
}


@dataclasses.dataclass(frozen=True)
class Codec(abc.ABC):
  """A compressed form of floating leaves; codecs with equal options are equal, and hash alike.

  A leaf is cut in blocks of consecutive values, one row each. A non-finite value makes its block non-finite, or at
  least itself. What exceeds the range of the wire (float32, or bfloat16 where that travels) becomes non-finite too.
  """

  name: str

  def __post_init__(self):
    for option, value in list(vars(self).items())[1:]:
      allowed, words = _OPTIONS[option]
      if not allowed(value):
        raise ValueError(f"Codec {self.name!r}: {option}={value!r} must be {words}.")

  @property
  def stochastic(self) -> bool:
    """Whether `encode` needs a key."""
    return False

  def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """A floating leaf of any shape -> uint8 [rows, width]. `key`: only for stochastic rounding.

    Raises:
      ValueError: a stochastic codec without a key, or a leaf that is not floating.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f"Codec {self.name!r} compresses floating-point leaves, got dtype {x.dtype}; "
                       "exchange that leaf with codec=\"none\".")
    length, width = self._layout(x.shape)
    payload = self._pack(_cut(x.astype(_wide(x.dtype)), length), key)
    return payload.reshape(_rows(x.shape, length), width)

  def decode(self, payload: jax.Array, like: Any) -> jax.Array:
    """What `encode` made of a leaf with like.shape -> that leaf as others see it, in like.dtype."""
    length, width = self._layout(like.shape)
    payload = payload.reshape(*_cut_shape(like.shape, length)[:-1], width)
    blocks = self._unpack(payload, length, _wide(like.dtype)).astype(like.dtype)
    size = math.prod(like.shape)
    return (blocks if blocks.size == size else blocks.reshape(-1)[:size]).reshape(like.shape)

  def nbytes(self, like: Any) -> int:
    """Bytes that a leaf of this shape takes on the wire."""
    length, width = self._layout(like.shape)
    return _rows(like.shape, length) * width

  def roundtrip(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """What others see of x: decode(encode(x))."""
    return self.decode(self.encode(x, key), x)

  @abc.abstractmethod
  def _layout(self, shape: tuple[int, ...]) -> tuple[int, int]:
    """(values, bytes) of a row, for a leaf of this shape."""

  @abc.abstractmethod
  def _pack(self, blocks: jax.Array, key: jax.Array | None) -> jax.Array:
    """float32 or float64 [..., length] -> uint8 [..., width]."""

  @abc.abstractmethod
  def _unpack(self, payload: jax.Array, length: int, dtype: Any) -> jax.Array:
    """uint8 [..., width] -> [..., length] in `dtype`, float32 or float64."""


@dataclasses.dataclass(frozen=True)
class BFloat16(Codec):
  """Two bytes a value, rounded to nearest, ties to even. A row is one row of the leaf."""

  name: str = "bf16"

  def _layout(self, shape):
    length = max(shape[-1] if shape else 1, 1)
    return length, 2 * length

  def _pack(self, blocks, key):
    return _to_bytes(_bfloat16(blocks))

  def _unpack(self, payload, length, dtype):
    return _from_bytes(payload, jnp.bfloat16).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Scaled(Codec):
  """int8, int4 and e3m0: a sign and a magnitude times the block's largest magnitude, which travels as a float32.

  Attributes:
    name: "int8" (levels 0..127 over 127), "int4" (0..7 over 7) or "e3m0" (0 and 2^-6..1).
    block: values that share a scale (a smaller leaf is one block).
    stochastic: round to one of the two neighbouring levels at random, without bias; otherwise to the nearest in value
      (a tie goes to the even level for int8 and int4, to the smaller one for e3m0).
  """

  block: int = 256
  stochastic: bool = False  # type: ignore[assignment]

  @property
  def bits(self) -> int:
    return 8 if self.name == "int8" else 4

  @property
  def top(self) -> int:
    """The largest magnitude of a code; the bit above it is the sign."""
    return 2 ** (self.bits - 1) - 1

  def _layout(self, shape):
    length = _length(shape, self.block)
    return length, 4 + (length if self.bits == 8 else (length + 1) // 2)

  def _pack(self, blocks, key):
    if self.stochastic and key is None:
      raise ValueError(f"Codec {self.name!r} with stochastic=True needs a key: pass key=jax.random.key(...).")
    magnitude = _magnitude(blocks)
    scale = jnp.max(magnitude, axis=-1, keepdims=True).astype(jnp.float32)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0, scale)  # denormals: zero on every backend, never 0 / 0
    scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)  # makes the whole block NaN, since 0 * NaN is NaN
    draw = jax.random.uniform(key, blocks.shape, blocks.dtype) if self.stochastic else None
    code = self._nearest(magnitude, scale.astype(blocks.dtype), draw)
    code |= (blocks < 0).astype(jnp.uint8) << (self.bits - 1)
    return jnp.concatenate([code if self.bits == 8 else _to_nibbles(code), _to_bytes(scale)], axis=-1)

  def _unpack(self, payload, length, dtype):
    code, scale = payload[..., :-4], _from_bytes(payload[..., -4:], jnp.float32).astype(dtype)
    code = code if self.bits == 8 else _from_nibbles(code, length)
    magnitude = code & self.top
    if self.name == "e3m0":
      level = ((1 << magnitude) >> 1).astype(dtype) / 64  # exact, which exp2 is not everywhere
    else:
      level = magnitude.astype(dtype) / self.top
    return jnp.where(code > self.top, -level, level) * scale

  def _nearest(self, magnitude: jax.Array, scale: jax.Array, draw: jax.Array | None) -> jax.Array:
    """Magnitudes [..., length], scale [..., 1] and uniform draws in [0, 1) -> codes uint8 [..., length]."""
    if self.name == "e3m0":
      # The code counts the thresholds below the magnitude: the middle between two levels, or a random point between.
      share, code = 0.5 if draw is None else draw, jnp.zeros(magnitude.shape, jnp.uint8)
      for low, high in zip(E3M0_LEVELS, E3M0_LEVELS[1:]):
        code += magnitude - low * scale > share * ((high - low) * scale)
      return code
    # XLA may multiply by the inverse of the scale, which must not be denormal; powers of two change no digit.
    scale = jnp.where(scale > 0, scale, 1)
    factor = jnp.where(scale > 1, 2.0 ** -64, 2.0 ** 64)
    steps = magnitude * factor / (scale * factor) * self.top
    whole = jnp.floor(steps)
    rounded = jnp.round(steps) if draw is None else whole + (steps - whole > draw)
    return jnp.minimum(rounded, self.top).astype(jnp.uint8)


@dataclasses.dataclass(frozen=True)
class TopK(Codec):
  """The k = max(1, round(ratio * n)) largest magnitudes of each chunk of n values; ties go to the lower index.

  Biased: use it with error feedback.

  Attributes:
    ratio: the share that is kept.
    chunk: consecutive values of a chunk, at most 65536, as a position travels as a uint16.
    values: "float32" or "bf16", what the values travel as.
  """

  name: str = "topk"
  ratio: float = 1 / 32
  chunk: int = 4096
  values: str = "float32"

  def _kept(self, length: int) -> int:
    return max(1, round(self.ratio * length))

  def _layout(self, shape):
    length = _length(shape, self.chunk)
    return length, self._kept(length) * (4 if self.values == "bf16" else 6)

  def _pack(self, blocks, key):
    _, positions = lax.top_k(_magnitude(blocks), self._kept(blocks.shape[-1]))
    values = jnp.take_along_axis(blocks, positions, axis=-1)
    values = _bfloat16(values) if self.values == "bf16" else values.astype(jnp.float32)
    return jnp.concatenate([_to_bytes(values), _to_bytes(positions.astype(jnp.uint16))], axis=-1)

  def _unpack(self, payload, length, dtype):
    kept = self._kept(length)
    values = _from_bytes(payload[..., :-2 * kept], jnp.bfloat16 if self.values == "bf16" else jnp.float32)
    positions = _from_bytes(payload[..., -2 * kept:], jnp.uint16).astype(jnp.int32)
    return jnp.put_along_axis(jnp.zeros((*payload.shape[:-1], length), dtype), positions, values.astype(dtype), axis=-1,
                              inplace=False)


_CLASSES: dict[str, type[Codec]] = {"bf16": BFloat16, "int8": Scaled, "int4": Scaled, "e3m0": Scaled, "topk": TopK}
CODECS = ("none", *_CLASSES)


def make_codec(codec: Any) -> Codec | None:
  """The codec that a config names.

  Args:
    codec: "none" or None; another name of CODECS; (name, {option: value}); or a Codec, which passes through.

  Raises:
    ValueError: unknown name or option, or a value that the option cannot have; the sentence says which.
  """
  if codec is None or isinstance(codec, Codec):
    return codec
  name, options = codec if isinstance(codec, (tuple, list)) and len(codec) == 2 else (codec, {})
  if not isinstance(name, str) or name not in CODECS or not isinstance(options, Mapping):
    raise ValueError(f"Unknown codec {codec!r}; choose one of {', '.join(CODECS)}, or (name, {{option: value}}).")
  known = [field.name for field in dataclasses.fields(_CLASSES[name])][1:] if name != "none" else []
  if unknown := sorted(set(options) - set(known), key=str):
    raise ValueError(f"Codec {name!r} has no option {unknown}; its options are: {', '.join(known) or 'none at all'}.")
  return None if name == "none" else _CLASSES[name](name, **options)


def _wide(dtype: Any) -> Any:
  return jnp.promote_types(dtype, jnp.float32)


def _length(shape: tuple[int, ...], block: int) -> int:
  """Values of a row: a leaf smaller than a block is one block without padding."""
  return max(1, min(block, math.prod(shape)))


def _rows(shape: tuple[int, ...], length: int) -> int:
  return -(-math.prod(shape) // length)


def _cut_shape(shape: tuple[int, ...], length: int) -> tuple[int, ...]:
  """[..., n / length, length] where blocks fit the last axis n, so that no other axis is touched; else [rows, length]."""
  if shape and shape[-1] % length == 0:
    return (*shape[:-1], shape[-1] // length, length)
  return (_rows(shape, length), length)


def _cut(x: jax.Array, length: int) -> jax.Array:
  """A leaf -> its blocks [..., length], the last one padded with zeros."""
  shape = _cut_shape(x.shape, length)
  padding = math.prod(shape) - x.size
  return (jnp.pad(x.reshape(-1), (0, padding)) if padding else x).reshape(shape)


def _magnitude(x: jax.Array) -> jax.Array:
  """abs(x) with NaN as infinity, since a maximum may lose a NaN (seen on CPU)."""
  return jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))


def _bfloat16(x: jax.Array) -> jax.Array:
  """Rounds once; a plain cast of float64 may round twice, by way of float32."""
  return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _to_bytes(x: jax.Array) -> jax.Array:
  """[..., n] of s-byte values -> uint8 [..., s * n]: all lowest bytes first, so that no axis is as short as s."""
  size = x.dtype.itemsize
  bits = lax.bitcast_convert_type(x, f"uint{8 * size}")
  return jnp.concatenate([(bits >> 8 * i & 255).astype(jnp.uint8) for i in range(size)], axis=-1)


def _from_bytes(payload: jax.Array, dtype: Any) -> jax.Array:
  """What `_to_bytes` made -> [..., n] in `dtype`."""
  size = jnp.dtype(dtype).itemsize
  planes = jnp.split(payload.astype(f"uint{8 * size}"), size, axis=-1)
  return lax.bitcast_convert_type(sum(plane << 8 * i for i, plane in enumerate(planes)), dtype)


def _to_nibbles(code: jax.Array) -> jax.Array:
  """uint8 codes below 16 [..., n] -> uint8 [..., ceil(n / 2)]: the first half in the low bits, the second in the high."""
  half = (code.shape[-1] + 1) // 2
  code = jnp.pad(code, [(0, 0)] * (code.ndim - 1) + [(0, 2 * half - code.shape[-1])])
  return code[..., :half] | code[..., half:] << 4


def _from_nibbles(packed: jax.Array, length: int) -> jax.Array:
  return jnp.concatenate([packed & 15, packed >> 4], axis=-1)[..., :length]
