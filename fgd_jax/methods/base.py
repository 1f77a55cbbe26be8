"""The contract of a method: three pure functions for ONE worker; no scan, no placement, no barrier.

    init(z) -> ms                        the method's own state (outer optimizer, ...)
    launch(z, ms) -> tree                what Mix1 carries while the inner steps run
    land(z, w, x, ms, ctx) -> z', ms'    after them: z is where they started, w where they ended, x the mixed launch tree

The round (round.py) runs:  raw = mix1.start(launch(z, ms));  w = scan of H inner steps from z;  barrier;
x = mix1.finish(raw);  land.  A method with mix1 None launches nothing and gets x = None.

Methods that exchange fragments of the parameters in turn (fragmented.py) have depart and arrive instead of launch and land.
Parameters narrower than float32 reach launch, land, depart and arrive in float32 (round.py keeps the float32 originals), so
that an outer update below half of their last digit is not lost.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from fgd_jax.mixing import Context, Mixer
from fgd_jax.mixing import make as make_mixer
from fgd_jax.mixing.codec import make_codec
from fgd_jax.mixing.stacks import where_rows
from fgd_jax.outer import nesterov

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Method:
  """Base of all methods. Fields hold names of topologies until `bind` makes mixers that know the workers.

  Attributes of a subclass:
    mixers: names of its fields that hold a mixer; "mix1" is the overlapped one, all others block.
    inner_grad: None, or a function (grads, ctx) -> grads applied in every inner step (data_parallel only).
    outer_steps: False where z' is w itself, so that no float32 originals of narrower parameters are kept.
    inner_steps: steps that each worker takes of a round's H; None: all.
  """

  mixers: ClassVar[tuple[str, ...]] = ()
  inner_grad: ClassVar[Callable[..., PyTree] | None] = None
  outer_steps: ClassVar[bool] = True
  inner_steps: ClassVar[Sequence[int] | None] = None

  def __getstate__(self) -> dict[str, Any]:
    """Fields alone: what is derived from them (optax closures) cannot be pickled and is made again."""
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

  def init(self, z: PyTree) -> PyTree:
    """The method's state for one worker that starts at parameters z."""
    return ()

  def launch(self, z: PyTree, ms: PyTree) -> PyTree:
    """The tree that Mix1 carries during the inner steps."""
    return z

  def land(self, z: PyTree, w: PyTree, x: PyTree, ms: PyTree, ctx: Context) -> tuple[PyTree, PyTree]:
    """The outer step; blocking exchanges happen here, by calling a mixer with ctx."""
    raise TypeError(f"{type(self).__name__} does not define land.")

  def mean_moved(self, ms: PyTree, jump: PyTree) -> PyTree:
    """One worker's state after workers have left, which moved the mean of all workers' parameters by `jump`."""
    return ms

  def eval_params(self, z: PyTree, ms: PyTree, alive: jax.Array, weights: Any = None) -> PyTree:
    """What the method's paper evaluates, from the stacks [M, ...] of all workers: the mean of those that are alive.

    Args:
      alive: bool [M]. weights: as in Context.
    """
    return mean_of(z, alive)

  def bind(self, workers: int, seed: int = 0) -> "Method":
    """The method that knows M: every topology becomes a `Mixer` with a random stream of its own."""
    return self.bind_mixers(workers, seed)

  def bind_mixers(self, workers: int, seed: int) -> Any:
    """`bind` without what subclasses add."""
    bound = {}
    for stream, field in enumerate(self.mixers):
      topology = getattr(self, field)
      if not isinstance(topology, Mixer):
        bound[field] = make_mixer(topology or "identity", workers=workers, seed=_stream_seed(seed, stream), key=field,
                                  codec=getattr(self, "codec", None))
    return dataclasses.replace(self, **bound)

  def bound_mixers(self) -> list[Mixer]:
    """All mixers of a bound method, the overlapped one first."""
    return [getattr(self, field) for field in self.mixers]

  @property
  def overlapped(self) -> Mixer | None:
    """The bound Mix1, None where nothing travels during the inner steps."""
    mixer = getattr(self, "mix1", None)
    return None if mixer is None or mixer.topology.identity else mixer


def topology_name(topology: Any) -> str | None:
  """The name of a topology given as a name, as (name, options) or as a mixer."""
  if isinstance(topology, Mixer):
    return topology.topology.name
  if topology is not None and not isinstance(topology, (str, tuple, list)):
    raise ValueError(f"A topology must be a name, or (name, options), not {topology!r}.")
  return topology if topology is None or isinstance(topology, str) else topology[0]


def _stream_seed(seed: int, stream: int) -> int:
  """Different, reproducible seeds for mix1, mix2, ... from one seed (splitmix64's odd constant, kept to 63 bits)."""
  return (seed * 0x9E3779B97F4A7C15 + stream + 1) & ((1 << 63) - 1)


