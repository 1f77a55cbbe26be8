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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax import lax
from jax.sharding import PartitionSpec

from fgd_jax import host
from fgd_jax import measure as measures
from fgd_jax import overlap as overlap_forms
from fgd_jax.inner import gradient
from fgd_jax.methods import Method
from fgd_jax.mixing import Context, path_of
from fgd_jax.mixing.pack import Packing
from fgd_jax.sharding import Rules, like_params, param_specs
from fgd_jax.workers import Workers

PyTree = Any
LossFn = Callable[..., Any]


class State(NamedTuple):
  """Everything a run is: leaves of all but `round` are [M, ...] and live on the devices.

  Attributes:
    params: the workers' parameters z.
    inner_opt_state: the inner optimizer's state of each worker; it survives across rounds.
    method_state: the method's own state (outer momentum, ...).
    round: completed rounds, a host NumPy int32.
  """

  params: PyTree
  inner_opt_state: PyTree
  method_state: PyTree
  round: Any


def build_round(method: Method, loss_fn: LossFn, inner_optimizer: optax.GradientTransformation, *, workers: Workers,
                seed: int = 0, measure: Sequence[Any] = (), accumulate: int = 1,
                worker_weights: Sequence[float] | None = None, param_sharding: Rules = (),
                batch_sharding: PartitionSpec = PartitionSpec(), inner_loop: str = "auto",
                overlap: str = "auto") -> tuple[Callable[[PyTree], State], "Round"]:
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

  Returns:
    init(params) -> State; every worker starts at `params`, which are not consumed.
    round_fn(state, batches, alive=None, measured=True) -> (State, metrics), see `Round`.

  Raises:
    ValueError: an impossible argument; the sentence names it.
  """
  if not isinstance(method, Method):
    raise ValueError(f"method={method!r}: pass fgd_jax.methods.make(name, ...).")
  if not (hasattr(inner_optimizer, "init") and hasattr(inner_optimizer, "update")):
    raise ValueError(f"inner_optimizer={inner_optimizer!r} must be an optax transform, such as optax.adamw(1e-3).")
  if not isinstance(workers, Workers):
    raise ValueError(f"workers={workers!r}: pass fgd_jax.Workers(count, mesh=None).")
  prng = jax.config.jax_default_prng_impl  # type: ignore[attr-defined]
  if prng != "threefry2x32":
    raise ValueError(f"jax_default_prng_impl={prng!r} gives different numbers under vmap than "
                     "in a loop, so placements would differ; use threefry2x32.")
  if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**63:
    raise ValueError(f"seed={seed!r} must be an integer from 0 to 2^63 - 1.")
  if accumulate < 1:
    raise ValueError(f"accumulate={accumulate}: at least one micro-batch is needed.")
  if inner_loop not in ("auto", "map", "vmap"):
    raise ValueError(f"inner_loop={inner_loop!r} must be 'auto', 'map' or 'vmap'.")
  measure = (measure,) if isinstance(measure, str) else measure
  for m in measure:
    if m != "consensus" and not callable(m):
      raise ValueError(f"measure={m!r} must be 'consensus' or a function (w, z) -> dict.")
  weights = None if worker_weights is None else _shares(worker_weights, workers.count)
  bound = method.bind(workers.count, int(seed))
  overlap_forms.plan(overlap, bound, workers, steps=2**31 - 1)  # refuses forms that no H makes possible
  round_fn = Round(bound, loss_fn, inner_optimizer, workers, int(seed), tuple(measure), accumulate, weights,
                   tuple(param_sharding), batch_sharding, inner_loop, overlap)
  return round_fn.init, round_fn


class Round:
  """round_fn(state, batches, alive=None, measured=True) -> (state, metrics).

  `batches` is a pytree of [M, H, ...] leaves; H is read off the shape. The old state is donated. `alive` [M] bool takes
  workers out of all exchanges of this round (they keep their own values). `metrics`: `loss` [M, H] and, where the loss
  has them, `aux` [M, H, ...], on the device; `bytes_overlapped`, `bytes_blocking`, bytes that one worker sends, on the
  host; the measures, if any, in a measured round. All executables of a batch shape are compiled in its first call.

  Attributes:
    method: the bound method; `method.mix1.matrix(r)` replays the run.
  """

  def __init__(self, method, loss_fn, inner_optimizer, workers, seed, measure, accumulate, weights, param_rules,
               batch_spec, inner_loop, overlap):
    self.method = method
    self._loss_fn, self._inner, self._workers, self._seed = loss_fn, inner_optimizer, workers, seed
    self._measure, self._accumulate, self._weights = measure, accumulate, weights
    self._param_rules, self._batch_spec = param_rules, batch_spec
    if inner_loop == "auto":
      inner_loop = "map" if workers.platform == "cpu" else "vmap"
    self._inner_loop = "vmap" if method.inner_grad is not None else inner_loop
    self._executables: dict[Any, Any] = {}
    self._traffic: dict[Any, tuple[float, float]] = {}
    mix1 = method.overlapped
    self._overlap = overlap
    self._static = mix1 is not None and mix1.varying and workers.placement.devices > 1

  # --- state ---------------------------------------------------------------------------------------------------------

  def init(self, params: PyTree) -> State:
    """State at round 0: every worker at `params` (arrays of any shape, floating-point), which are not consumed."""
    params = jax.tree.map(lambda x: self._workers.bring(_strong(x)), params)
    _check_params(params)
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
    stack = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(_strong(x), (self._workers.count, *jnp.shape(x))), tree)
    return stack(params), stack(self._inner.init(params)), stack(self.method.init(params))

  def _state_shardings(self, params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), params)
    specs = param_specs(shapes, self._param_rules)
    one = (shapes, jax.eval_shape(self._inner.init, shapes), jax.eval_shape(self.method.init, shapes))
    return jax.tree.map(self._workers.stacked, like_params(one, shapes, specs),
                        is_leaf=lambda x: isinstance(x, PartitionSpec))

  def eval_params(self, state: State) -> PyTree:
    """The parameters that the method's paper evaluates: the workers' mean unless the method says otherwise."""
    return mean_params(state)

  # --- one round -----------------------------------------------------------------------------------------------------

  def __call__(self, state: State, batches: PyTree, alive: Any = None, measured: bool = True
               ) -> tuple[State, dict[str, Any]]:
    """One round; see the class."""
    if not isinstance(state, State):
      raise ValueError(f"round_fn takes the State that init or an earlier round returned, not {type(state).__name__}.")
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
      raise ValueError("A round is one compiled program and cannot run under jax.disable_jit(); debug loss_fn by itself.")
    _refuse_consumed(state)
    self._check(state.params, batches)
    r = int(state.round)
    alive = np.ones(self._workers.count, bool) if alive is None else np.asarray(alive)
    if alive.shape != (self._workers.count,) or not np.isin(alive, (0, 1)).all():
      raise ValueError(f"alive={alive.tolist()} must hold True or False for each of the {self._workers.count} workers.")
    alive = alive.astype(bool)
    measured = measured and bool(self._measure)
    state = self._bring(state)
    executables = self.compile(state, batches, measured=(measured,))
    run = executables[measured, self._permutation(r)]
    batches = self._workers.put(batches, self._batch_sharding())
    scalars = self._workers.put(self._scalars(r, alive), self._workers.replicated())
    z, inner_opt_state, ms, metrics = run(*state[:3], batches, scalars)
    metrics["bytes_overlapped"], metrics["bytes_blocking"] = self.traffic(state.params, batches)
    return State(z, inner_opt_state, ms, np.int32(r + 1)), metrics

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

  def _count_traffic(self, params: PyTree, steps: int) -> tuple[float, float]:
    z = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
    ms = jax.eval_shape(self.method.init, z)
    mix1 = self.method.overlapped
    sent = None if mix1 is None else jax.eval_shape(self.method.launch, z, ms)
    per_round: list = []
    per_step: list = []
    context = lambda record: self._context(
        self._scalars(0, np.ones(self._workers.count, bool)), jnp.zeros(self._workers.placement.slots, jnp.int32), None
    )._replace(worker=jnp.zeros((), jnp.int32), sent=record)
    jax.eval_shape(lambda z, ms, x: self.method.land(z, z, x, ms, context(per_round)), z, ms, sent)
    if self.method.inner_grad is not None:
      jax.eval_shape(lambda g: self.method.inner_grad(g, context(per_step)), z)
    blocking = sum(m.bytes_sent(t) for m, t in per_round) + steps * sum(m.bytes_sent(t) for m, t in per_step)
    return (0.0 if mix1 is None else mix1.bytes_sent(sent)), blocking

  # --- programs ------------------------------------------------------------------------------------------------------

  def _lower(self, state, batches, measured: bool, permutation: int | None) -> jax.stages.Lowered:
    """The round as one program."""
    plan = self.plan(batches)

    def run(z, inner_opt_state, ms, batches, scalars):
      body = lambda *local: self._body(*local, plan, permutation)
      ids = jnp.arange(self._workers.count, dtype=jnp.int32)
      new_z, inner_opt_state, new_ms, w, loss, aux = self._workers.spmd(body, stacks=5)(
          z, inner_opt_state, ms, batches, ids, scalars)
      metrics = {"loss": loss} if aux is None else {"loss": loss, "aux": aux}
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
      body = lambda z, ms, ids, scalars: _stacked(self._start(z, ms, ids, scalars, plan, permutation))
      return spmd(body, stacks=3)(z, ms, ids(), scalars)

    def inner(z, opt, batches, scalars):
      body = lambda *local: self._inner_phases(*local, None, self._context(local[-1], local[-2], permutation))[:4]
      return spmd(body, stacks=4)(z, opt, batches, ids(), scalars)

    def land(z, w, ms, raw, scalars):
      body = lambda z, w, ms, raw, ids, scalars: self._land(z, w, ms, _unstacked(raw), ids, scalars, plan, permutation)
      new_z, new_ms = spmd(body, stacks=5)(z, w, ms, raw, ids(), scalars)
      return new_z, new_ms, self._measures(w, new_z, measured)

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
    """One round on a slot's local stacks [K, ...]; returns z', inner_opt_state, ms', w, loss, aux."""
    ctx = self._context(scalars, ids, permutation)._replace(ring=plan.ring)
    raw = riding = None
    if self.method.overlapped is not None:
      raw = self._start(z, ms, ids, scalars, plan, permutation)
      riding = _stacked(raw) if plan.form == "ring" else None
    w, inner_opt_state, loss, aux, riding = self._inner_phases(z, inner_opt_state, batches, ids, scalars, riding, ctx)
    if raw is not None:
      w, raw = lax.optimization_barrier((w, raw if riding is None else _unstacked(riding)))
    z, ms = self._land(z, w, ms, raw, ids, scalars, plan, permutation)
    return z, inner_opt_state, ms, w, loss, aux

  def _start(self, z, ms, ids, scalars, plan, permutation):
    """Mix1's collectives."""
    sent = self._workers.each(self.method.launch, z, ms)
    return self.method.overlapped.start(sent, self._mix1_context(sent, z, ids, scalars, plan, permutation))

  def _inner_phases(self, z, inner_opt_state, batches, ids, scalars, riding, ctx):
    return self._workers.each(lambda *one: self._inner_phase(*one, ctx), z, inner_opt_state, batches, ids, riding,
                              how=self._inner_loop)

  def _land(self, z, w, ms, raw, ids, scalars, plan, permutation):
    """What follows the inner steps: Mix1's arithmetic, blocking exchanges, the outer step."""
    x = None
    if raw is not None:
      sent = self._workers.each(self.method.launch, z, ms)
      x = self.method.overlapped.finish(raw, sent, self._mix1_context(sent, z, ids, scalars, plan, permutation))
    ctx = self._context(scalars, ids, permutation)
    return self._workers.each(lambda z, w, x, ms, worker: self.method.land(z, w, x, ms, ctx._replace(worker=worker)),
                              z, w, x, ms, ids)

  def _measures(self, w, z, measured: bool) -> dict[str, Any]:
    measures: dict[str, Any] = {}
    for m in self._measure if measured else ():
      measures.update(_consensus(w, z) if m == "consensus" else m(w, z))
    return measures

  def _inner_phase(self, w, opt_state, batches_Hx, worker, riding, ctx: Context):
    """H inner steps of one worker: leaves of `batches_Hx` are [H, ...]; returns w, state, loss [H], aux [H, ...], riding.

    `riding`: what of Mix1 travels step by step (the ring form), or None.
    """
    method, ctx = self.method, ctx._replace(worker=worker)
    steps = jax.tree.leaves(batches_Hx)[0].shape[0]
    key = jax.random.fold_in(jax.random.key(self._seed), worker)

    def step(carry, xs):
      w, opt_state, riding = carry
      h, batch = xs
      rng = jax.random.fold_in(key, ctx.round * steps + h)
      loss, aux, grads = gradient(self._loss_fn, w, batch, rng, self._accumulate)
      if method.inner_grad is not None:
        grads = method.inner_grad(grads, ctx)
      updates, opt_state = self._inner.update(grads, opt_state, w)
      if riding is not None:
        riding = method.overlapped.during(riding, h, ctx)
      return (optax.apply_updates(w, updates), opt_state, riding), (loss, aux)

    with jax.named_scope("inner"):
      (w, opt_state, riding), (loss, aux) = lax.scan(step, (w, opt_state, riding),
                                                     (jnp.arange(steps, dtype=jnp.int32), batches_Hx))
    return w, opt_state, loss, aux, riding

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
    return Context(self._workers.placement, scalars["round"], ids, scalars["alive"], choices, weights=weights)

  def _mix1_context(self, sent, z, ids, scalars, plan, permutation) -> Context:
    """The context of Mix1's start and finish: with the form in which it travels."""
    ctx = self._context(scalars, ids, permutation)
    if not plan.packed:
      return ctx
    one = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    specs = like_params(one(sent), one(z), param_specs(one(z), self._param_rules))
    leaves = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))[0]
    packing = Packing(self._workers.inner_axes, {path_of(path): spec for path, spec in leaves})
    return ctx._replace(packing=packing, ring=plan.ring)

  def _permutation(self, r: int) -> int | None:
    return self.method.mix1.topology.choice(r) if self._static else None  # type: ignore[attr-defined]

  def _scalars(self, r: int, alive: np.ndarray) -> dict[str, Any]:
    """The small inputs of a round; draws of the mixers are made on the host."""
    choices = {m.key: np.int32(m.topology.choice(r)) for m in self.method.bound_mixers()}
    return {"round": np.int32(r), "alive": alive, "choices": choices}

  def _batch_sharding(self):
    return self._workers.stacked(PartitionSpec(None, *self._batch_spec) if self._batch_spec else PartitionSpec())

  def _check(self, params: PyTree, batches: PyTree) -> None:
    leaves = jax.tree_util.tree_flatten_with_path(batches)[0]
    if not leaves:
      raise ValueError("batches is empty; it needs leaves of shape [workers, inner steps, ...].")
    first = tuple(jnp.shape(leaves[0][1]))
    for path, x in leaves:
      shape = tuple(jnp.shape(x))
      if len(shape) < 2 or shape[0] != self._workers.count or shape[:2] != first[:2] or shape[1] < 1:
        raise ValueError(f"Batch leaf {path_of(path) or 'batches'!r} has shape {shape}; all leaves need the shape "
                         f"[workers={self._workers.count}, inner steps, ...] with the same number of inner steps.")
      if self._accumulate > 1 and (len(shape) < 3 or shape[2] % self._accumulate):
        raise ValueError(f"Batch leaf {path_of(path) or 'batches'!r} has shape {shape}; accumulate={self._accumulate} must "
                         "divide its third axis, the batch.")
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
      if x.shape[:1] != (self._workers.count,):
        raise ValueError(f"state.params/{path_of(path)} has shape {tuple(x.shape)} for {self._workers.count} workers; make "
                         "the state with the init that build_round returned together with this round.")


