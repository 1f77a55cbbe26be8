"""The compiled computations of a learner: inner steps, contributions, blending; on one device or a mesh of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from fgd_jax import config as configs
from fgd_jax import models, sharding
from fgd_jax.decoupled.merging import Tree, partition
from fgd_jax.decoupled.options import Options, schedule_config
from fgd_jax.inner import Inner
from fgd_jax.methods import make as make_method
from fgd_jax.methods.base import narrowed, widened
from fgd_jax.mixing import Context, Placement
from fgd_jax.mixing.codec import make_codec

PyTree = Any


def make_model(config: ConfigDict, vocab_size: int) -> tuple[models.Model, Any]:
  """The model and the shapes of its parameters."""
  model = models.make(configs.make_model_config(config, vocab_size))
  return model, jax.eval_shape(model.init, jax.random.key(config.seed))


def make_programs(config: ConfigDict, options: Options, vocab_size: int) -> Programs:
  """The compiled computations of a learner, on the devices of this process.

  Raises:
    ValueError: too few devices, or only CPU where allow_cpu is False.
  """
  if jax.devices()[0].platform == "cpu" and not config.allow_cpu:
    raise ValueError("allow_cpu=False and a learner found no accelerator, only CPU; set decoupled.resources, such as "
                     "'GPU=1', so that Ray gives it one, or set allow_cpu=True.")
  model, shapes = make_model(config, vocab_size)
  inside = config.mesh.fsdp * config.mesh.tensor
  mesh = sharding.make_mesh(jax.devices()[:inside], 1, config.mesh.fsdp, config.mesh.tensor) if inside > 1 else None
  return Programs(options, shapes, model.loss, configs.make_inner_optimizer(schedule_config(config)), config.accumulate,
                  config.seed, mesh, **sharding.inside_worker(mesh))


class Programs:
  """The compiled computations of learners.

  Args:
    options: of the run.
    params: shapes of the model's parameters.
    loss_fn, optimizer, accumulate, seed: as in `fgd_jax.build_round`.
    mesh: over the learner's own devices (axes worker = 1, fsdp, tensor), None for one device.
    param_sharding, batch_sharding: as in `fgd_jax.build_round`.
  """

  def __init__(self, options: Options, params: PyTree, loss_fn: Callable, optimizer: optax.GradientTransformation,
               accumulate: int = 1, seed: int = 0, mesh: Mesh | None = None, param_sharding: sharding.Rules = (),
               batch_sharding: PartitionSpec = PartitionSpec()):
    self.options, self.params, self.mesh = options, params, mesh
    self.fragments = partition(options, params)
    self.optimizer = optimizer
    self._codec = make_codec(options.outer.codec)
    self._seed = seed
    inner = Inner(loss_fn, optimizer, accumulate, seed, make_method("local").bind(1, seed))
    context = Context(Placement(1), jnp.int32(0), jnp.zeros(1, jnp.int32), jnp.ones(1, bool), {})

    def step(w, opt, batch, learner, n):
      one = jax.tree.map(lambda x: x[None], batch)
      w, opt, loss, _, _ = inner.phase(w, opt, one, learner, None, context._replace(round=n), 0, 1)
      return w, opt, loss[0]

    state = jax.eval_shape(optimizer.init, params)
    places: dict[str, Any] = {}
    self._w_place = self._opt_place = None
    self._place = lambda tree: None
    if mesh is not None:
      specs = sharding.param_specs(params, param_sharding)
      self._place = lambda tree: jax.tree.map(lambda spec: NamedSharding(mesh, spec), sharding.like_params(
          tree, params, specs, dict(mesh.shape)), is_leaf=lambda x: isinstance(x, PartitionSpec))
      self._w_place, self._opt_place = self._place(params), self._place(state)
      everywhere = NamedSharding(mesh, PartitionSpec())
      batch_place = NamedSharding(mesh, batch_sharding)
      places = {"in_shardings": (self._w_place, self._opt_place, batch_place, everywhere, everywhere),
                "out_shardings": (self._w_place, self._opt_place, everywhere)}
    self._step = jax.jit(step, donate_argnums=(0, 1), **places)
    opt_out: dict[str, Any] = {} if mesh is None else {"out_shardings": self._opt_place}
    self._init = jax.jit(optimizer.init, **opt_out)
    out: dict[str, Any] = {} if mesh is None else {"out_shardings": self._w_place}
    self._blend = jax.jit(self._blended, static_argnums=0, **out)
    self._assemble = jax.jit(self._assembled, **out)
    self.delta = jax.jit(self._delta, static_argnums=0)

  def step(self, w: PyTree, opt: PyTree, batch: PyTree, learner: int, n: int) -> tuple[PyTree, PyTree, jax.Array]:
    """One inner step; w and opt are donated."""
    args = (w, opt, batch, np.int32(learner), np.int32(n))
    if self.mesh is None:
      return self._step(*args)
    with jax.set_mesh(self.mesh):
      return self._step(*args)

  def fresh_optimizer(self, w: PyTree, n: int) -> PyTree:
    """An inner optimizer state without memory whose schedules stand at inner step n."""
    count = lambda s: s._replace(count=jnp.asarray(n, s.count.dtype)) if isinstance(s, optax.ScaleByScheduleState) else s
    return jax.tree.map(count, self._init(w), is_leaf=lambda s: isinstance(s, optax.ScaleByScheduleState))

  def place(self, w: PyTree, opt: PyTree) -> tuple[PyTree, PyTree]:
    """Host arrays as a learner's state, where it lives."""
    copy = lambda tree: jax.tree.map(jnp.array, tree)  # the first step donates them
    if self.mesh is None:
      return copy(w), copy(opt)
    return jax.device_put(copy(w), self._w_place), jax.device_put(copy(opt), self._opt_place)

  def assemble(self, fragments: Mapping[int, Tree]) -> PyTree:
    """Parameters from all fragments."""
    return self._assemble([dict(fragments[p]) for p in range(self.options.fragments)])

  def _assembled(self, fragments):
    w = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.params)
    for p, fragment in enumerate(fragments):
      w = self.fragments.put(w, p, narrowed(fragment, self.fragments.shape(p)))
    return w

  def anchor(self, p: int, fragment: Tree) -> Tree:
    """The global fragment as a learner can hold it: in the parameters' dtypes, so that their rounding is no progress."""
    narrow = jax.tree.map(lambda x, s: np.asarray(x).astype(s.dtype), dict(fragment), self.fragments.shape(p))
    return jax.device_put(narrow, self._place(narrow))

  def blend(self, p: int, w: PyTree, fragment: Tree, alpha: float) -> PyTree:
    """w_p <- alpha w_p + (1 - alpha) Theta_p."""
    return self._blend(p, w, fragment, float(alpha))

  def _blended(self, p, w, fragment, alpha):
    mine, theirs = widened(self.fragments.take(w, p)), widened(fragment)
    mixed = jax.tree.map(lambda a, b: jnp.where(alpha == 0, b, alpha * a + (1 - alpha) * b), mine, theirs)
    return self.fragments.put(w, p, narrowed(mixed, self.fragments.shape(p)))

  def _delta(self, p, w, anchor, error, learner, n):
    """(payload, error'): the encoded Delta = Theta_p - w_p, and what the codec lost of it where that is fed back."""
    delta = jax.tree.map(jnp.subtract, widened(anchor), widened(self.fragments.take(w, p)))
    if self._codec is None:
      return delta, error
    target = jax.tree.map(jnp.add, delta, error) if self.options.outer.feeds_back else delta
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self._seed), learner), n)
    keys = dict(zip(target, jax.random.split(key, len(target))))
    payload = {k: self._codec.encode(x, keys[k] if self._codec.stochastic else None) for k, x in target.items()}
    if self.options.outer.feeds_back:
      error = {k: x - self._codec.decode(payload[k], x) for k, x in target.items()}
    return payload, error

  def no_error(self, p: int) -> PyTree:
    """Error feedback's state of a fragment at the start."""
    shapes = jax.eval_shape(widened, self.fragments.shape(p))
    return {k: jnp.zeros(x.shape, x.dtype) for k, x in shapes.items()} if self.options.outer.feeds_back else ()
