"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

The modules are flax nnx, but no module ever leaves this file: `make` splits them once, on abstract values, and `apply`
merges them from a plain nested dict while it is traced. That costs nothing at run time, and everything outside (optax,
mixing, checkpoints, vmap over workers) sees nothing but a pytree of arrays.

Dims: B batch, L length, D model width (`dim`), V vocabulary, F feed-forward width, N query heads, K key/value heads,
G = N/K query heads per key/value head, H = D/N head width.
"""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from fgd_jax.sharding import FSDP, TENSOR, constrain

Params = dict[str, Any]

_DTYPES = ("float32", "bfloat16", "float64")
_ATTENTION = ("einsum", "xla", "cudnn")

# What divides the axes of activations [B, L, D] between layers, where a worker has several devices. Left alone, XLA keeps
# them divided along D as the embedding's rows come, and gathers activations instead of parameters in every layer.
RESIDUAL = (FSDP, None, None)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
  """Shape and numerics of a decoder. `make` checks it; the fields themselves accept anything.

  `dtype` is what matrix products compute in, `param_dtype` what parameters and gradients are kept in. Norms, softmax
  and logits are at least float32 in any case. float64 is all or nothing: with param_dtype="float64" everything is
  computed in float64 (dtype may then stay at its default).
  """

  vocab_size: int
  dim: int
  layers: int
  heads: int
  kv_heads: int
  ffn_dim: int
  rope_theta: float = 10000.0
  norm_eps: float = 1e-5
  tied: bool = False  # logits from the transposed embedding matrix, no lm_head
  scan_layers: bool = False  # one lax.scan over stacked layers: compile time no longer grows with `layers`
  remat: bool = False  # keep only the layer inputs for the backward pass, recompute the rest
  dtype: str = "float32"
  param_dtype: str = "float32"
  # "einsum": the code below, which on CPU beats the library's XLA path (forward and backward at dim 128, B=4, L=128:
  # up to 10 % less time with kv_heads = heads, 30 % with half as many). "xla", "cudnn": that implementation of
  # jax.nn.dot_product_attention; "cudnn" is the flash kernel on NVIDIA GPUs and wants bfloat16.
  attention: str = "einsum"


class Model(NamedTuple):
  """Pure functions; safe under jit, grad, vmap, scan, lax.map, shard_map and eval_shape.

  init(key) -> params: nested dict of `param_dtype` arrays.
  apply(params, tokens_BxL) -> logits_BxLxV, float32 (float64 when param_dtype is float64); tokens are int32 ids.
  loss(params, batch, rng=None) -> scalar mean next-token cross-entropy in nats; batch = {"tokens": int32 [B, L+1]};
      `rng` is ignored (there is no dropout).
  An id of V or more gives NaN rather than the logits of some other token.
  """

  config: LlamaConfig
  init: Callable[[jax.Array], Params]
  apply: Callable[[Params, jax.Array], jax.Array]
  loss: Callable[..., jax.Array]


def _check(c: LlamaConfig) -> None:
  """Raises ValueError, one sentence with key, value and remedy, when the config describes no decoder."""
  for key in ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim"):
    value = getattr(c, key)
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
      raise ValueError(f"{key} is {value!r}; give a positive integer.")
  for key in ("rope_theta", "norm_eps"):
    value = getattr(c, key)
    if not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
      raise ValueError(f"{key} is {value!r}; give a positive number.")
  for key, known in (("dtype", _DTYPES), ("param_dtype", _DTYPES), ("attention", _ATTENTION)):
    if getattr(c, key) not in known:
      raise ValueError(f"{key} is {getattr(c, key)!r}; choose one of {', '.join(known)}.")
  no_x64 = jax.dtypes.canonicalize_dtype("float64") != "float64"
  wide = c.param_dtype == "float64"
  for bad, sentence in (
    (c.dim % c.heads, f"heads is {c.heads}, which does not divide dim {c.dim}; choose a divisor of dim."),
    (c.heads % c.kv_heads, f"kv_heads is {c.kv_heads}, which does not divide heads {c.heads}; choose a divisor."),
    (
      c.dim // c.heads % 2,
      f"heads is {c.heads}, so the head width dim / heads is {c.dim // c.heads}; rotary pairs want it even.",
    ),
    (wide and no_x64, "param_dtype is 'float64', but 64-bit types are off; set jax_enable_x64 or use 'float32'."),
    (
      c.dtype == "float64" and no_x64,
      "dtype is 'float64', but 64-bit types are off; set jax_enable_x64 or use 'float32'.",
    ),
    (c.dtype == "float64" and not wide, f"dtype is 'float64' but param_dtype is {c.param_dtype!r}; set both."),
    (wide and c.dtype == "bfloat16", "dtype is 'bfloat16' but param_dtype is 'float64'; set both to 'float64'."),
    (wide and c.attention != "einsum", f"attention is {c.attention!r}, which has no float64; set it to 'einsum'."),
    (
      c.attention == "cudnn" and c.dtype != "bfloat16",
      f"attention is 'cudnn' but dtype is {c.dtype!r}; set dtype to 'bfloat16' or attention to 'xla'.",
    ),
  ):
    if bad:
      raise ValueError(sentence)


def _compute_dtype(c: LlamaConfig) -> Any:
  return jnp.dtype("float64" if c.param_dtype == "float64" else c.dtype)


def _accumulate_dtype(c: LlamaConfig) -> Any:
  """At least float32: what norms, rotary angles, softmax and logits are computed in."""
  return jnp.promote_types(_compute_dtype(c), jnp.float32)


def rope_table(length: int, head_dim: int, theta: float, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines [L, H/2] of position * theta^(-2i/H), i = 0 .. H/2-1 (RoFormer, arXiv 2104.09864, eq. 15)."""
  frequency_h = jnp.asarray(theta, dtype) ** (jnp.arange(0, head_dim, 2, dtype=dtype) / -head_dim)
  angle_Lxh = jnp.arange(length, dtype=dtype)[:, None] * frequency_h
  return jnp.cos(angle_Lxh), jnp.sin(angle_Lxh)