def _stacked(tree: PyTree) -> PyTree:
  """A leading axis of size 1, so that what differs from position to position can leave a program."""
  return jax.tree.map(lambda x: x[None], tree)


def _unstacked(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: x[0], tree)


@jax.jit
def _mean(stack: PyTree) -> PyTree:
  return jax.tree.map(lambda x: jnp.mean(x, axis=0).astype(x.dtype), stack)


def mean_params(state: State) -> PyTree:
  """The average model: one exact mean over the workers' parameters, without the worker axis."""
  _refuse_consumed(state)
  return _mean(state.params)


def _refuse_consumed(state: State) -> None:
  if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state[:3])):
    raise ValueError("This state was consumed by an earlier round (its buffers are donated); use the state that "
                     "round_fn returned, or restore a checkpoint if that round failed.")


def _consensus(w: PyTree, z: PyTree) -> dict[str, jax.Array]:
  return {"consensus_inner": measures.pairwise_squared_distance(w),
          "consensus_outer": measures.pairwise_squared_distance(z)}


def _strong(x: Any) -> Any:
  """The leaf as an array whose dtype does not yield to others (a weakly typed state would compile twice)."""
  if isinstance(x, jax.Array) and not x.weak_type:
    return x
  array = np.asarray(x) if not isinstance(x, jax.Array) else x
  wanted = jax.dtypes.canonicalize_dtype(array.dtype)
  if wanted != array.dtype and not np.isscalar(x):
    raise ValueError(f"A parameter has dtype {array.dtype}, which would become {wanted}; enable it with "
                     "jax.config.update('jax_enable_x64', True) or convert the parameters.")
  return jnp.asarray(array, dtype=wanted)


def _check_params(params: PyTree) -> None:
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  if not leaves:
    raise ValueError("params has no leaves; pass a pytree of floating-point arrays.")
  for path, x in leaves:
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f"Parameter {path_of(path)!r} has dtype {x.dtype}; parameters must be real floating-point. Keep "
                       "integers in the loss function's closure or in the batch.")


def _shares(weights: Sequence[float], workers: int) -> np.ndarray:
  """[M] weights scaled to sum M."""
  try:
    shares = np.asarray(weights, np.float64)
  except (TypeError, ValueError):
    shares = np.zeros(())
  if shares.shape != (workers,) or not np.all(np.isfinite(shares)) or np.any(shares <= 0):
    raise ValueError(f"worker_weights={list(weights)} must hold one positive number for each of the {workers} workers.")
  return shares * workers / shares.sum()
