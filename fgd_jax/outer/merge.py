"""How M workers' outer gradients D_1 .. D_M become one: the aggregators of DiLoCo and IsoLoCo.

    payload_m = agg.local(D_m, share_m, key_m)                    on every worker, before the exchange
    A = agg.finish(mean over live workers of payload, like=D)     one all-reduce is enough       (gathers False)
    A = agg.merge(payloads [M, ...], alive [M])                   every worker needs all payloads (gathers True)

mean, task_arithmetic, iso_c, dare and rda are of the first kind; ties, iso_cts and tsv_m of the second. share_m is worker
m's weight, scaled so that its mean over the live workers is 1. Rules act per tensor, and per layer where layers are stacked
(path `layers/...`, leading axis = layers), one layer at a time, so a scanned and an unrolled model get the same numbers.
Payload tensors keep the leaf's dtype; arithmetic is in float32 at least (float64 for float64 leaves).
Sources: IsoLoCo (arXiv 2607.03011) and its code for all but rda, which is Decoupled DiLoCo's (2604.21428).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fgd_jax.mixing.subset import EMBEDDING, NUMBERED_LAYER, STACKED_LAYERS, path_of

PyTree = Any

_dot = functools.partial(jnp.matmul, precision="highest")  # a TPU would multiply float32 in bfloat16


@dataclasses.dataclass(frozen=True)
class Aggregator:
  """The plain mean, A = (1/M) sum_m share_m D_m, and the base of the others.

  Attributes:
    name: as in `AGGREGATORS`.
    gathers: True when `merge` needs all M outer gradients on every worker.
    workers: M; only task_arithmetic needs it, set by `bind`.
  """

  workers: int | None = dataclasses.field(default=None, kw_only=True)
  name: ClassVar[str] = "mean"
  gathers: ClassVar[bool] = False

  def bind(self, workers: int) -> Aggregator:
    """The aggregator that knows M."""
    return dataclasses.replace(self, workers=workers)

  def local(self, tree: PyTree, share: jax.typing.ArrayLike, key: jax.Array) -> PyTree:
    """What one worker sends: leaves and dtypes of `tree` (rda: see there). `key` differs by worker and round."""
    return jax.tree.map(lambda x: (_wide(x) * share).astype(x.dtype), tree)

  def finish(self, payload_mean: PyTree, like: PyTree) -> PyTree:
    """The merged outer gradient, shapes and dtypes of `like`, from the mean of the live workers' payloads."""
    return jax.tree.map(lambda x, l: x.astype(l.dtype), payload_mean, like)

  def merge(self, stack: PyTree, alive: jax.Array) -> PyTree:
    """The merged outer gradient from all payloads: leaves [M, ...] -> [...]; rows of dead workers (alive [M] bool,
    False) count for nothing, even NaN."""
    raise TypeError(f"{self.name} does not gather; average its payloads and call finish.")


@dataclasses.dataclass(frozen=True)
class TaskArithmetic(Aggregator):
  """A = scale * sum_m D_m = scale * M * mean. M counts dead workers too, so that the step's size does not depend on
  who is alive: the mean over the live ones stands in for the dead."""

  scale: float = 1.0
  name: ClassVar[str] = "task_arithmetic"

  def __post_init__(self):
    _check_number("scale", self.scale, 0, math.inf)

  def finish(self, payload_mean, like):
    if self.workers is None:
      raise ValueError("task_arithmetic with workers=None has no M to multiply the mean by; call bind(workers) first.")
    factor = self.scale * self.workers
    return jax.tree.map(lambda x, l: (factor * _wide(x)).astype(l.dtype), payload_mean, like)


