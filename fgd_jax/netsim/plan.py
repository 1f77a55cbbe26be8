"""What a method exchanges in a round: when each payload departs, when it is needed, and how many bytes it has."""

from __future__ import annotations

import dataclasses
import runpy
import warnings
from typing import Any

from fgd_jax import methods
from fgd_jax.mixing import Mixer
from fgd_jax.mixing.codec import make_codec
from fgd_jax.mixing.topology import Topology
from fgd_jax.netsim.links import Cost, cost

SUBSET_SHARE = 0.432  # embedding, head and two layers of the FGD paper's 1.5B model (arXiv 2606.22768)


@dataclasses.dataclass(frozen=True)
class Exchange:
  """One exchange of a round.

  Attributes:
    name: what it is, unique within the round.
    nbytes: S, bytes of one worker's payload.
    topology: who exchanges with whom; a mean over all, or messages of S.
    start, due: inner steps after which it departs and is waited for; equal where it blocks.
    kind: how a mean travels (`links.cost`).
  """

  name: str
  nbytes: float
  topology: Topology
  start: int
  due: int
  kind: str = "ring"

  @property
  def blocking(self) -> bool:
    return self.start == self.due

  @property
  def mean(self) -> bool:
    """Whether it is a collective of all workers."""
    return self.topology.bank[0].mean

  @property
  def cost(self) -> Cost:
    """In multiples of `nbytes`: of the collective, or of the messages of the busiest worker."""
    if self.mean:
      return cost(self.kind, self.topology.workers)
    messages = max(p.messages() for p in self.topology.bank)
    return Cost(messages, messages, 1.0, 1)

  @property
  def sent(self) -> float:
    """Bytes that one worker sends."""
    return self.cost.sent * self.nbytes


@dataclasses.dataclass(frozen=True)
class Plan:
  """A method's round: its exchanges, for M workers that take H inner steps."""

  method: str
  workers: int
  steps: int
  exchanges: tuple[Exchange, ...]

  @property
  def bytes_overlapped(self) -> float:
    """Bytes that one worker sends beside its inner steps, a round."""
    return sum(e.sent for e in self.exchanges if not e.blocking)

  @property
  def bytes_blocking(self) -> float:
    """Bytes that one worker sends while it waits, a round."""
    return sum(e.sent for e in self.exchanges if e.blocking)


def bits_of(codec: str | None, bits: float) -> float:
  """Bits that travel for each parameter: the codec's, with the scales of its blocks, or `bits` without one."""
  made = make_codec(codec)
  if made is None:
    return bits
  import jax
  size = 1 << 16
  return made.nbytes(jax.ShapeDtypeStruct((size,), "float32")) * 8 / size


def make_plan(name: str, params: float, bits: float, workers: int, steps: int, subset_share: float = SUBSET_SHARE,
              kind: str = "ring", options: dict[str, Any] | None = None) -> Plan:
  """The plan of a method or preset by name, for a number of parameters.

  Args:
    params: of the model. bits: that travel for each of them.
    subset_share: share of the parameters that Mix2 covers in a preset with a subset.
    kind: how means over workers travel.
    options: of the method, such as fragments and delay.

  Raises:
    ValueError: one sentence.
  """
  for key, value, least in (("params", params, 1), ("bits per parameter", bits, 1e-6), ("workers", workers, 1),
                            ("inner_steps", steps, 1)):
    if not least <= value < float("inf"):
      raise ValueError(f"{key}={value:g} must be at least {least:g}.")
  if not 0 < subset_share <= 1:
    raise ValueError(f"subset_share={subset_share:g} must be above 0 and at most 1.")
  cost(kind, workers)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of learning rates, which do not matter here
    method = methods.make(name, **(options or {})).bind(workers)
  nbytes = params * bits / 8
  if isinstance(method, methods.Fragmented):
    method.check_steps(steps)
    sizes = [nbytes / method.count] * method.count
  else:
    sizes = [nbytes]
  return Plan(name, workers, steps, _exchanges(method, sizes, subset_share, steps, kind))


