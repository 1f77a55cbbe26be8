"""Fragments: a partition of the parameters in P parts that are exchanged one after the other (arXiv 2501.18512).

Layer-wise, by path: layers are dealt out `strided` (layer i to fragment i mod n, the paper's default) or `sequential`
(neighbours together), whether they are numbered (`layers_0/...`) or stacked (`layers/...` with a leading axis). Or
`balanced`: tensor by tensor into the lightest fragment, embeddings apart (Decoupled DiLoCo, arXiv 2604.21428). Or `flat`: P
equal ranges of all parameters, one after the other, which cut through leaves.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fgd_jax.mixing.subset import EMBEDDING, NUMBERED_LAYER, STACKED_LAYERS, path_of

PyTree = Any
ORDERS = ("strided", "sequential", "balanced", "flat")
FLAT = "flat:"  # how the keys of flat fragments begin; the rest is the dtype
FLAT_TILE = 1024  # long ranges are padded to a multiple of it, so that the devices of a worker can divide them


@dataclasses.dataclass(frozen=True)
class _Piece:
  """A part of one leaf: indices of its leading axis (None: all of it), or a range of it when ravelled."""

  path: str
  rows: tuple[int, ...] | None = None
  span: tuple[int, int] | None = None


class Fragments:
  """The partition of one parameter tree.

  Args:
    parts: for each fragment its pieces by key. Fragments whose keys and shapes are equal can be exchanged by one program.
    shapes: of the whole leaves, by path.
    lengths: of flat fragments: elements of each key, padding included.
  """

  def __init__(self, parts: Sequence[Mapping[str, tuple[_Piece, ...]]], shapes: Mapping[str, jax.ShapeDtypeStruct],
               lengths: Mapping[str, int] | None = None):
    self._parts, self._shapes, self._lengths = list(parts), dict(shapes), lengths
    forms = [self.shape(p) for p in range(len(parts))]
    starts = [p for p in range(len(parts)) if p == 0 or forms[p] != forms[p - 1]]
    self.groups = [tuple(range(a, b)) for a, b in zip(starts, [*starts[1:], len(parts)])]

  @property
  def count(self) -> int:
    """P."""
    return len(self._parts)

  def place(self, p: int) -> tuple[int, int]:
    """Group of fragment p (consecutive fragments of equal shapes) and its number in it."""
    return next((g, p - group[0]) for g, group in enumerate(self.groups) if p in group)

  def shape(self, p: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of fragment p."""
    tree = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in self._shapes.items()}
    return jax.eval_shape(lambda leaves: self._take(leaves, p), tree)

  def take(self, tree: PyTree, p: Any, group: Sequence[int] | None = None) -> dict[str, jax.Array]:
    """Fragment p of one worker's tree, by key. A traced p needs the group of equal fragments that it is one of."""
    leaves = {path_of(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
    return self._chosen(lambda i, leaves: self._take(leaves, i), p, group, leaves)

  def put(self, tree: PyTree, p: Any, fragment: Mapping[str, jax.Array], group: Sequence[int] | None = None) -> PyTree:
    """The tree with fragment p replaced."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {path_of(path): x for path, x in flat}
    leaves = self._chosen(self._put, p, group, leaves, dict(fragment))
    return jax.tree.unflatten(treedef, [leaves[path_of(path)] for path, _ in flat])

  def join(self, groups: Sequence[Mapping[str, jax.Array]], like: PyTree) -> PyTree:
    """The whole tree from one stack [fragments of the group, ...] for each group; shapes and structure of `like`."""
    for g, group in enumerate(self.groups):
      for i, p in enumerate(group):
        like = self.put(like, p, {key: x[i] for key, x in groups[g].items()})
    return like

  def _chosen(self, f: Callable, p: Any, group: Sequence[int] | None, *args: Any) -> Any:
    if isinstance(p, int):
      return f(p, *args)
    assert group is not None
    if len(group) == 1:
      return f(group[0], *args)
    return lax.switch(p - group[0], [lambda *a, i=i: f(i, *a) for i in group], *args)

  def _take(self, leaves: Mapping[str, jax.Array], p: int) -> dict[str, jax.Array]:
    return {key: self._joined(key, [_cut(leaves[piece.path], piece) for piece in pieces])
            for key, pieces in self._parts[p].items()}

  def _joined(self, key: str, cuts: list[jax.Array]) -> jax.Array:
    if self._lengths is None:
      return cuts[0]
    vector = jnp.concatenate(cuts)
    return jnp.pad(vector, (0, self._lengths[key] - vector.size))

  def _put(self, p: int, leaves: dict[str, jax.Array], fragment: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    leaves = dict(leaves)
    for key, pieces in self._parts[p].items():
      start = 0
      for piece in pieces:
        old, new = leaves[piece.path], fragment[key]
        if piece.span is None:
          leaves[piece.path] = _replaced(old, new, piece.rows)
          continue
        length = piece.span[1] - piece.span[0]
        leaves[piece.path] = old.ravel().at[piece.span[0]:piece.span[1]].set(new[start:start + length]).reshape(old.shape)
        start += length
    return leaves


def _cut(leaf: jax.Array, piece: _Piece) -> jax.Array:
  if piece.span is not None:
    return leaf.ravel()[piece.span[0]:piece.span[1]]
  return leaf if piece.rows is None else leaf[_index(piece.rows)]


def _replaced(leaf: jax.Array, new: jax.Array, rows: tuple[int, ...] | None) -> jax.Array:
  return new if rows is None else leaf.at[_index(rows)].set(new)


def _index(rows: tuple[int, ...]) -> Any:
  """Evenly spaced rows as a slice, which XLA neither gathers nor scatters."""
  steps = set(np.diff(rows).tolist()) or {1}
  if len(steps) == 1 and min(steps) > 0:
    return slice(rows[0], rows[-1] + 1, steps.pop())
  return np.asarray(rows)


def make_fragments(fragments: Any, order: str, params: PyTree, ends: str = "own") -> Fragments:
  """The fragments of a parameter tree.

  Args:
    fragments: P in all, or a list of P path patterns (re.search; the first that matches a leaf has it).
    order: "strided" or "sequential" layers, "balanced" tensors, or "flat" ranges; without effect on patterns.
    params: arrays or shapes of one worker.
    ends: leaves outside the layers are the last fragment ("own"), or join the layers' fragments ("joined"): those before the
      first layer in the tree's order the first one, all others the last one. Without effect on balanced and flat ones.

  Raises:
    ValueError: a partition that these parameters do not have, naming `fragments`.
  """
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  shapes = {path_of(path): x for path, x in leaves}
  if len(shapes) < len(leaves):
    raise ValueError("fragments: two parameters have the same path once their keys are joined by '/'; rename one of them.")
  if not isinstance(fragments, int):
    return _by_patterns(list(fragments), shapes)
  if order == "flat":
    return _flat(fragments, shapes)
  if order == "balanced":
    return _balanced(fragments, shapes)
  return _by_layers(fragments, order, ends, shapes)


def check_fragments(fragments: Any, order: str, ends: str) -> None:
  """Refuses what no parameter tree could make right.

  Raises:
    ValueError: one sentence that names the option.
  """
  if isinstance(fragments, bool) or not isinstance(fragments, (int, list, tuple)) or not fragments or (
      isinstance(fragments, int) and fragments < 1):
    raise ValueError(f"fragments={fragments!r} must be a number of fragments, at least 1, or a list of path patterns.")
  if not isinstance(fragments, int):
    for pattern in fragments:
      try:
        re.compile(pattern)
      except (re.error, TypeError) as e:
        raise ValueError(f"fragments={pattern!r} is not a regular expression: {e}.") from e
  if order not in ORDERS:
    raise ValueError(f"order={order!r} must be one of {', '.join(ORDERS)}.")
  if ends not in ("own", "joined"):
    raise ValueError(f"ends={ends!r} must be 'own' or 'joined'.")


def _by_patterns(patterns: list[str], shapes: Mapping[str, Any]) -> Fragments:
  parts: list[list[_Piece]] = [[] for _ in patterns]
  for path in shapes:
    hit = next((i for i, pattern in enumerate(patterns) if re.search(pattern, path)), None)
    if hit is None:
      raise ValueError(f"fragments: none of the patterns {patterns} matches the parameter {path!r}; every parameter belongs "
                       "to a fragment (add '' as the last pattern for the rest).")
    parts[hit].append(_Piece(path))
  for pattern, part in zip(patterns, parts):
    if not part:
      raise ValueError(f"fragments={pattern!r} matches no parameter that is left ({', '.join(list(shapes)[:6])}, ...); "
                       "correct the pattern or remove it.")
  return Fragments([_keyed(part) for part in parts], shapes)


def _by_layers(count: int, order: str, ends: str, shapes: Mapping[str, Any]) -> Fragments:
  if count == 1:
    return Fragments([_keyed([_Piece(path) for path in shapes])], shapes)
  numbered = {path: int(found.group(3)) for path in shapes if (found := NUMBERED_LAYER.search(path))}
  stacked = {path: x.shape[0] for path, x in shapes.items()
             if path not in numbered and STACKED_LAYERS.search(path) and x.ndim}
  if len(set(stacked.values())) > 1:
    raise ValueError(f"fragments={count}: {', '.join(list(stacked)[:3])}, ... look like stacked layers, but their leading "
                     "axes have different lengths; give a list of path patterns, or order='flat'.")
  layers = sorted({*numbered.values(), *(i for n in stacked.values() for i in range(n))})
  outside = [path for path in shapes if path not in numbered and path not in stacked]
  own = ends == "own" and bool(outside)
  dealt = count - own
  if not layers or dealt > len(layers):
    raise ValueError(f"fragments={count}: {len(layers)} layers ({', '.join(list(shapes)[:4])}, ...) cannot be dealt to "
                     f"{dealt} fragments" + (", with one more for what is outside the layers" if own else "")
                     + "; ask for fewer, or use order='flat'.")
  of = {layer: i % dealt if order == "strided" else i * dealt // len(layers) for i, layer in enumerate(layers)}
  parts: list[list[_Piece]] = [[] for _ in range(count)]
  first = min((i for i, path in enumerate(shapes) if path in numbered or path in stacked), default=0)
  for i, path in enumerate(shapes):
    if path in numbered:
      parts[of[numbered[path]]].append(_Piece(path))
    elif path in stacked:
      for p in range(dealt):
        rows = tuple(layer for layer in range(stacked[path]) if of[layer] == p)
        parts[p].append(_Piece(path, rows=rows))
    else:
      parts[count - 1 if own else 0 if i < first else dealt - 1].append(_Piece(path))
  return Fragments([_keyed(part) for part in parts], shapes)


def _balanced(count: int, shapes: Mapping[str, Any]) -> Fragments:
  """Greedy number partitioning: tensors in descending size, each to the lightest fragment; the embeddings are the last.

  The heaviest of the others is at most 4/3 of the best possible (Graham 1969). Equal sizes go by path, equal loads by
  number. A layer of stacked leaves is a tensor of its own.
  """
  if count == 1:
    return Fragments([_keyed([_Piece(path) for path in shapes])], shapes)
  embeddings = [path for path in shapes if EMBEDDING.search(path)]
  tensors: list[tuple[int, str, int | None]] = [
             (math.prod(x.shape), path, None) for path, x in shapes.items()
             if path not in embeddings and (NUMBERED_LAYER.search(path) or not STACKED_LAYERS.search(path))]
  tensors += [(math.prod(x.shape[1:]), path, row) for path, x in shapes.items()
              if path not in embeddings and STACKED_LAYERS.search(path) and not NUMBERED_LAYER.search(path)
              for row in range(x.shape[0])]
  bins = count - bool(embeddings)
  if bins > len(tensors):
    raise ValueError(f"fragments={count}: {len(tensors)} tensors ({', '.join(list(shapes)[:4])}, ...) cannot be dealt to "
                     f"{bins} fragments" + (", with one more for the embeddings" if embeddings else "") + "; ask for fewer.")
  loads, rows = [0] * bins, [dict[str, list[int | None]]() for _ in range(bins)]
  for size, path, row in sorted(tensors, key=lambda x: (-x[0], x[1], x[2] or 0)):
    lightest = loads.index(min(loads))
    loads[lightest] += size
    rows[lightest].setdefault(path, []).append(row)
  parts = [[_Piece(path, None if found[path][0] is None else tuple(sorted(found[path])))  # type: ignore[type-var,arg-type]
            for path in shapes if path in found] for found in rows]
  return Fragments([_keyed(part) for part in parts + [[_Piece(path) for path in embeddings]] * bool(embeddings)], shapes)


def _keyed(pieces: Sequence[_Piece]) -> dict[str, tuple[_Piece, ...]]:
  """Pieces by path, layers renumbered within the fragment, so that equal fragments have equal keys."""
  numbers = sorted({int(found.group(3)) for piece in pieces if (found := NUMBERED_LAYER.search(piece.path))})
  keys: dict[str, tuple[_Piece, ...]] = {}
  for piece in pieces:
    found = NUMBERED_LAYER.search(piece.path)
    key = piece.path
    if found:
      key = piece.path[:found.start(3)] + str(numbers.index(int(found.group(3)))) + piece.path[found.end(3):]
    keys[key] = (piece,)
  return keys


def _flat(count: int, shapes: Mapping[str, Any]) -> Fragments:
  """P equal ranges of the ravelled leaves of each dtype, in the tree's order, padded with zeros."""
  parts: list[dict[str, tuple[_Piece, ...]]] = [{} for _ in range(count)]
  lengths = {}
  for dtype in dict.fromkeys(str(x.dtype) for x in shapes.values()):
    leaves = {path: math.prod(x.shape) for path, x in shapes.items() if str(x.dtype) == dtype}
    total = sum(leaves.values())
    if total < count:
      raise ValueError(f"fragments={count} exceeds the {total} parameters of dtype {dtype}; ask for fewer.")
    length = -(-total // count)
    lengths[FLAT + dtype] = length + (-length % FLAT_TILE if length >= 64 * FLAT_TILE else 0)
    starts = dict(zip(leaves, np.cumsum([0, *leaves.values()]).tolist()))
    for p in range(count):
      cut = []
      for path, size in leaves.items():
        a, b = max(p * length, starts[path]), min((p + 1) * length, starts[path] + size)
        if a < b:
          cut.append(_Piece(path, span=(a - starts[path], b - starts[path])))
      if not cut:
        raise ValueError(f"fragments={count}: {total} parameters of dtype {dtype} cannot be cut in so many ranges of "
                         f"{length}; ask for fewer.")
      parts[p][FLAT + dtype] = tuple(cut)
  return Fragments(parts, shapes, lengths)