@dataclasses.dataclass(frozen=True)
class Dare(Aggregator):
  """Every worker drops random elements and rescales the rest, so that the expectation is the mean.

  Args:
    drop: fraction dropped, in [0, 1).
    exact: True keeps k = int((1 - drop) n) of a tensor's n elements (at least one) and rescales by n/k: the reference's
      1/(1 - drop) up to the rounding of k, and unbiased for every n. False keeps each with probability 1 - drop.
  """

  drop: float = 0.1
  exact: bool = True
  name: ClassVar[str] = "dare"

  def __post_init__(self):
    _check_number("drop", self.drop, 0, 1)
    if not isinstance(self.exact, bool):
      raise ValueError(f"aggregator option exact={self.exact!r} must be True or False.")

  def local(self, tree, share, key):
    def tensor(x, key):
      kept = _kept(self.drop, x.size)
      if self.exact:
        first = jnp.argsort(jax.random.bits(key, (x.size,)))[:kept]
        mask, rescale = jnp.zeros(x.size, bool).at[first].set(True).reshape(x.shape), x.size / kept
      else:
        mask, rescale = jax.random.bernoulli(key, 1 - self.drop, x.shape), 1 / (1 - self.drop)
      return jnp.where(mask, _wide(x) * (share * rescale), 0).astype(x.dtype)

    def leaf(name, x):
      # One stream per tensor and layer, the same whether `layers_3/..` is a leaf or row 3 of `layers/..`.
      numbered = NUMBERED_LAYER.search(name)
      stream = jax.random.fold_in(key, zlib.crc32(NUMBERED_LAYER.sub(r"\1\2\4", name).encode()))
      fold = functools.partial(jax.random.fold_in, stream)
      if _stacked(name):
        return _by_layer(tensor, name, x, jax.vmap(fold)(jnp.arange(x.shape[0])))
      return tensor(x, fold(int(numbered.group(3)) if numbered else 0))

    return _map(leaf, tree)


@dataclasses.dataclass(frozen=True)
class Ties(Aggregator):
  """Trim, elect a sign, average those that agree.

      D_m keeps its int((1 - drop) n) largest magnitudes (at least one, and all that equal the least of them)
      sgn = sign(sum_m D_m);  A = sum_m D_m 1[sign(D_m) = sgn] / max(1, count);  an elected sign of 0 gives 0
  """

  drop: float = 0.1
  name: ClassVar[str] = "ties"
  gathers: ClassVar[bool] = True

  def __post_init__(self):
    _check_number("drop", self.drop, 0, 1)

  def merge(self, stack, alive):
    def tensor(x):  # [M, ...]
      magnitude = jnp.abs(x)
      size = math.prod(x.shape[1:])
      least = jnp.sort(magnitude.reshape(x.shape[0], size), axis=1)[:, size - _kept(self.drop, size)]
      x = jnp.where(magnitude >= least.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)
      elected = jnp.sign(jnp.sum(x, axis=0))
      agrees = (jnp.sign(x) == elected) & (elected != 0)
      return jnp.sum(jnp.where(agrees, x, 0), axis=0) / jnp.maximum(1, jnp.sum(agrees, axis=0))

    return _map(lambda name, x: _by_layer(tensor, name, _live(x, alive), axis=1).astype(x.dtype), stack)


@dataclasses.dataclass(frozen=True)
class Rda(Aggregator):
  """Radial-directional averaging, phi(x) = x/||x||, phi(0) = 0:  A = mean(share ||D||) * phi(mean(share phi(D))).

  Near-orthogonal D_m keep their norm, where their mean has 1/sqrt(M) of it. The payload is {"direction": tree, "norm":
  tree of scalars, or [layers] for stacked leaves}. A mean direction that vanishes (below 1e-12 in float64, 1e-6 in
  float32) gives zero: the published fallback, the weighted mean, would double the traffic; `radial_directional` has it.

  Args:
    plain: regular expression of the paths that get the plain weighted mean: by default the embeddings, as published
      (their outer gradients are correlated); the LM head is not among them. None for no path.
  """

  plain: str | None = EMBEDDING.pattern
  name: ClassVar[str] = "rda"

  def __post_init__(self):
    _check_pattern("plain", self.plain)

  def local(self, tree, share, key):
    def direction(name, x):
      return (share * (_wide(x) if _matches(self.plain, name) else _by_layer(_phi, name, _wide(x)))).astype(x.dtype)

    return {"direction": _map(direction, tree),
            "norm": _map(lambda name, x: share * _by_layer(_norm, name, _wide(x)), tree)}

  def finish(self, payload_mean, like):
    def tensor(direction, norm):
      return jnp.where(_norm(direction) < _vanishing(direction.dtype), 0, norm * _phi(direction))

    def leaf(name, direction, norm, l):
      direction = _wide(direction)
      return (direction if _matches(self.plain, name) else _by_layer(tensor, name, direction, norm)).astype(l.dtype)

    return _map(leaf, payload_mean["direction"], payload_mean["norm"], like)


