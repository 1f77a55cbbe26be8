"""Which parameters an exchange covers, by path: FGD's Mix2 on "embeddings, LM head and early layers" (2606.22768)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any


def path_of(path: Sequence[Any]) -> str:
  """A jax key path as keys joined by "/" (empty keys are left out)."""
  names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
  return "/".join(n for n in names if n)


class Rule(NamedTuple):
  """Leaves whose path matches `pattern` (re.search); with `axis`, only `part` of the leaf along that axis."""

  pattern: str
  axis: int | None = None
  part: slice | tuple[int, ...] | None = None


class EarlyLayers(NamedTuple):
  """Embeddings, LM head and the first `n` layers, found by path names when the tree is known."""

  n: int


def embeddings_head_early_layers(n: int) -> EarlyLayers:
  """FGD's subset: token embedding, LM head and the `n` shallowest layers (43 % of the 1.5B model with n = 2).

  Layers may be numbered (`layers_0`, `layers/0`, `blocks.3`) or stacked (`layers/...` with a leading layer axis, as a
  scan over layers has them; then only the first n slices are covered).
  """
  if n < 0:
    raise ValueError(f"embeddings_head_early_layers({n}): the number of layers cannot be negative.")
  return EarlyLayers(n)


EMBEDDING_OR_HEAD = re.compile(
    r"(^|[/_.])(embed\w*|wte|wpe|tok_\w*|\w*_embed\w*|lm_head|head|unembed\w*|output_head)([/_.]|$)")
EMBEDDING = re.compile(r"(^|[/_.])(embed\w*|wte|wpe|tok_\w*|\w*_embed\w*)([/_.]|$)")
NUMBERED_LAYER = re.compile(r"(^|/)\w*(layers?|blocks?|h)[/_.]?(\d+)(/|$)")
STACKED_LAYERS = re.compile(r"(^|/)(layers|blocks|h)(/|$)")
_CALL = re.compile(r"^\s*embeddings_head_early_layers\((\d+)\)\s*$")


class Subset:
  """A set of leaves, or slices of leaves, of a parameter tree.

  Args:
    subset: a regular expression (re.search on the path joined by "/"), a list of rules (pattern, axis, slice) or
      patterns, or `embeddings_head_early_layers(n)` (also as a string, for config files). The first rule that matches
      a leaf counts. A pattern that does not match a leaf of stacked layers, `layers/...`, covers the rows whose path
      matches if they are numbered, `layers_0/...`: it means the same in both layouts.
  """

  def __init__(self, subset: Any):
    if isinstance(subset, str) and (call := _CALL.match(subset)):
      subset = embeddings_head_early_layers(int(call.group(1)))
    if isinstance(subset, (str, Rule)) or (isinstance(subset, tuple) and len(subset) == 3 and isinstance(subset[1], int)):
      subset = [subset]
    if not isinstance(subset, (list, tuple)):
      raise ValueError(f"subset={subset!r} must be a regular expression, a list of rules (pattern, axis, slice) or "
                       "embeddings_head_early_layers(n).")
    self.early = subset if isinstance(subset, EarlyLayers) else None
    self.rules = [] if self.early else [_rule(r) for r in subset]

  def take(self, tree: PyTree) -> dict[str, jax.Array]:
    """The covered parts by path: whole leaves, or static slices of them.

    Raises:
      ValueError: a rule matches nothing, or an axis or slice that the leaf does not have; names `subset=`.
    """
    leaves = {path_of(p): x for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
    found = self._early(list(leaves)) if self.early else self._by_rules(leaves)
    if not found:
      names = ", ".join(list(leaves)[:6])
      raise ValueError(f"subset={self.early or [tuple(r) for r in self.rules]} covers none of the parameters ({names}, "
                       "...); pass subset= with a regular expression or rules that match their paths.")
    return {path: _part(path, leaves[path], rule) for path, rule in found.items()}

  def put(self, tree: PyTree, parts: dict[str, jax.Array]) -> PyTree:
    """`tree` with the covered parts replaced."""
    leaves = {path_of(p): x for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
    found = self._early(list(leaves)) if self.early else self._by_rules(leaves)

    def leaf(path, x):
      name = path_of(path)
      if name not in parts:
        return x
      rule = found[name]
      if rule.axis is None:
        return parts[name]
      return x.at[_index(rule)].set(parts[name])

    return jax.tree_util.tree_map_with_path(leaf, tree)

  def _by_rules(self, leaves: dict[str, jax.Array]) -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for rule in self.rules:
      hits = {p: rule for p in leaves if re.search(rule.pattern, p)}
      if rule.axis is None:
        hits |= {p: Rule(p, 0, rows) for p, x in leaves.items() if p not in hits and (rows := _rows(rule, p, x))}
      if not hits:
        raise ValueError(f"subset={rule.pattern!r} matches none of the parameters ({', '.join(list(leaves)[:6])}, ...); "
                         "correct the pattern or remove the rule.")
      found = {p: _first(found[p], hits[p]) if p in found and p in hits else (found | hits)[p] for p in found | hits}
    return found

  def _early(self, paths: list[str]) -> dict[str, Rule]:
    assert self.early is not None
    found = {}
    for path in paths:
      if numbered := NUMBERED_LAYER.search(path):
        if int(numbered.group(3)) < self.early.n:
          found[path] = Rule(path)
      elif STACKED_LAYERS.search(path):
        if self.early.n:
          found[path] = Rule(path, 0, slice(0, self.early.n))
      elif EMBEDDING_OR_HEAD.search(path):
        found[path] = Rule(path)
    return found


def _rule(rule: Any) -> Rule:
  if isinstance(rule, str):
    rule = Rule(rule)
  elif not isinstance(rule, Rule):
    pattern, axis, part = (tuple(rule) + (None, None))[:3]
    rule = Rule(pattern, axis, slice(*part) if isinstance(part, (tuple, list)) else part)
  if (rule.axis is None) != (rule.part is None):
    raise ValueError(f"subset rule {tuple(rule)}: axis and slice go together; give both or neither.")
  try:
    re.compile(rule.pattern)
  except re.error as e:
    raise ValueError(f"subset={rule.pattern!r} is not a regular expression: {e}.") from e
  return rule


def _first(rule: Rule, later: Rule) -> Rule:
  """What counts of two rules that match one leaf: the first, but rows of stacked layers unite as numbered layers would."""
  if not isinstance(rule.part, tuple) or isinstance(later.part, slice):
    return rule
  return later if later.part is None else rule._replace(part=tuple(sorted({*rule.part, *later.part})))


def _rows(rule: Rule, path: str, x: jax.Array) -> tuple[int, ...]:
  """The rows of a leaf of stacked layers that a pattern would match as numbered layers."""
  stacked = STACKED_LAYERS.search(path)
  if stacked is None or NUMBERED_LAYER.search(path) or not x.ndim:
    return ()
  numbered = lambda i: f"{path[:stacked.end(2)]}_{i}{path[stacked.end(2):]}"
  return tuple(i for i in range(x.shape[0]) if re.search(rule.pattern, numbered(i)))


def _index(rule: Rule) -> tuple[Any, ...]:
  assert rule.axis is not None
  part = np.asarray(rule.part) if isinstance(rule.part, tuple) else rule.part
  return (slice(None),) * rule.axis + (part,)


def _part(path: str, x: jax.Array, rule: Rule) -> jax.Array:
  if rule.axis is None:
    return x
  if not 0 <= rule.axis < x.ndim:
    raise ValueError(f"subset rule {tuple(rule)}: {path} has shape {tuple(x.shape)} and no axis {rule.axis}.")
  part = x[_index(rule)]
  if not part.size:
    raise ValueError(f"subset rule {tuple(rule)}: the slice of {path} {tuple(x.shape)} is empty.")
  return part