@dataclasses.dataclass(frozen=True)
class Compressed(Method):
  """Options of methods whose exchanges can be compressed.

  Args:
    codec: how outer gradients are compressed on the wire (`fgd_jax.mixing.codec`): a name, or (name, options).
    error_feedback: what a codec loses is added to the next outer gradient; None: as is usual for the codec (only topk).
  """

  codec: Any = None
  error_feedback: bool | None = None

  def __post_init__(self):
    if make_codec(self.codec) is None and self.error_feedback:
      raise ValueError("error_feedback=True needs a codec, whose errors it feeds back; set codec, or leave it unset.")
    if self.error_feedback not in (None, True, False):
      raise ValueError(f"error_feedback={self.error_feedback!r} must be True, False or None.")

  @functools.cached_property
  def feeds_back(self) -> bool:
    """Whether there is a codec whose errors are fed back."""
    codec = make_codec(self.codec)
    return codec is not None and (codec.name == "topk" if self.error_feedback is None else self.error_feedback)

  def no_error(self, z: PyTree) -> PyTree:
    """Error feedback's state at the start: zeros like the outer gradient; nothing without it."""
    return jax.tree.map(jnp.zeros_like, z) if self.feeds_back else ()

  def refuse_coarse(self, why: str) -> None:
    """Parameters themselves can be sent in 8 bits and more.

    Raises:
      ValueError: a coarser codec; `why` ends the sentence's first half.
    """
    codec = make_codec(self.codec)
    if codec is not None and codec.name not in ("bf16", "int8"):
      raise ValueError(f"codec={codec.name!r} is too coarse for parameters, {why}")


@dataclasses.dataclass(frozen=True)
class Outer(Compressed):
  """Options of methods with an outer optimizer.

  Args:
    outer_lr, outer_momentum: of Nesterov SGD; lr may be an optax schedule over outer steps: rounds, or with fragments those
      of each fragment, whose first one comes after H inner steps. None: the method's default.
    outer: any optax transform instead.
    outer_clip: greatest global norm of the outer gradient that the outer optimizer gets; None: no clipping.
    codec, error_feedback: see `Compressed`.
  """

  defaults: ClassVar[tuple[float, float]] = (0.7, 0.9)  # DiLoCo's (arXiv 2311.08105)
  nesterov: ClassVar[Any] = True

  outer_lr: Any = None
  outer_momentum: float | None = None
  outer: Any = None
  outer_clip: float | None = None

  def __post_init__(self):
    super().__post_init__()
    self.optimizer  # bad values are refused here, not in the first round

  @functools.cached_property
  def optimizer(self) -> optax.GradientTransformation:
    """The outer optimizer."""
    if self.outer_clip is not None and not (isinstance(self.outer_clip, numbers.Real) and self.outer_clip > 0):
      raise ValueError(f"outer_clip={self.outer_clip!r} must be a positive number.")
    step = self.outer
    if step is None:
      step = nesterov(*self.lr_and_momentum, self.nesterov)
    elif self.outer_lr is not None or self.outer_momentum is not None:
      raise ValueError("outer= stands in place of outer_lr and outer_momentum; give one or the other.")
    elif not (hasattr(step, "init") and hasattr(step, "update")):
      raise ValueError(f"outer={step!r} must be an optax transform, such as optax.sgd(0.7, momentum=0.9, nesterov=True).")
    return step if self.outer_clip is None else optax.chain(optax.clip_by_global_norm(self.outer_clip), step)

  @property
  def lr_and_momentum(self) -> tuple[Any, float]:
    """Of Nesterov SGD, as given or by default."""
    lr, momentum = self.defaults
    return (lr if self.outer_lr is None else self.outer_lr,
            momentum if self.outer_momentum is None else self.outer_momentum)


def check_number(name: str, value: Any, below: float = float("inf"), why: str = "") -> None:
  """Refuses what is not a number from 0 to (not including) `below`.

  Raises:
    ValueError: naming `name`, and the reason for the limit.
  """
  if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
    raise ValueError(f"{name}={value!r} must be a finite number of at least 0.")
  if value >= below:
    raise ValueError(f"{name}={value!r} must be below {below:g}; {why}.")


def mean_of(stack: PyTree, alive: jax.Array) -> PyTree:
  """Leaves [M, ...] -> [...]: the mean over the workers that are alive (bool [M])."""
  count = jnp.maximum(jnp.sum(alive), 1)
  return jax.tree.map(lambda x: (jnp.sum(x, axis=0) / count).astype(x.dtype), where_rows(alive, stack, 0))


def widened(tree: PyTree) -> PyTree:
  """Floating leaves in float32 at least."""
  return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def narrowed(tree: PyTree, like: PyTree) -> PyTree:
  """Leaves in the dtypes of `like`."""
  return jax.tree.map(lambda x, l: x.astype(l.dtype), tree, like)


def exchanged(mixer: Mixer, delta: PyTree, error: PyTree, ctx: Context) -> tuple[PyTree, PyTree]:
  """A blocking exchange of outer gradients with error feedback where `error` is not ().

      target = delta + error;  error' = target - C(target), which the others did not see

  Returns:
    The mixed tree and error'.
  """
  if isinstance(error, tuple) and not error:
    return mixer(delta, ctx), ()
  target = jax.tree.map(jnp.add, delta, error)
  return mixer(target, ctx), unsent(mixer, target, ctx)


def unsent(mixer: Mixer, target: PyTree, ctx: Context) -> PyTree:
  """What of `target` its codec keeps back; nothing of it where the worker takes part in no exchange and uses it itself."""
  seen, heard = mixer.seen(target, ctx), mixer.heard(ctx)
  return jax.tree.map(lambda t, s: jnp.where(heard, t - s, 0).astype(t.dtype), target, seen)


def outer_gradient(z: PyTree, w: PyTree, ctx: Context) -> PyTree:
  """Delta = start - end of the inner phase, weighted by the worker's share where weights were given."""
  return ctx.weigh(jax.tree.map(jnp.subtract, z, w))


def outer_step(outer: optax.GradientTransformation, delta: PyTree, state: PyTree, start: PyTree
               ) -> tuple[PyTree, PyTree]:
  """One step of the outer optimizer from `start` with outer gradient `delta`."""
  updates, state = outer.update(delta, state, start)
  return optax.apply_updates(start, updates), state