def _exchanges(method: methods.Method, sizes: list[float], share: float, steps: int, kind: str) -> tuple[Exchange, ...]:
  if isinstance(method, methods.Fragmented):
    apart, delay = steps // method.count, method.delay_of(steps)
    topology = method.mix1.topology
    out = [Exchange(f"fragment {p}", size, topology, p * apart, p * apart + delay, kind) for p, size in enumerate(sizes)]
  else:
    out = []
    for field in method.mixers:
      mixer = getattr(method, field)
      assert isinstance(mixer, Mixer)
      size = sizes[0] * (share if field == "mix2" and getattr(method, "subset", None) is not None else 1)
      if method.inner_grad is not None:
        out += [Exchange(f"gradients {t}", size, mixer.topology, t, t, kind) for t in range(1, steps + 1)]
      else:
        out.append(Exchange(field, size, mixer.topology, 0 if field == "mix1" else steps, steps, kind))
  return tuple(e for e in out if not e.topology.identity and e.topology.workers > 1)


def load_config(text: str) -> Any:
  """The config of FILE or FILE:settings.

  Raises:
    ValueError: one sentence.
  """
  path, _, settings = text.partition(":")
  try:
    return runpy.run_path(path)["get_config"](settings or None)
  except OSError as e:
    raise ValueError(f"config={path}: {e.strerror or e}.") from e
  except KeyError as e:
    raise ValueError(f"config={path}: the file defines no get_config.") from e


def plan_of_config(config: Any, kind: str = "ring") -> tuple[Plan, int]:
  """The plan of a training config and its number of parameters.

  Bytes are those that the round itself counts (`Round.traffic`: dtypes, codecs, subsets and fragments by path); no
  parameter is allocated. A compressed mean is an all-gather, as it is in training.

  Raises:
    ValueError: a config that cannot be trained.
  """
  import jax
  import jax.numpy as jnp

  import fgd_jax as fgd
  from fgd_jax import config as configs
  from fgd_jax import models

  configs.validate(config)
  model = models.make(configs.make_model_config(config, config.model.vocab_size or 256))  # without data: bytes
  method = configs.make_method(config)
  _, round_fn = fgd.build_round(method, model.loss, configs.make_inner_optimizer(config),
                                workers=fgd.Workers(config.workers), seed=config.seed)
  params = jax.eval_shape(model.init, jax.random.key(config.seed))
  tokens = jax.ShapeDtypeStruct((config.workers, config.inner_steps, config.batch_size, config.seq_len + 1), jnp.int32)
  overlapped, blocking = round_fn.traffic(round_fn.abstract_state(params).params, {"tokens": tokens})
  bound, count = round_fn.method, models.count_params(params)
  sizes = [4.0 * count]
  if isinstance(bound, methods.Fragmented):
    bound.check_steps(config.inner_steps)
    parts = bound.partition(params)
    sizes = [4.0 * sum(x.size for x in parts.shape(p).values()) for p in range(parts.count)]
  if any(getattr(bound, field).codec is not None for field in bound.mixers):
    kind = "allgather"
  plan = Plan(config.method.name, config.workers, config.inner_steps,
              _exchanges(bound, sizes, SUBSET_SHARE, config.inner_steps, kind))
  if kind == "ring":
    known = {False: overlapped, True: blocking}
  else:  # the round counts a ring: other ways of the same payload send other numbers of bytes
    as_counted = dataclasses.replace(plan, exchanges=tuple(
        dataclasses.replace(e, kind="ring" if kind != "allgather" else kind) for e in plan.exchanges))
    ratio = lambda mine, theirs: mine / theirs if theirs else 0.0
    known = {False: overlapped * ratio(plan.bytes_overlapped, as_counted.bytes_overlapped),
             True: blocking * ratio(plan.bytes_blocking, as_counted.bytes_blocking)}
  nominal = {False: plan.bytes_overlapped, True: plan.bytes_blocking}
  return dataclasses.replace(plan, exchanges=tuple(
      dataclasses.replace(e, nbytes=e.nbytes * known[e.blocking] / nominal[e.blocking]) for e in plan.exchanges)), count