def rotate(x_BxLxNxH: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Turns the pairs (x_i, x_{i+H/2}) by their position's angle: the layout of Hugging Face's Llama weights."""
  cos_Lx1xh, sin_Lx1xh = (t[:, None, :] for t in rope)
  a, b = jnp.split(x_BxLxNxH.astype(cos_Lx1xh.dtype), 2, axis=-1)
  turned = jnp.concatenate([a * cos_Lx1xh - b * sin_Lx1xh, b * cos_Lx1xh + a * sin_Lx1xh], axis=-1)
  return turned.astype(x_BxLxNxH.dtype)


def causal_attention(q_BxLxNxH: jax.Array, k_BxLxKxH: jax.Array, v_BxLxKxH: jax.Array, form: Any) -> jax.Array:
  """softmax(q k^T / sqrt(H)) v over positions up to one's own -> [B, L, N, H]; query head n reads key head n // G."""
  if form != "einsum":
    return jax.nn.dot_product_attention(q_BxLxNxH, k_BxLxKxH, v_BxLxKxH, is_causal=True, implementation=form)
  B, L, N, H = q_BxLxNxH.shape
  K = k_BxLxKxH.shape[2]
  # The G query heads that share a key head are stacked along the length, so that each product is one plain batched
  # matmul; left to einsum over five dims, the CPU backend is slower.
  q_BxKxGLxH = q_BxLxNxH.reshape(B, L, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
  wide = jnp.promote_types(q_BxLxNxH.dtype, jnp.float32)
  scores = jnp.einsum("BKTH,BSKH->BKTS", q_BxKxGLxH, k_BxLxKxH, preferred_element_type=wide) * H**-0.5
  scores_BxKxGxLxL = scores.reshape(B, K, N // K, L, L)
  causal_LxL = jnp.tril(jnp.ones((L, L), bool))
  weights = jax.nn.softmax(jnp.where(causal_LxL, scores_BxKxGxLxL, jnp.finfo(wide).min), axis=-1)
  out_BxKxGLxH = jnp.einsum("BKTS,BSKH->BKTH", weights.astype(v_BxLxKxH.dtype).reshape(B, K, -1, L), v_BxLxKxH)
  return out_BxKxGLxH.reshape(B, K, N // K, L, H).transpose(0, 3, 1, 2, 4).reshape(B, L, N, H)


def _linear(c: LlamaConfig, inputs: int, outputs: int, rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
  """x @ kernel [inputs, outputs], normal with standard deviation scale / sqrt(inputs)."""
  init = nnx.initializers.normal(scale / math.sqrt(inputs))
  dtypes = {"dtype": _compute_dtype(c), "param_dtype": jnp.dtype(c.param_dtype)}
  return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs, **dtypes)


class RMSNorm(nnx.Module):
  """x / rms(x) * scale over the last axis, in at least float32; returns the compute dtype."""

  def __init__(self, c: LlamaConfig):
    self.eps, self.dtype, self.wide = c.norm_eps, _compute_dtype(c), _accumulate_dtype(c)
    self.scale = nnx.Param(jnp.ones((c.dim,), c.param_dtype))

  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    x = x_BxLxD.astype(self.wide)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
    return (x * self.scale[...].astype(self.wide)).astype(self.dtype)


class Attention(nnx.Module):
  """Causal grouped-query attention [B, L, D] -> [B, L, D]."""

  def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
    self.c, self.head_dim = c, c.dim // c.heads
    self.q = _linear(c, c.dim, c.dim, rngs)
    self.k = _linear(c, c.dim, c.kv_heads * self.head_dim, rngs)
    self.v = _linear(c, c.dim, c.kv_heads * self.head_dim, rngs)
    self.o = _linear(c, c.dim, c.dim, rngs, scale=1 / math.sqrt(2 * c.layers))

  def __call__(self, x_BxLxD: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    heads = lambda f: constrain(f(x_BxLxD).reshape(*x_BxLxD.shape[:2], -1, self.head_dim), FSDP, None, TENSOR, None)
    q, k, v = heads(self.q), heads(self.k), heads(self.v)
    out_BxLxNxH = causal_attention(rotate(q, rope), rotate(k, rope), v, self.c.attention)
    return self.o(out_BxLxNxH.reshape(x_BxLxD.shape))


class MLP(nnx.Module):
  """SwiGLU, down(silu(gate(x)) * up(x)), [B, L, D] -> [B, L, D] (arXiv 2002.05202)."""

  def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
    self.gate = _linear(c, c.dim, c.ffn_dim, rngs)
    self.up = _linear(c, c.dim, c.ffn_dim, rngs)
    self.down = _linear(c, c.ffn_dim, c.dim, rngs, scale=1 / math.sqrt(2 * c.layers))

  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    hidden_BxLxF = jax.nn.silu(self.gate(x_BxLxD)) * self.up(x_BxLxD)
    return self.down(constrain(hidden_BxLxF, FSDP, None, TENSOR))


class Block(nnx.Module):
  """One decoder layer: pre-norm attention, then pre-norm MLP, both residual."""

  def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
    self.attn_norm, self.attn = RMSNorm(c), Attention(c, rngs)
    self.mlp_norm, self.mlp = RMSNorm(c), MLP(c, rngs)

  def __call__(self, x_BxLxD: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    x_BxLxD = constrain(x_BxLxD + self.attn(self.attn_norm(x_BxLxD), rope), *RESIDUAL)
    return constrain(x_BxLxD + self.mlp(self.mlp_norm(x_BxLxD)), *RESIDUAL)


class Embed(nnx.Module):
  """The table [V, D], normal with standard deviation 0.02: small first logits, also when it is tied to the output."""

  def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
    init = nnx.initializers.normal(0.02)
    self.embedding = nnx.Param(init(rngs.params(), (c.vocab_size, c.dim), jnp.dtype(c.param_dtype)))


class Ends(nnx.Module):
  """What stands around the layers: embedding, final norm and the output matrix [D, V] (absent when tied)."""

  def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
    self.c = c
    self.embed = Embed(c, rngs)
    self.final_norm = RMSNorm(c)
    if not c.tied:
      self.lm_head = _linear(c, c.dim, c.vocab_size, rngs, scale=0.02 * math.sqrt(c.dim))

  def encode(self, tokens_BxL: jax.Array) -> jax.Array:
    # Rows first, then the cast: a bfloat16 copy of the whole table would be far larger. Ids of V or more give NaN.
    # In a sharded worker every device looks up its part of the width for the whole batch, then the rows go to the
    # batch's devices. That moves activations, not the table or its gradient; and a gather whose ids and table are
    # both divided over `fsdp` aborts XLA's partitioner on three mesh axes (jax 0.10 to 0.12).
    rows_BxLxD = jnp.take(self.embed.embedding[...], constrain(tokens_BxL, None, None), axis=0, mode="fill")
    rows_BxLxD = constrain(rows_BxLxD.astype(_compute_dtype(self.c)), None, None, (FSDP, TENSOR))
    rows_BxLxD = constrain(rows_BxLxD, None, None, FSDP)  # one axis at a time: XLA has no collective for both
    return constrain(rows_BxLxD, *RESIDUAL)

  def decode(self, x_BxLxD: jax.Array) -> jax.Array:
    x_BxLxD = self.final_norm(x_BxLxD)
    matrix_DxV = self.embed.embedding[...].T if self.c.tied else self.lm_head.kernel[...]
    matrix_DxV = constrain(matrix_DxV.astype(x_BxLxD.dtype), FSDP, TENSOR)  # again one axis at a time
    matrix_DxV = constrain(matrix_DxV, None, TENSOR)
    logits_BxLxV = jnp.matmul(x_BxLxD, matrix_DxV, preferred_element_type=_accumulate_dtype(self.c))
    return constrain(logits_BxLxV, FSDP, None, TENSOR)


def make(config: LlamaConfig) -> Model:
  """Checks `config` and returns its pure functions.

  Parameter paths, joined by "/": embed/embedding, layers_0/attn/{q,k,v,o}/kernel,
  layers_0/mlp/{gate,up,down}/kernel, layers_0/{attn_norm,mlp_norm}/scale, final_norm/scale, lm_head/kernel (absent
  when tied). With scan_layers the layers are one subtree `layers/...` whose leaves have a leading axis [layers];
  `stack_layers` translates.

  Raises: ValueError, one sentence with key, value and remedy.
  """
  _check(config)

  def abstract(module: Any) -> nnx.GraphDef[Any]:
    return nnx.split(nnx.eval_shape(lambda: module(config, nnx.Rngs(0))))[0]

  def values(module: Any, key: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.state(module(config, nnx.Rngs(params=key)), nnx.Param))

  ends_graph, block_graph = abstract(Ends), abstract(Block)

  @jax.jit
  def init(key: jax.Array) -> Params:
    ends_key, layers_key = jax.random.split(key)
    # A loop over layers, whatever the layout: both get the same numbers, and compile time (0.2 s a random draw on
    # CPU) does not grow with the layers.
    layers = jax.lax.map(lambda k: values(Block, k), jax.random.split(layers_key, config.layers))
    params = values(Ends, ends_key) | {"layers": layers}
    return params if config.scan_layers else unstack_layers(params)

  def block(x_BxLxD: jax.Array, layer: Params, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    return nnx.merge(block_graph, nnx.State(layer))(x_BxLxD, rope)

  if config.remat:
    # Inside a scan nothing can be merged across the recomputation, so the barrier against it would be dead weight.
    block = jax.checkpoint(block, prevent_cse=not config.scan_layers)

  def apply(params: Params, tokens_BxL: jax.Array) -> jax.Array:
    if ("layers" in params) != config.scan_layers:
      to = "stack_layers" if config.scan_layers else "unstack_layers"
      raise ValueError(f"scan_layers is {config.scan_layers}, but params are not so; call {to}(params).")
    ends = nnx.merge(ends_graph, nnx.State({k: v for k, v in params.items() if not k.startswith("layers")}))
    rope = rope_table(tokens_BxL.shape[1], config.dim // config.heads, config.rope_theta, _accumulate_dtype(config))
    x_BxLxD = ends.encode(tokens_BxL)
    if config.scan_layers:
      x_BxLxD, _ = jax.lax.scan(lambda x, layer: (block(x, layer, rope), None), x_BxLxD, params["layers"])
    else:
      for i in range(config.layers):
        x_BxLxD = block(x_BxLxD, params[f"layers_{i}"], rope)
    return ends.decode(x_BxLxD)

  def loss(params: Params, batch: dict[str, jax.Array], rng: jax.Array | None = None) -> jax.Array:
    del rng
    inputs_BxL, targets_BxL = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    logits_BxLxV = apply(params, inputs_BxL)
    # A sum over the vocabulary with one term left, not a gather: it fuses with the softmax, its gradient needs no
    # scatter, and logits divided over `tensor` stay so.
    ids_V = jnp.arange(config.vocab_size, dtype=targets_BxL.dtype)
    chosen_BxL = jnp.sum(jnp.where(targets_BxL[..., None] == ids_V, logits_BxLxV, 0), axis=-1)
    known_BxL = (targets_BxL >= 0) & (targets_BxL < config.vocab_size)
    chosen_BxL = jnp.where(known_BxL, chosen_BxL, jnp.nan)
    return jnp.mean(jax.nn.logsumexp(logits_BxLxV, axis=-1) - chosen_BxL)

  return Model(config, init, apply, loss)


def stack_layers(params: Params) -> Params:
  """{"layers_0": .., "layers_1": ..} -> {"layers": leaves [layers, ...]}; other entries stay as they are.

  Raises: ValueError when the numbers do not run from 0 without a gap, or there are none.
  """
  numbered = {int(name[7:]): name for name in params if re.fullmatch(r"layers_\d+", name)}
  if not numbered or sorted(numbered) != list(range(len(numbered))):
    raise ValueError(f"params has the keys {sorted(params)}; stacking wants layers_0, layers_1, ... without a gap.")
  layers = [params[numbered[i]] for i in range(len(numbered))]
  rest = {name: value for name, value in params.items() if name not in numbered.values()}
  return rest | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def unstack_layers(params: Params) -> Params:
  """{"layers": leaves [layers, ...]} -> {"layers_0": .., "layers_1": ..}; other entries stay as they are.

  Raises: ValueError when there is no entry "layers".
  """
  if "layers" not in params:
    raise ValueError(f"params has the keys {sorted(params)}; unstacking wants an entry 'layers'.")
  count = jax.tree.leaves(params["layers"])[0].shape[0]
  rest = {name: value for name, value in params.items() if name != "layers"}
  return rest | {f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(count)}


def count_params(params_or_shapes: Any) -> int:
  """Number of scalars in a tree of arrays or ShapeDtypeStructs."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params_or_shapes))
