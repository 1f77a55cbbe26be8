"""Going on with another number of workers: what each of them starts from.

Rule "mean": every worker starts at the workers' mean, of parameters and of every floating-point state (inner optimizer,
outer momentum, error feedback, earlier outer gradients, fragments): the average model and what the mean still has to
receive stay what they were.
Rule "first": where workers leave, the first ones go on as they are; where workers join, all go on as they are and those
who join start at the mean.

Counters are the same everywhere and go on. Which example is read next is `fgd_jax.data.deal`'s matter.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fgd_jax.methods.base import narrowed
from fgd_jax.mixing import path_of
from fgd_jax.round import Round
from fgd_jax.state import Originals, State
from fgd_jax.workers import Workers

PyTree = Any
RULES = ("mean", "first")


def resize(state: State, round_fn: Round, rule: str = "mean") -> tuple[State, list[str]]:
  """The state of another number of workers as `round_fn` takes it.

  Args:
    state: of M workers, with the method and inner optimizer of `round_fn`, on any devices that its workers use.
    round_fn: the round of the new number of workers.
    rule: "mean" or "first", as above.

  Returns:
    The new state, and the parts of the method's state that start afresh, at the mean parameters, because the old state had
    none such (a single worker has no Mix1, another topology was chosen).

  Raises:
    ValueError: an unknown rule, or parameters or an inner optimizer of other shapes.
  """
  if rule not in RULES:
    raise ValueError(f"resume.workers={rule!r} must be one of {', '.join(map(repr, RULES))}.")
  one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params)
  new = round_fn.abstract_state(one)
  before, count = (jax.tree.leaves(tree)[0].shape[0] for tree in (state.params, new.params))
  if not _alike(state[:2], new[:2]):
    raise ValueError("The state's inner optimizer is not the one of this round; use the same for both.")
  known = _by_path(state.method_state)
  fresh = [path for path, x in _by_path(new.method_state).items() if path not in known or not _alike(known[path], x)]

  def run(z, inner_opt_state, old_ms):
    moved = lambda tree: jax.tree.map(lambda x: _dealt(x, count, rule), tree)
    known, new_z, wide = _by_path(old_ms), moved(z), isinstance(old_ms, Originals)
    start = round_fn.method_state(jax.tree.map(lambda x: _mean(x).astype(x.dtype), z))
    stacked = lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x)))
    ms = jax.tree_util.tree_map_with_path(
        lambda path, x: stacked(x) if path_of(path) in fresh else moved(known[path_of(path)]), start)
    if rule == "first" and count < before:
      jump = jax.tree.map(lambda x: (_mean(x[:count]) - _mean(x)).astype(x.dtype), old_ms.params if wide else z)
      shift = jax.vmap(lambda own: round_fn.method.mean_moved(own, jump), axis_size=count)
      ms = ms._replace(method=shift(ms.method)) if wide else shift(ms)
    return (narrowed(ms.params, new_z) if wide else new_z), moved(inner_opt_state), ms

  shardings = jax.tree.map(lambda x: x.sharding, tuple(new[:3]))
  z, inner_opt_state, ms = jax.jit(run, out_shardings=shardings)(*state[:3])
  return State(z, inner_opt_state, ms, np.int32(state.round)), fresh


def describe(rule: str, before: int, now: int) -> str:
  """What the rule means from `before` to `now` workers, in words."""
  if rule == "mean":
    return "all start at the mean"
  return f"the first {now} of {before} go on" if now < before else f"{before} go on, {now - before} start at the mean"


def spread(state: PyTree, workers: Workers) -> PyTree:
  """Shapes [M, ...] of a state with shardings on the devices of `workers`, whose number need not divide M.

  Each leaf is divided along the first axis that the devices divide, else it lies everywhere.
  """
  devices = len(workers.devices)

  def one(x):
    if workers.mesh is None:
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=workers.replicated())
    axis = next((i for i, size in enumerate(x.shape) if size and size % devices == 0), None)
    spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, workers.mesh.axis_names)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(workers.mesh, spec))

  return jax.tree.map(one, state)


def _dealt(x: jax.Array, count: int, rule: str) -> jax.Array:
  """[M, ...] -> [count, ...] by the rule."""
  exact = not jnp.issubdtype(x.dtype, jnp.inexact)
  mean = x[0] if exact else _mean(x).astype(x.dtype)
  kept = x[:count] if rule == "first" else x[:0]
  joined = jnp.broadcast_to(mean, (count - kept.shape[0], *x.shape[1:]))
  return jnp.concatenate([kept, joined])


def _by_path(tree: PyTree) -> dict[str, Any]:
  return {path_of(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _mean(x: jax.Array) -> jax.Array:
  """The mean over workers in float32 at least; of equal workers it is bit for bit what they have."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  return wide[0] + jnp.mean(wide - wide[0], axis=0)


def _alike(a: PyTree, b: PyTree) -> bool:
  """Whether two trees have the same leaves but for the worker axis."""
  leaves_a, structure_a = jax.tree.flatten(a)
  leaves_b, structure_b = jax.tree.flatten(b)
  return structure_a == structure_b and all(  # type: ignore[operator]
      x.shape[1:] == y.shape[1:] and x.dtype == y.dtype for x, y in zip(leaves_a, leaves_b))
