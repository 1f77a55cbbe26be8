"""One outer round as one program: Mix1's collectives, H inner steps beside them, a barrier, the outer step.

    sent = launch(z, ms)
    raw  = mix1.start(sent)                    collectives only, in flight while the inner steps run
    w    = scan(inner step, z)                 H optax steps from z
    w, raw = optimization_barrier((w, raw))    without it, XLA ends the transfer before the scan or starts it after
    x    = mix1.finish(raw)                    arithmetic and assembly
    z'   = land(z, w, x)                       blocking exchanges, outer optimizer

A permutation that changes from round to round is part of the program on a mesh (a collective inside a conditional cannot
overlap), so there is one executable for each permutation, picked on the host from `state.round`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax import lax
from jax.sharding import PartitionSpec

from fgd_jax import host
from fgd_jax import overlap as overlap_forms
from fgd_jax.arguments import (
    alive_mask,
    check_build,
    check_params,
    check_quarantine,
    check_round,
    link_tables,
    shares,
    strong,
)
from fgd_jax.cycle import Cycle
from fgd_jax.inner import Inner
from fgd_jax.measure import consensus_distances
from fgd_jax.methods import Fragmented, Method
from fgd_jax.methods.base import narrowed, widened
from fgd_jax.mixing import Context, path_of
from fgd_jax.mixing.pack import Packing
from fgd_jax.mixing.stacks import one_row, only_row, where_rows
from fgd_jax.quarantine import examine, landed, rejoin_program
from fgd_jax.sharding import Rules, like_params, param_specs
from fgd_jax.state import Originals, State, narrow, refuse_consumed
from fgd_jax.workers import Workers

PyTree = Any
LossFn = Callable[..., Any]


def build_round(method: Method, loss_fn: LossFn, inner_optimizer: optax.GradientTransformation, *, workers: Workers,
                seed: int = 0, measure: Sequence[Any] = (), accumulate: int = 1,
                worker_weights: Sequence[float] | None = None, param_sharding: Rules = (),
                batch_sharding: PartitionSpec = PartitionSpec(), inner_loop: str = "auto", overlap: str = "auto",
                quarantine: bool = False, faults: bool = False) -> tuple[Callable[[PyTree], State], "Round"]:
  """Builds `init` and the round of a method for any model.

  Args:
    method: from `fgd_jax.methods.make`.
    loss_fn: (params, batch, rng) -> scalar, or (scalar, aux pytree of arrays).
    inner_optimizer: any optax transform; its state is per worker.
    workers: how many workers there are and where they live.
    seed: of the mixers' draws and of the workers' rng, fold_in(fold_in(key(seed), worker), inner step from the start).
    measure: what a measured round adds to its metrics: "consensus" (`consensus_inner`: mean pairwise squared distance
      of w at the end of the inner phase; `consensus_outer`: of z'), or functions (w, z') -> dict of arrays, both
      pytrees of [M, ...]. Measures cross workers; see `round_fn(..., measured=False)`.
    accumulate: micro-batches an optimizer step; divides the batch's third axis. H counts optimizer steps.
    worker_weights: [M] positive weights of the workers' (outer) gradients, for shards of unequal size; default equal.
    param_sharding: for meshes with axes besides `worker`: rules (path pattern, PartitionSpec) for the parameters' own
      axes; optimizer states follow the parameters.
    batch_sharding: the same for a batch's axes after [M, H].
    inner_loop: several workers on one device run their inner steps in turn ("map"), together ("vmap"), or as is faster
      on the platform ("auto": map on CPU); one worker a device is a plain call. The numbers are the same.
    overlap: the form in which Mix1 is hidden behind the inner steps: "barrier", "packed", "ring", "host" or, as suits the
      hardware, "auto" (`fgd_jax.overlap`). It never changes the algorithm.
    quarantine: a worker whose loss or state turns non-finite is left out of the exchanges and restored, without a
      collective more (`fgd_jax.quarantine`); metrics get `quarantine`.
    faults: rounds take `links`, exchanges that fail, and a worker that is not alive is down: it keeps its whole state.

  Returns:
    init(params) -> State; every worker starts at `params`, which are not consumed.
    round_fn(state, batches, alive=None, measured=True, links=None) -> (State, metrics), see `Round`.

  Raises:
    ValueError: an impossible argument; the sentence names it.
  """
  measure = (measure,) if isinstance(measure, str) else measure
  check_build(method, inner_optimizer, workers, seed, accumulate, inner_loop, measure)
  weights = None if worker_weights is None else shares(worker_weights, workers.count)
  bound = method.bind(workers.count, int(seed))
  if quarantine:
    check_quarantine(bound, worker_weights)
  overlap_forms.plan(overlap, bound, workers, steps=2**31 - 1)  # refuses forms that no H makes possible
  round_fn = Round(bound, loss_fn, inner_optimizer, workers, int(seed), tuple(measure), accumulate, weights,
                   tuple(param_sharding), batch_sharding, inner_loop, overlap, bool(quarantine), bool(faults))
  return round_fn.init, round_fn


class Round:
  """round_fn(state, batches, alive=None, measured=True, links=None) -> (state, metrics).

  `batches` is a pytree of [M, H, ...] leaves; H is read off the shape. The old state is donated. `alive` [M] bool takes
  workers out of all exchanges of this round (they keep their own values). `links`, where the round was built with faults:
  by mixer key bool [M, M], or [events, M, M] for fragments, symmetric, False where a pair cannot exchange (both keep their
  own values) and, on the diagonal, where a worker takes no part; an overlapped mean that all miss was given up. `metrics`:
  `loss` [M, H] and, where the loss has them, `aux` [M, H, ...], on the device; `bytes_overlapped`, `bytes_blocking`, bytes
  that one worker sends, on the host; with quarantine `quarantine` int32 [M] (index into `fgd_jax.quarantine.CAUSES`, 0:
  healthy); the measures, if any, in a measured round. All executables of a batch shape are compiled in its first call.

  Attributes:
    method: the bound method; `method.mix1.matrix(r)` replays the run.
  """

  def __init__(self, method, loss_fn, inner_optimizer, workers, seed, measure, accumulate, weights, param_rules,
               batch_spec, inner_loop, overlap, quarantine, faults):
    self.method = method
    self._inner, self._workers = Inner(loss_fn, inner_optimizer, accumulate, seed, method, quarantine), workers
    self._quarantine, self._faults = quarantine, faults
    self._measure, self._accumulate, self._weights = measure, accumulate, weights
    self._param_rules, self._batch_spec = param_rules, batch_spec
    if inner_loop == "auto":
      inner_loop = "map" if workers.platform == "cpu" else "vmap"
    self._inner_loop = "vmap" if method.inner_grad is not None else inner_loop
    self._executables: dict[Any, Any] = {}
    self._evaluated: Callable | None = None
    self._rejoined: Callable | None = None
    self._traffic: dict[Any, tuple[float, float]] = {}
    mix1 = method.overlapped
    self._overlap = overlap
    self._static = mix1 is not None and mix1.varying and workers.placement.devices > 1

  # --- state ---------------------------------------------------------------------------------------------------------

  def init(self, params: PyTree) -> State:
    """State at round 0: every worker at `params` (arrays of any shape, floating-point), which are not consumed."""
    params = jax.tree.map(lambda x: self._workers.bring(strong(x)), params)
    check_params(params)
    shardings = self._state_shardings(params)
    z, inner_opt_state, ms = jax.jit(self._initial, out_shardings=shardings)(params)
    return State(z, inner_opt_state, ms, np.int32(0))

  def abstract_state(self, params: PyTree) -> State:
    """The shapes, dtypes and shardings of `init(params)`; `params` may be ShapeDtypeStructs. Allocates nothing."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    shapes = jax.eval_shape(self._initial, params)
    z, inner_opt_state, ms = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes,
                                          self._state_shardings(params))
    return State(z, inner_opt_state, ms, jax.ShapeDtypeStruct((), np.int32))

  def _initial(self, params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    stack = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(strong(x), (self._workers.count, *jnp.shape(x))), tree)
    return stack(params), stack(self._inner.optimizer.init(params)), stack(self.method_state(params))

  def method_state(self, params: PyTree) -> Any:
    """One worker's method state at the start, with what keeps outer updates exact where parameters are narrow."""
    wide = widened(params)
    ms = self.method.init(wide)
    if self._quarantine and isinstance(self.method, Fragmented):  # whether steps were thrown away since it last departed
      ms = tuple({**fs, "sick": jnp.zeros(jax.tree.leaves(fs["theta"])[0].shape[0], bool)} for fs in ms)
    if not (self.method.outer_steps and narrow(params)):
      return ms
    if isinstance(self.method, Fragmented):  # what rounding took from each fragment when it last arrived
      return tuple({**fs, "rounding": jax.tree.map(jnp.zeros_like, fs["theta"])} for fs in ms)
    return Originals(ms, wide)

  def _state_shardings(self, params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), params)
    specs = param_specs(shapes, self._param_rules)
    one = (shapes, jax.eval_shape(self._inner.optimizer.init, shapes), jax.eval_shape(self.method_state, shapes))
    return jax.tree.map(self._workers.stacked, like_params(one, shapes, specs, self._workers.inner_axes),
                        is_leaf=lambda x: isinstance(x, PartitionSpec))

  def eval_params(self, state: State, alive: Any = None) -> PyTree:
    """The parameters that the method's paper evaluates: the workers' mean unless the method says otherwise.

    `alive` [M] bool: the workers that count; None, or nobody: all.
    """
    refuse_consumed(state)
    alive = alive_mask(alive, self._workers.count)
    alive = alive if alive.any() else ~alive
    if self._evaluated is None:
      self._evaluated = jax.jit(lambda z, ms, alive: self.method.eval_params(z, ms, alive, self._weights))
    return self._evaluated(state.params, state.method_state, alive)

  def rejoin(self, state: State, worker: int, donor: int) -> State:
    """The state in which `worker`, back after rounds without it, has the donor's parameters and method state.

    Its inner optimizer's numbers are as at the start (where gradients are averaged in every step: the donor's, or the
    workers would no longer be alike), and its counts the donor's. The old state is donated.
    """
    refuse_consumed(state)
    for name, index in (("worker", worker), ("donor", donor)):
      if not 0 <= index < self._workers.count:
        raise ValueError(f"{name}={index} must be a worker from 0 to {self._workers.count - 1}.")
    if self._rejoined is None:
      fresh = self._fresh if self.method.inner_grad is None else None
      self._rejoined = jax.jit(rejoin_program(self._workers, fresh), donate_argnums=(0, 1, 2),
                               out_shardings=host.shardings(self._shapes(state, {})[:3]))
    z, inner_opt_state, ms = self._rejoined(*self._bring(state)[:3], np.int32(worker), np.int32(donor))
    return State(z, inner_opt_state, ms, state.round)

  def _fresh(self, z: PyTree) -> PyTree:
    """The inner optimizer's states at the start, for a stack of parameters."""
    return self._workers.each(self._inner.optimizer.init, z)

  # --- one round -----------------------------------------------------------------------------------------------------

  def __call__(self, state: State, batches: PyTree, alive: Any = None, measured: bool = True,
               links: Mapping[str, Any] | None = None) -> tuple[State, dict[str, Any]]:
    """One round; see the class."""
    if not isinstance(state, State):
      raise ValueError(f"round_fn takes the State that init or an earlier round returned, not {type(state).__name__}.")
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
      raise ValueError("A round is one compiled program and cannot run under jax.disable_jit(); debug loss_fn by itself.")
    refuse_consumed(state)
    self._check(state.params, batches)
    r = int(state.round)
    alive = alive_mask(alive, self._workers.count)
    if links is not None and not self._faults:
      raise ValueError("links were given to a round that was built without them; pass faults=True to build_round.")
    tables = link_tables(self.method, links) if self._faults else None
    measured = measured and bool(self._measure)
    state = self._bring(state)
    executables = self.compile(state, batches, measured=(measured,))
    run = executables[measured, self._permutation(r)]
    batches = self._workers.put(batches, self._batch_sharding())
    scalars = self._workers.put(self._scalars(r, alive, tables), self._workers.replicated())
    z, inner_opt_state, ms, metrics = run(*state[:3], batches, scalars)
    metrics["bytes_overlapped"], metrics["bytes_blocking"] = self.traffic(state.params, batches)
    return State(z, inner_opt_state, ms, np.int32(r + 1)), metrics

  def from_local(self, batches: PyTree) -> PyTree:
    """`batches` for a round from leaves [len(workers.local), H, ...] that hold only this process's workers."""
    return self._workers.from_local(batches, self._batch_sharding())

  def compile(self, state: State, batches: PyTree, measured: Sequence[bool] = (False, True)) -> dict[Any, Any]:
    """Compiles every executable that rounds on these shapes can need, once; returns them by (measured, permutation).

    Args:
      state, batches: arrays or ShapeDtypeStructs.
      measured: which kinds of round will be asked for.
    """
    shapes = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves((state[:3], batches)))
    known = self._executables.setdefault((shapes, jax.tree.structure((state[:3], batches))), {})
    bank = range(len(self.method.mix1.topology.bank)) if self._static else [None]  # type: ignore[attr-defined]
    wanted = list(itertools.product({m and bool(self._measure) for m in measured}, bank))
    for number, (kind, permutation) in enumerate(wanted, 1):
      if (kind, permutation) not in known:
        if len(wanted) > 2:
          logging.info("Compiling executable %d of %d: one for each permutation of Mix1.", number, len(wanted))
        known[kind, permutation] = self._compiled(state, batches, kind, permutation)
    return known

  def plan(self, batches: PyTree) -> overlap_forms.Plan:
    """The form of overlap and the XLA options for rounds on batches of this shape."""
    return overlap_forms.plan(self._overlap, self.method, self._workers, jax.tree.leaves(batches)[0].shape[1])

  def lower(self, state: State, batches: PyTree, measured: bool = True) -> jax.stages.Lowered:
    """The jax Lowered of the round that `state.round` (0 when abstract) would run; arrays or ShapeDtypeStructs.

    Places nothing on a device, so it also serves meshes of devices that are not there. Compile it with
    `compiler_options=round_fn.plan(batches).options` to get what a round runs; the host form is lowered as one program.
    """
    self._check(state.params, batches)
    r = 0 if isinstance(state.round, jax.ShapeDtypeStruct) else int(state.round)
    return self._lower(state, batches, measured and bool(self._measure), self._permutation(r))

  def traffic(self, params: PyTree, batches: PyTree) -> tuple[float, float]:
    """(overlapped, blocking) bytes that one worker sends in a round, from the trees that the method hands to its mixers.

    Algorithmic: a ring all-reduce over M workers sends 2 (M-1)/M of the tree, a permutation the tree once.
    """
    steps = jax.tree.leaves(batches)[0].shape[1]
    key = (tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(params)), steps)
    if key not in self._traffic:
      self._traffic[key] = self._count_traffic(params, steps)
    return self._traffic[key]

  def launched(self, params: PyTree) -> PyTree:
    """Shapes of what a worker with `params` hands to Mix1 in a round; None where nothing travels, or fragments do."""
    if self.method.overlapped is None or isinstance(self.method, Fragmented):
      return None
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return jax.eval_shape(self._launch_one, shapes, jax.eval_shape(self.method_state, shapes))

  def _count_traffic(self, params: PyTree, steps: int) -> tuple[float, float]:
    z = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
    ms, mix1 = jax.eval_shape(self.method_state, z), self.method.overlapped
    per_round: list[float] = []
    per_step: list[float] = []
    scalars = jax.tree.map(jnp.asarray, self._scalars(0, np.ones(self._workers.count, bool)))
    context = lambda record: self._context(scalars, jnp.zeros(self._workers.placement.slots, jnp.int32), None)._replace(
        worker=jnp.int32(0), sent=record)
    if isinstance(self.method, Fragmented):
      parts = self.method.partition(jax.eval_shape(widened, z))
      depart = lambda fs, w: self.method.depart(w, jax.tree.map(lambda x: x[0], fs), context([]))[0]
      sent = [jax.eval_shape(depart, ms[parts.place(p)[0]], parts.shape(p)) for p in range(parts.count)]
      total = sum(self.method.mix1.bytes_sent(payload) for payload in sent)
      return (0.0, total) if mix1 is None else (total, 0.0)
    sent = self.launched(z)
    jax.eval_shape(lambda z, ms, x: self._land_one(z, z, x, ms, context(per_round)), z, ms, sent)
    if self.method.inner_grad is not None:
      jax.eval_shape(lambda g: self.method.inner_grad(g, context(per_step)), z)
    return (0.0 if mix1 is None else mix1.bytes_sent(sent)), sum(per_round) + steps * sum(per_step)

  # --- programs ------------------------------------------------------------------------------------------------------

  def _lower(self, state, batches, measured: bool, permutation: int | None) -> jax.stages.Lowered:
    """The round as one program."""
    plan = self.plan(batches)

    def run(z, inner_opt_state, ms, batches, scalars):
      body = lambda *local: self._body(*local, plan, permutation)
      ids = jnp.arange(self._workers.count, dtype=jnp.int32)
      new_z, inner_opt_state, new_ms, w, metrics = self._workers.spmd(body, stacks=5)(
          z, inner_opt_state, ms, batches, ids, scalars)
      return new_z, inner_opt_state, new_ms, metrics | self._measures(w, new_z, measured)

    z, opt, ms, data, scalars = self._shapes(state, batches)
    return jax.jit(run, out_shardings=(*host.shardings((z, opt, ms)), None), donate_argnums=(0, 1, 2)).lower(
        z, opt, ms, data, scalars)

  def _compiled(self, state, batches, measured: bool, permutation: int | None) -> Callable:
    """An executable (z, inner_opt_state, ms, batches, scalars) -> (z, inner_opt_state, ms, metrics)."""
    plan = self.plan(batches)
    if plan.form != "host":
      return self._lower(state, batches, measured, permutation).compile(compiler_options=plan.options or None)
    spmd, ids = self._workers.spmd, lambda: jnp.arange(self._workers.count, dtype=jnp.int32)

    def start(z, ms, scalars):
      body = lambda z, ms, ids, scalars: one_row(self._start(z, ms, ids, scalars, plan, permutation))
      return spmd(body, stacks=3)(z, ms, ids(), scalars)

    def inner(z, opt, batches, scalars):
      def body(z, opt, batches, ids, scalars):
        ctx = self._context(scalars, ids, permutation)
        phases = self._inner_phases(z, opt, batches, ids, scalars, None, ctx)
        w, new, metrics = self._examined(z, *phases[:3], ids)
        return w, self._down(ids, scalars, new, opt), metrics

      return spmd(body, stacks=4)(z, opt, batches, ids(), scalars)

    def land(z, w, ms, raw, metrics, scalars):
      body = lambda z, w, ms, raw, metrics, ids, scalars: self._land(z, w, ms, only_row(raw), metrics, ids, scalars, plan,
                                                                     permutation)
      new_z, new_ms, metrics = spmd(body, stacks=6)(z, w, ms, raw, metrics, ids(), scalars)
      return new_z, new_ms, metrics | self._measures(w, new_z, measured)

    return host.compile_stages(None if self.method.overlapped is None else start, inner, land, *self._shapes(state, batches))

  def _shapes(self, state, batches) -> tuple[Any, ...]:
    """ShapeDtypeStructs with shardings of a program's arguments: z, inner_opt_state, ms, batches, scalars."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params)
    described = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    scalars = self._scalars(0, np.ones(self._workers.count, bool))
    return (*jax.tree.map(described, tuple(state[:3]), self._state_shardings(params)),
            jax.tree.map(lambda x: described(x, self._batch_sharding()), batches),
            jax.tree.map(lambda x: described(x, self._workers.replicated()), scalars))

  def _body(self, z, inner_opt_state, ms, batches, ids, scalars, plan, permutation):
    """One round on a slot's local stacks [K, ...]; returns z', inner_opt_state, ms', w, metrics."""
    ctx = self._context(scalars, ids, permutation)._replace(ring=plan.ring)
    if isinstance(self.method, Fragmented):
      mix_context = lambda sent, ctx: self._mix1_context(sent, z, ids, scalars, plan, permutation)._replace(
          event=ctx.event, healthy=ctx.healthy)
      cycle = Cycle(self.method, self._inner, self._workers, self._inner_loop, ctx, mix_context, plan.form == "ring",
                    jax.tree.leaves(batches)[0].shape[1], self._fresh if self._quarantine else None)
      *new, w, metrics = cycle.run(z, inner_opt_state, ms, batches)
      if self._quarantine:
        metrics["quarantine"] = jnp.where(ctx.alive[ids], metrics["quarantine"], 0)
      return *self._down(ids, scalars, tuple(new), (z, inner_opt_state, ms)), w, metrics
    raw = riding = None
    if self.method.overlapped is not None:
      raw = self._start(z, ms, ids, scalars, plan, permutation)
      riding = one_row(raw) if plan.form == "ring" else None
    w, opt, metrics, riding = self._inner_phases(z, inner_opt_state, batches, ids, scalars, riding, ctx)
    if raw is not None:
      raw = raw if riding is None else only_row(riding)
      if self._quarantine:  # looking at what is not behind the barrier would draw the transfer behind the loop
        (w, opt, metrics), raw = lax.optimization_barrier(((w, opt, metrics), raw))
      else:
        w, raw = lax.optimization_barrier((w, raw))
    w, opt, metrics = self._examined(z, w, opt, metrics, ids)
    z, ms, metrics = self._land(z, w, ms, raw, metrics, ids, scalars, plan, permutation)
    return z, self._down(ids, scalars, opt, inner_opt_state), ms, w, metrics

  def _start(self, z, ms, ids, scalars, plan, permutation):
    """Mix1's collectives."""
    sent = self._workers.each(self._launch_one, z, ms)
    return self.method.overlapped.start(sent, self._mix1_context(sent, z, ids, scalars, plan, permutation))

  def _inner_phases(self, z, inner_opt_state, batches, ids, scalars, riding, ctx):
    """w, inner_opt_state, metrics and what rode in the inner steps."""
    steps = jax.tree.leaves(batches)[0].shape[1]
    w, opt, loss, aux, riding = self._workers.each(lambda *one: self._inner.phase(*one, ctx, 0, steps), z, inner_opt_state,
                                                   batches, ids, riding, how=self._inner_loop)
    return w, opt, {"loss": loss} if aux is None else {"loss": loss, "aux": aux}, riding

  def _examined(self, z, w, opt, metrics, ids):
    """w, inner_opt_state and metrics, without the steps of sick workers."""
    if not self._quarantine:
      return w, opt, metrics
    loss, limits = metrics["loss"], self.method.inner_steps
    if limits is not None:  # of steps that are not taken the loss does not matter
      taken = jnp.arange(loss.shape[1]) < jnp.asarray(limits)[ids][:, None]
      loss = jnp.where(taken, loss, 0)
    w, opt, cause = examine(z, w, opt, loss, self._fresh, self.method.inner_grad is not None)
    return w, opt, {**metrics, "quarantine": cause}

  def _down(self, ids, scalars, new, old):
    """Workers that are down keep their whole state."""
    return where_rows(scalars["alive"][ids], new, old) if self._faults else new

  def _land(self, z, w, ms, raw, metrics, ids, scalars, plan, permutation):
    """What follows the inner steps: Mix1's arithmetic, blocking exchanges, the outer step."""
    x = None
    if raw is not None:
      sent = self._workers.each(self._launch_one, z, ms)
      x = self.method.overlapped.finish(raw, sent, self._mix1_context(sent, z, ids, scalars, plan, permutation))
    ctx, cause = self._context(scalars, ids, permutation), metrics.get("quarantine")
    land = lambda z, w, x, ms, worker, healthy: self._land_one(z, w, x, ms, ctx._replace(worker=worker, healthy=healthy))
    new = self._workers.each(land, z, w, x, ms, ids, None if cause is None else cause == 0)
    if cause is not None:
      new, cause = landed(new, (z, ms), cause)
      metrics = {**metrics, "quarantine": jnp.where(ctx.alive[ids], cause, 0)}
    return *self._down(ids, scalars, new, (z, ms)), metrics

  def _launch_one(self, z, ms):
    """One worker's launch; parameters narrower than float32 are represented by their float32 originals."""
    return self.method.launch(ms.params, ms.method) if isinstance(ms, Originals) else self.method.launch(z, ms)

  def _land_one(self, z, w, x, ms, ctx):
    if not isinstance(ms, Originals):
      return self.method.land(z, w, x, ms, ctx)
    moved = jax.tree.map(lambda original, z, w: original - (z - w), ms.params, widened(z), widened(w))
    new, own = self.method.land(ms.params, moved, x, ms.method, ctx)
    return narrowed(new, z), Originals(own, new)

  def _measures(self, w, z, measured: bool) -> dict[str, Any]:
    measures: dict[str, Any] = {}
    for m in self._measure if measured else ():
      measures.update(consensus_distances(w, z) if m == "consensus" else m(w, z))
    return measures

  def _bring(self, state: State) -> State:
    """The state where the executables expect it; what lies on other devices is copied there."""
    here = self._workers.replicated().device_set
    if all(not isinstance(x, jax.Array) or x.sharding.device_set == here for x in jax.tree.leaves(state[:3])):
      return state
    shardings = self._state_shardings(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params))
    z, inner_opt_state, ms = jax.device_put(state[:3], shardings)
    return State(z, inner_opt_state, ms, state.round)

  # --- small parts ---------------------------------------------------------------------------------------------------

  def _context(self, scalars, ids, permutation: int | None) -> Context:
    choices = dict(scalars["choices"])
    if permutation is not None:
      choices["mix1"] = permutation
    weights = None if self._weights is None else jnp.asarray(self._weights)
    return Context(self._workers.placement, scalars["round"], ids, scalars["alive"], choices, weights=weights,
                   links=scalars.get("links"))

  def _mix1_context(self, sent, z, ids, scalars, plan, permutation) -> Context:
    """The context of Mix1's start and finish: with the form in which it travels."""
    ctx = self._context(scalars, ids, permutation)
    if not plan.packed:
      return ctx
    one = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    specs = like_params(one(sent), one(z), param_specs(one(z), self._param_rules), self._workers.inner_axes)
    leaves = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))[0]
    packing = Packing(self._workers.inner_axes, {path_of(path): spec for path, spec in leaves})
    return ctx._replace(packing=packing, ring=plan.ring)

  def _permutation(self, r: int) -> int | None:
    return self.method.mix1.topology.choice(r) if self._static else None  # type: ignore[attr-defined]

  def _scalars(self, r: int, alive: np.ndarray, tables: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    """The small inputs of a round; draws of the mixers are made on the host."""
    choices = {m.key: np.int32(m.topology.choice(r)) for m in self.method.bound_mixers()}
    scalars = {"round": np.int32(r), "alive": alive, "choices": choices}
    if self._faults:
      scalars["links"] = link_tables(self.method, None) if tables is None else tables
    return scalars

  def _batch_sharding(self):
    return self._workers.stacked(PartitionSpec(None, *self._batch_spec) if self._batch_spec else PartitionSpec())

  def _check(self, params: PyTree, batches: PyTree) -> None:
    check_round(self.method, params, batches, self._workers.count, self._accumulate)
