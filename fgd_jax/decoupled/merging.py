"""What the syncer computes: it decodes contributions, merges them by token weights and takes the outer step."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fgd_jax.decoupled.options import Options
from fgd_jax.methods.base import narrowed, outer_step, widened
from fgd_jax.mixing.codec import make_codec
from fgd_jax.mixing.fragments import Fragments, make_fragments
from fgd_jax.mixing.stacks import where_rows
from fgd_jax.mixing.subset import NUMBERED_LAYER, STACKED_LAYERS
from fgd_jax.outer.merge import Aggregator, Rda, radial_directional

PyTree = Any
Tree = dict[str, Any]  # a fragment: arrays by key


def partition(options: Options, params: PyTree) -> Fragments:
  """The balanced fragments of a model's parameters (arrays or shapes): the same for the syncer and all learners."""
  return make_fragments(options.fragments, "balanced", params)


def token_weight(tokens: int, steps: int) -> float:
  """s = c_tokens (c_tokens / c_steps): quantity times quality (2604.21428); 0 without steps."""
  return tokens * (tokens / steps) if steps else 0.0


def merge(aggregator: Aggregator, stack: Tree, weights: jax.Array, key: jax.Array) -> Tree:
  """One outer gradient from those of all learners.

  Args:
    stack: leaves [M, ...]; rows whose weight is 0 are ignored.
    weights: [M], not negative. Aggregators that gather ("ties", "tsv_m", "iso_cts") use only whether they are 0.
    key: for aggregators that draw.
  """
  present = weights > 0
  if isinstance(aggregator, Rda):
    plain = aggregator.plain
    share = jnp.where(present, weights, 0) / jnp.maximum(jnp.sum(weights), jnp.finfo(weights.dtype).tiny)

    def leaf(name: str, x: jax.Array) -> jax.Array:
      if plain is not None and re.search(plain, name):
        return jnp.einsum("m,m...->...", share.astype(x.dtype), where_rows(present, x, 0), precision="highest")
      rule = functools.partial(radial_directional, weights=weights.astype(x.dtype))
      stacked = STACKED_LAYERS.search(name) and not NUMBERED_LAYER.search(name)
      return jax.vmap(rule, in_axes=1)(x) if stacked else rule(x)

    return {name: leaf(name, x) for name, x in stack.items()}
  if aggregator.gathers:
    return aggregator.merge(stack, present)
  count = jnp.maximum(1, jnp.sum(present))
  shares = weights * count / jnp.maximum(jnp.sum(weights), jnp.finfo(weights.dtype).tiny)
  payload = jax.vmap(aggregator.local)(where_rows(present, stack, 0), shares.astype(jax.tree.leaves(stack)[0].dtype),
                                       jax.random.split(key, weights.shape[0]))
  mean = jax.tree.map(lambda x: jnp.sum(x, 0) / count.astype(x.dtype), where_rows(present, payload, 0))
  return aggregator.finish(mean, {k: x[0] for k, x in stack.items()})


class Merger:
  """The compiled computations of a syncer.

  Args:
    options: of the run.
    params: shapes of the model's parameters.
    seed: of aggregators that draw.
  """

  def __init__(self, options: Options, params: PyTree, seed: int):
    self.options, self.seed = options, seed
    self.fragments = partition(options, params)
    self._codec = make_codec(options.outer.codec)
    self._aggregator = options.aggregator.bind(options.learners)
    self._params = params
    self.step = jax.jit(self._step)
    self._decode = jax.jit(self._decoded, static_argnums=0)

  def bound(self, learners: int) -> Merger:
    """The merger of a run with so many learners, which some aggregators scale by."""
    if learners == self.options.learners:
      return self
    return Merger(dataclasses.replace(self.options, learners=learners), self._params, self.seed)

  def start(self, params: PyTree, p: int) -> tuple[Tree, PyTree]:
    """Fragment p of the initial parameters, in float32 at least, and the state of its outer optimizer."""
    theta = self.fragments.take(widened(params), p)
    return jax.device_get((theta, self.options.outer.optimizer.init(theta)))

  def outgoing(self, p: int, theta: Tree) -> dict[str, np.ndarray]:
    """The fragment as learners get it, in the parameters' dtypes."""
    return jax.device_get(narrowed(theta, self.fragments.shape(p)))

  def decode(self, p: int, payload: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A contribution's outer gradient, in float32 at least."""
    return dict(payload) if self._codec is None else jax.device_get(self._decode(p, dict(payload)))

  def _decoded(self, p, payload):
    assert self._codec is not None
    shapes = jax.eval_shape(widened, self.fragments.shape(p))
    return {k: self._codec.decode(x, shapes[k]) for k, x in payload.items()}

  def stack(self, deltas: Sequence[Tree], slots: int) -> Tree:
    """Leaves [slots, ...] with zeros for learners that are missing."""
    return {k: np.stack([d[k] for d in deltas] + [np.zeros_like(x)] * (slots - len(deltas))) for k, x in deltas[0].items()}

  def weights(self, weights: Sequence[float], stack: Tree) -> np.ndarray:
    """[slots], scaled so that the greatest is 1."""
    leaf = next(iter(stack.values()))
    out = np.zeros(leaf.shape[0], leaf.dtype)
    out[:len(weights)] = np.asarray(weights, np.float64) / max(weights)
    return out

  def _step(self, theta: Tree, outer: PyTree, stack: Tree, weights: jax.Array, t: jax.Array):
    """(theta', outer', norm of the merged outer gradient)."""
    if self.options.on_arrival:
      merged = {k: x[0] for k, x in stack.items()}
    else:
      merged = merge(self._aggregator, stack, weights, jax.random.fold_in(jax.random.key(self.seed), t))
    theta, outer = outer_step(self.options.outer.optimizer, merged, outer, start=theta)
    return theta, outer, jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in merged.values()))