@dataclasses.dataclass(frozen=True)
class _Spectral(Aggregator):
  """Rules on matrices: 2-D leaves as stored, embeddings and head too. All other leaves get the plain mean.

  Args:
    exclude: regular expression of paths that get the plain mean as well.
    matrices: [(pattern, row_axes)]: a leaf of 3 or more axes is a matrix; its first `row_axes` axes are the rows.
    fused: [(pattern, axis, parts)]: a leaf is split along `axis` into `parts` equal matrices (int) or matrices of these
      sizes (tuple), each treated by itself. A part of 3 or more axes first loses a split axis of size 1; then its first
      axis is the rows, unless `matrices` says otherwise.
  Axes are those of one layer where layers are stacked; the first pattern that matches counts.
  """

  exclude: str | None = None
  matrices: tuple[tuple[str, int], ...] = ()
  fused: tuple[tuple[str, int, Any], ...] = ()

  def __post_init__(self):
    _check_pattern("exclude", self.exclude)
    for option, types in (("matrices", (str, int)), ("fused", (str, int, (int, tuple)))):
      for rule in (rules if isinstance(rules := getattr(self, option), tuple) else (rules,)):
        if not (isinstance(rule, tuple) and len(rule) == len(types) and all(map(isinstance, rule, types))):
          form = "(pattern, row_axes)" if option == "matrices" else "(pattern, axis, parts)"
          raise ValueError(f"aggregator option {option} has {rule!r}; pass a list of {form}.")
        _check_pattern(option, rule[0])

  def _matrices(self, rule: Callable[..., jax.Array], plain: Callable[..., jax.Array], name: str, x: jax.Array, lead: int
                ) -> jax.Array:
    """`rule` on every matrix of one layer's leaf, or `plain`; x has `lead` axes in front that both take away."""
    shape = x.shape[lead:]
    row_axes = next((n for pattern, n in self.matrices if re.search(pattern, name)), None)
    split = next(((axis, parts) for pattern, axis, parts in self.fused if re.search(pattern, name)), None)
    if _matches(self.exclude, name) or len(shape) < 2 or len(shape) > 2 and row_axes is None and split is None:
      return plain(x)
    axis, parts = split or (0, 1)
    size = shape[axis] if -len(shape) <= axis < len(shape) else 0
    sizes = parts if isinstance(parts, tuple) else (size // max(1, parts),) * parts
    if sum(sizes) != size or size == 0:
      raise ValueError(f"aggregator option fused: {name} of shape {shape} cannot be split in {parts} along axis {axis}; "
                       "correct the axis or the parts.")
    merged = []
    for part in jnp.split(x, np.cumsum(sizes)[:-1], axis=lead + axis % len(shape)):
      full = flat = part.shape[lead:]
      if split and len(full) > 2 and full[axis] == 1:
        flat = tuple(np.delete(full, axis))
      rows = row_axes if row_axes is not None and len(flat) > 2 else 1
      if not 0 < rows < len(flat):
        raise ValueError(f"aggregator option matrices: row_axes={rows} must leave both rows and columns of the {len(flat)} "
                         f"axes of {name}; correct it.")
      merged.append(rule(part.reshape(*x.shape[:lead], math.prod(flat[:rows]), math.prod(flat[rows:]))).reshape(full))
    return jnp.concatenate(merged, axis=axis)


@dataclasses.dataclass(frozen=True)
class IsoC(_Spectral):
  """SVD(mean D) = U diag(s) V^T;  A = mean(s) U V^T, by `polar` and mean(s) = <U V^T, D> / min(rows, cols).

  The mean is over all min(rows, cols) values, the reference's convention; zero singular values stay zero, so the rank
  does not grow (an SVD would fill the null space with arbitrary vectors). Full rank keeps the nuclear norm.
  """

  name: ClassVar[str] = "iso_c"

  def finish(self, payload_mean, like):
    def rule(x):
      factor = polar(x)
      return jnp.sum(factor * x) / min(x.shape) * factor

    layer = functools.partial(self._matrices, rule, lambda x: x)
    return _map(lambda name, x, l: _by_layer(lambda x: layer(name, x, lead=0), name, _wide(x)).astype(l.dtype),
                payload_mean, like)


@dataclasses.dataclass(frozen=True)
class _SpectralOfAll(_Spectral, abc.ABC):
  """Rules on matrices that need those of all workers."""

  gathers: ClassVar[bool] = True

  def merge(self, stack, alive):
    count = jnp.maximum(1, jnp.sum(alive))
    layer = functools.partial(self._matrices, functools.partial(self._matrix, count=count), lambda x: jnp.sum(x, 0) / count)
    return _map(lambda name, x: _by_layer(lambda x: layer(name, x, lead=1), name, _live(x, alive), axis=1).astype(x.dtype),
                stack)

  @abc.abstractmethod
  def _matrix(self, x_MxRxC: jax.Array, count: jax.Array) -> jax.Array:
    """The gathering rule on one matrix of M workers, of which `count` are live and the others zero."""


@dataclasses.dataclass(frozen=True)
class IsoCts(_SpectralOfAll):
  """Isotropic merging in a common subspace and one subspace per worker (r = min(rows, cols)).

      C = mean D;  t = round((r - int(common r)) / M) * M;  U_c, V_c: the r - t first singular vectors of C
      every worker adds the t/M first triples of D_m/M - U_c U_c^T D_m/M
      A = mean(s) polar(U) polar(V)^T,  U, s, V: the workers' triples, then the common ones

  Where t would pass r it is r // M * M. With dead workers D_m is divided by, and s averaged over, the live ones.
  """

  common: float = 0.8
  name: ClassVar[str] = "iso_cts"

  def __post_init__(self):
    super().__post_init__()
    _check_number("common", self.common, 0, 1, closed=True)

  def _matrix(self, x_MxRxC, count):
    r, workers = min(x_MxRxC.shape[1:]), x_MxRxC.shape[0]
    each = min(round((r - int(self.common * r)) / workers), r // workers)
    x_MxRxC = x_MxRxC / count
    common = _triples(jnp.sum(x_MxRxC, axis=0), r - each * workers)
    residual_MxRxC = x_MxRxC - _dot(common[0], _dot(common[0].T, x_MxRxC))
    u, s, v = _side_by_side(_triples(residual_MxRxC, each), common)
    return jnp.sum(s) / (r - (workers - count) * each) * _dot(polar(u), polar(v).T)


@dataclasses.dataclass(frozen=True)
class TsvM(_SpectralOfAll):
  """Every worker's first k = max(1, int(min(rows, cols) / M)) singular triples (`keep`: another k), made orthogonal:
  A = polar([U_1 .. U_M]) diag(s_1 .. s_M) polar([V_1 .. V_M])^T, without a factor 1/M."""

  keep: int | None = None
  name: ClassVar[str] = "tsv_m"

  def __post_init__(self):
    super().__post_init__()
    if self.keep is not None and not (isinstance(self.keep, int) and self.keep > 0):
      raise ValueError(f"aggregator option keep={self.keep!r} must be a whole number of at least 1, or None for r/M.")

  def _matrix(self, x_MxRxC, count):
    r = min(x_MxRxC.shape[1:])
    u, s, v = _side_by_side(_triples(x_MxRxC, min(r, self.keep or max(1, r // x_MxRxC.shape[0]))))
    return _dot(polar(u) * s, polar(v).T)


_CLASSES = {c.name: c for c in (Aggregator, TaskArithmetic, IsoC, IsoCts, Ties, Dare, TsvM, Rda)}
AGGREGATORS = tuple(_CLASSES)


def make_aggregator(name: str, options: Mapping[str, Any] | None = None) -> Aggregator:
  """The aggregator `name` with its options, as config files write them (lists may stand for tuples).

  Raises:
    ValueError: an unknown name, option or value.
  """
  if not isinstance(name, str) or name not in _CLASSES:
    raise ValueError(f"aggregator={name!r} is unknown; choose one of {', '.join(AGGREGATORS)}.")
  options = {} if options is None else options
  known = [field.name for field in dataclasses.fields(_CLASSES[name]) if field.name != "workers"]
  if not isinstance(options, Mapping) or not set(options) <= set(known):
    raise ValueError(f"aggregator_options={options!r}: {name} takes {', '.join(known) or 'no options'}; pass no others.")
  return _CLASSES[name](**{k: _hashable(v) for k, v in options.items()})


def radial_directional(stack: jax.Array, weights: jax.Array) -> jax.Array:
  """Radial-directional averaging of one tensor of all learners, for a server that holds them (2604.21428).

  Args:
    stack: [M, ...] outer gradients of one tensor (one layer).
    weights: [M] non-negative; 0 for a missing learner, whose row is ignored.

  Returns: (sum w ||D|| / sum w) phi(sum w phi(D) / sum w), [...] in stack's dtype; the weighted mean where the mean
    direction vanishes; zero when all weights are. It vanishes below 1e-12, as third parties have it, in float64; in float32
    below 1e-6, since directions that cancel leave about 1e-7 by rounding there, whose own direction would mean nothing.
  """
  x = _live(stack, weights > 0)
  total = jnp.sum(weights)
  w = (weights / jnp.where(total > 0, total, 1)).astype(x.dtype)
  mean = functools.partial(jnp.einsum, "m,m...->...", w, precision="highest")
  direction, norm = mean(jax.vmap(_phi)(x)), mean(jax.vmap(_norm)(x))
  return jnp.where(_norm(direction) < _vanishing(x.dtype), mean(x), norm * _phi(direction)).astype(stack.dtype)


def polar(x: jax.Array) -> jax.Array:
  """The factor U V^T of x [rows, cols] = U diag(s) V^T, without an SVD: Newton-Schulz with matrix products alone.

  x is divided by its Schatten-32 norm, between s_max and r^(1/32) s_max. Scaled cubic steps X <- a (1.5 X - 0.5 a^2 X X^T
  X) raise every singular value above `least` (1e-10 in float64, 1e-5 in float32) to 1; steps X <- 2.5 X X^T X - 1.5 X (X^T
  X)^2 then send to 0 what has stayed far below 1, rounding errors in the null space included. So s < 0.1 least s_max gives
  0, s > r^(1/32) least s_max gives 1. About 20 steps of 4 rows cols min(rows, cols) flops in float32, 30 in float64.
  """
  if x.shape[0] < x.shape[1]:
    return polar(x.T).T
  x = x / _or_one(jnp.max(jnp.abs(x), initial=0))
  gram, bound = _dot(x.T, x), jnp.ones((), x.dtype)
  for root in (1, 2, 4, 8):
    norm = _or_one(jnp.linalg.norm(gram))
    bound *= norm ** (1 / root)
    gram = _dot(gram / norm, gram / norm)
  # The scale that sends 1 and l to the same value is the fastest for values in [l, 1] (Chen and Chow 2014); l < 0.1
  # would send s_max so near to 0 that rounding spoils it.
  scales, l = [], 1e-10 if x.dtype == jnp.float64 else 1e-5
  while l < 0.999:
    c = max(l, 0.1)
    scales.append(math.sqrt(3 / (1 + c + c * c)))
    l = min(scales[-1] * v * (1.5 - 0.5 * (scales[-1] * v) ** 2) for v in (l, 1.0))

  def grow(x, a):
    return a * (1.5 * x - 0.5 * a * a * _dot(x, _dot(x.T, x))), None

  def sharpen(_, x):
    gram = _dot(x.T, x)
    return _dot(x, 2.5 * gram - 1.5 * _dot(gram, gram))

  x, _ = jax.lax.scan(grow, x / jnp.sqrt(bound), jnp.asarray(scales, x.dtype))
  return jax.lax.fori_loop(0, 3, sharpen, x)


def _triples(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The first k singular triples U [..., rows, k], s [..., k], V [..., cols, k]; zero where s vanishes."""
  u, s, vt = jnp.linalg.svd(x, full_matrices=False)
  counts = s > s[..., :1] * max(x.shape[-2:]) * jnp.finfo(x.dtype).eps
  u, v = (jnp.where(counts[..., None, :], y, 0) for y in (u, jnp.swapaxes(vt, -1, -2)))
  return u[..., :k], jnp.where(counts, s, 0)[..., :k], v[..., :k]


def _side_by_side(workers, common=None):
  """The workers' triples [M, ...], then the common ones, as the columns of U [rows, n] and V [cols, n] and s [n]."""
  joined = [jnp.moveaxis(y, 0, -2).reshape(y.shape[1:-1] + (-1,)) for y in workers]
  return [jnp.concatenate([y, c], axis=-1) for y, c in zip(joined, common)] if common else joined


def _map(fn: Callable[..., Any], *trees: PyTree) -> PyTree:
  """fn(path, leaf, ...) over trees of one structure."""
  return jax.tree_util.tree_map_with_path(lambda path, *leaves: fn(path_of(path), *leaves), *trees)


def _stacked(name: str) -> bool:
  return bool(STACKED_LAYERS.search(name)) and not NUMBERED_LAYER.search(name)


def _by_layer(fn: Callable[..., jax.Array], name: str, *leaves: jax.Array, axis: int = 0) -> jax.Array:
  """fn(*leaves), or of one layer after another (its temporaries then are of one layer's size); axis: the layers."""
  if not _stacked(name):
    return fn(*leaves)
  return jax.lax.map(lambda layer: fn(*layer), tuple(jnp.moveaxis(x, axis, 0) for x in leaves))


def _wide(x: jax.Array) -> jax.Array:
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _live(x: jax.Array, alive: jax.Array) -> jax.Array:
  """x [M, ...], wide, with zeros for the dead."""
  return jnp.where(alive.reshape((-1,) + (1,) * (x.ndim - 1)), _wide(x), 0)


def _or_one(x: jax.Array) -> jax.Array:
  """A divisor: x, or 1 where x is 0."""
  return jnp.where(x > 0, x, 1)


def _norm(x: jax.Array) -> jax.Array:
  """||x||, also where squares would underflow."""
  most = jnp.max(jnp.abs(x), initial=0)
  return most * jnp.sqrt(jnp.sum(jnp.square(x / _or_one(most))))


def _phi(x: jax.Array) -> jax.Array:
  return x / _or_one(_norm(x))


def _vanishing(dtype: Any) -> float:
  return 1e-12 if dtype == jnp.float64 else 1e-6


def _kept(drop: float, size: int) -> int:
  """int((1 - drop) size), at least 1; the factor undoes the rounding of 1 - 0.9."""
  return max(1, int((1 - drop) * size * (1 + 1e-12)))


def _matches(pattern: str | None, name: str) -> bool:
  return pattern is not None and bool(re.search(pattern, name))


def _hashable(value: Any) -> Any:
  return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _check_number(option: str, value: Any, low: float, high: float, closed: bool = False) -> None:
  number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
  if not (number and (low <= value < high or closed and value == high)):
    raise ValueError(f"aggregator option {option}={value!r} must be a number in [{low}, {high}{']' if closed else ')'}.")


def _check_pattern(option: str, pattern: Any) -> None:
  try:
    if pattern is not None:
      re.compile(pattern)
  except (re.error, TypeError) as e:
    raise ValueError(f"aggregator option {option}={pattern!r} is not a regular expression: {e}.") from e
