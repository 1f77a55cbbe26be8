"""A round of a method that exchanges fragments in turn (`Fragmented`): P slots of H/P inner steps, one fragment in each.

    with a delay                                    without
      sent   = depart(fragment p)                     w    = scan of H/P inner steps
      raw    = mix1.start(sent)                       sent = depart(fragment that is due at the end of the slot)
      w      = scan of `delay` inner steps            x    = exchange(sent), blocking
      w, raw = optimization_barrier((w, raw))         arrive
      arrive(mix1.finish(raw))
      w      = scan of the slot's other steps

Consecutive fragments of equal shapes share one outer scan: the model stands in the program at most a few times, however many
fragments there are; each adds only a branch to the switches that cut it out and put it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fgd_jax.inner import Inner
from fgd_jax.methods import Fragmented
from fgd_jax.methods.base import narrowed, unsent, widened
from fgd_jax.mixing import Context
from fgd_jax.mixing.fragments import FLAT, Fragments
from fgd_jax.mixing.stacks import finite_rows, where_rows
from fgd_jax.quarantine import examine
from fgd_jax.sharding import FSDP, TENSOR, constrain
from fgd_jax.workers import Workers

PyTree = Any


class Cycle:
  """The program of one round on a slot's local stacks [K, ...].

  Args:
    method: bound.
    inner, workers: as in `Round`; loop: how several workers of a slot take their inner steps.
    context: the round's, for one slot.
    mix_context: (sent) -> the context in which Mix1 carries it.
    ring: whether Mix1 rides in the inner steps.
    steps: H.
    fresh: with quarantine, stack of parameters -> the inner optimizer's state at the start. A sick worker goes back to where
      these steps started, and until each fragment's next departure its outer gradient is left out.
  """

  def __init__(self, method: Fragmented, inner: Inner, workers: Workers, loop: str, context: Context,
               mix_context: Callable[[PyTree, Context], Context], ring: bool, steps: int, fresh: Callable | None = None):
    self.fresh = fresh
    self.method, self.inner, self.workers, self.loop = method, inner, workers, loop
    self.context, self.mix_context, self.ring, self.steps = context, mix_context, ring, steps
    self.length, self.delay = steps // method.count, method.delay_of(steps)

  def run(self, z: PyTree, opt: PyTree, ms: Any, batches: PyTree) -> tuple[PyTree, PyTree, Any, PyTree, dict[str, Any]]:
    """z', inner optimizer state, method state, w (at the end of the inner steps), metrics."""
    parts = self.method.partition(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), widened(z)))
    order = list(range(parts.count)) if self.delay else [*range(1, parts.count), 0]
    carry, outs, slot, w = (z, opt, ms), [], 0, z
    for run in _runs(parts, order):
      n, group = len(run), parts.groups[parts.place(run[0])[0]]
      xs = jax.tree.map(lambda x: x[:, slot * self.length:(slot + n) * self.length], batches)
      if n == 1:
        carry, w, out = self._slot(parts, group, carry, run[0], slot, xs)
      else:
        turns = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], n, self.length, *x.shape[2:]), 1, 0), xs)

        def body(carry, x, group=group):
          carry, _, out = self._slot(parts, group, carry, *x)
          return carry, out

        numbers = jnp.arange(n, dtype=jnp.int32)
        carry, out = lax.scan(body, carry, (run[0] + numbers, slot + numbers, turns))
        out = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], n * x.shape[2], *x.shape[3:]), out)
        w = carry[0]
      outs.append(out)
      slot += n
    metrics = _joined(*outs)
    if "quarantine" in metrics:
      causes = metrics["quarantine"]  # the first one counts
      first = jnp.argmax(causes > 0, axis=1, keepdims=True)
      metrics["quarantine"] = jnp.take_along_axis(causes, first, axis=1)[:, 0]
    return *carry, (carry[0] if self.delay else w), metrics

  def _slot(self, parts: Fragments, group: Sequence[int], carry: Any, p: Any, slot: Any, batches: PyTree) -> Any:
    """One slot with fragment p of this group of equal ones; returns the carry, w before the exchange, the metrics."""
    z, opt, ms = carry
    g, mix1 = parts.groups.index(tuple(group)), self.method.mix1
    position = p - group[0]
    ctx = self.context._replace(event=slot)
    # In the first round no fragment has done H steps, but for the one that is due at the end of it.
    due = True if not self.delay and isinstance(p, int) and p == 0 else ctx.round > 0
    if ctx.links is not None:
      due = due & jnp.any(mix1.alive(ctx))  # given up: what was not sent goes with the next exchange
    pick = lambda ms: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, position, axis=1, keepdims=False), ms[g])
    first = slot * self.length

    if self.delay == 0:
      after, opt, metrics, _ = self._steps(z, opt, batches, None, first)
      z, opt, ms, metrics = self._examined(z, after, opt, ms, metrics)
      before, fs = z, pick(ms)
      ctx = ctx._replace(healthy=_healthy(fs))
      part = self._part(parts, z, fs, p, group)
      sent, _, memo = self._each(self.method.depart, part, fs, ctx)
      x = mix1.finish(mix1.start(sent, ctx), sent, ctx)
    else:
      fs = pick(ms)
      ctx = ctx._replace(healthy=_healthy(fs))
      part = self._part(parts, z, fs, p, group)
      sent, moved, memo = self._each(self.method.depart, part, fs, ctx)
      if self.method.jumps:
        z, fs = self._put(parts, z, _where(due, moved, part), fs, p, group)
      carried = self.mix_context(sent, ctx)
      raw = mix1.start(sent, carried)
      early, late = (jax.tree.map(lambda x: x[:, a:b], batches) for a, b in ((0, self.delay), (self.delay, self.length)))
      riding = jax.tree.map(lambda x: x[None], raw) if self.ring else None
      after, opt, metrics, riding = self._steps(z, opt, early, riding, first, loop=True)
      raw = raw if riding is None else jax.tree.map(lambda x: x[0], riding)
      if self.fresh is None:
        after, raw = lax.optimization_barrier((after, raw))
      else:  # looking at what is not behind the barrier would draw the transfer behind the loop
        (after, opt, metrics), raw = lax.optimization_barrier(((after, opt, metrics), raw))
      z, opt, ms, metrics = self._examined(z, after, opt, ms, metrics)
      x = mix1.finish(raw, sent, carried)
      part, before = self._part(parts, z, fs, p, group), z
    z, fs, fine = self._landed(parts, z, part, x, fs, memo, sent, due, ctx, p, group)
    if "sick" in fs:  # of what it departed with; steps in flight count for the next exchange
      fs = {**fs, "sick": _where(due, metrics["quarantine"][:, 0] > 0 if self.delay else jnp.zeros_like(fs["sick"]),
                                 pick(ms)["sick"])}
      metrics["quarantine"] = jnp.where(fine[:, None] | (metrics["quarantine"] > 0), metrics["quarantine"], 3)
    write = lambda x, new: lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), position, axis=1)
    ms = (*ms[:g], jax.tree.map(write, ms[g], fs), *ms[g + 1:])
    if 0 < self.delay < self.length:
      after, opt, rest, _ = self._steps(z, opt, late, None, first + self.delay)
      z, opt, ms, rest = self._examined(z, after, opt, ms, rest)
      metrics = _joined(metrics, rest)
    return (z, opt, ms), before, metrics

  def _landed(self, parts, z, part, x, fs, memo, sent, due, ctx, p, group):
    """The fragment arrives, where it was due; returns z, fs and whose outer step was finite (bool [K], or None)."""
    own = {k: v for k, v in fs.items() if k not in ("rounding", "sick")}
    new, state = self._each(self.method.arrive, part, x, own, memo, ctx)
    if self.method.feeds_back:
      state = {**state, "error": self._each(lambda sent, ctx: unsent(self.method.mix1, sent, ctx), sent, ctx)}
    fine = None
    if self.fresh is not None:  # an outer step that is not finite does not take place
      fine = finite_rows((new, state))
      new, state = where_rows(fine, new, part), where_rows(fine, state, {k: fs[k] for k in state})
      fine = fine | ~jnp.asarray(due)
    fs = {**fs, **_where(due, state, {k: fs[k] for k in state})}
    return *self._put(parts, z, _where(due, new, part), fs, p, group), fine

  def _part(self, parts, z, fs, p, group) -> PyTree:
    """Fragment p of all workers of the slot; in float32 with what the parameters' rounding lost when it last arrived."""
    part = self.workers.each(lambda z: _divided(parts.take(widened(z), p, group)), z)
    return jax.tree.map(jnp.add, part, fs["rounding"]) if "rounding" in fs else part

  def _put(self, parts, z, part, fs, p, group) -> tuple[PyTree, PyTree]:
    put = lambda z, part: narrowed(parts.put(widened(z), p, part, group), z)
    z = self.workers.each(put, z, part)
    if "rounding" in fs:
      kept = self.workers.each(lambda z: parts.take(widened(z), p, group), z)
      fs = {**fs, "rounding": jax.tree.map(jnp.subtract, part, kept)}
    return z, fs

  def _each(self, f: Callable, *args: Any) -> Any:
    *stacks, ctx = args
    one = lambda worker, healthy, *one: f(*one, ctx._replace(worker=worker, healthy=healthy))
    return self.workers.each(one, self.context.ids, ctx.healthy, *stacks)

  def _steps(self, z, opt, batches, riding, first, loop=False):
    """Inner steps; returns w, opt, metrics [K, ...] and what rode in them."""
    step = lambda *one: self.inner.phase(*one, self.context, first, self.steps, loop)
    w, opt, loss, aux, riding = self.workers.each(step, z, opt, batches, self.context.ids, riding, how=self.loop)
    return w, opt, {"loss": loss} if aux is None else {"loss": loss, "aux": aux}, riding

  def _examined(self, z, w, opt, ms, metrics):
    """w, opt, ms and metrics after steps from z, without those of sick workers, whose fragments are marked."""
    if self.fresh is None:
      return w, opt, ms, metrics
    w, opt, cause = examine(z, w, opt, metrics["loss"], self.fresh)
    ms = tuple({**fs, "sick": fs["sick"] | (cause > 0)[:, None]} for fs in ms)
    return w, opt, ms, {**metrics, "quarantine": cause[:, None]}


def _healthy(fs: dict[str, Any]) -> jax.Array | None:
  return ~fs["sick"] if "sick" in fs else None


def _joined(*metrics: dict[str, Any]) -> dict[str, Any]:
  """Metrics [K, steps, ...] of consecutive steps as one."""
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *metrics)


def _runs(parts: Fragments, order: Sequence[int]) -> list[list[int]]:
  """The order cut where the next fragment has other shapes, or is not the next."""
  runs: list[list[int]] = []
  for p in order:
    if runs and p == runs[-1][-1] + 1 and parts.place(p)[0] == parts.place(runs[-1][-1])[0]:
      runs[-1].append(p)
    else:
      runs.append([p])
  return runs


def _divided(part: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Flat fragments divided over the devices of a worker, so that each sends its share to the other workers."""
  return {key: constrain(x, (FSDP, TENSOR)) if key.startswith(FLAT) else x for key, x in part.items()}


def _where(due: Any, new: PyTree, old: PyTree) -> PyTree:
  return new if due is True else jax.tree.map(lambda a, b: jnp.where(due, a, b), new, old)
