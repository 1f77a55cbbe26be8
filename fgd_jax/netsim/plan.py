"""What a method exchanges in a round: when each payload departs, when it is needed, and how many bytes it has."""

from __future__ import annotations

import dataclasses
import runpy
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fgd_jax import methods
from fgd_jax.mixing import Mixer
from fgd_jax.mixing.codec import Codec
from fgd_jax.mixing.topology import Topology
from fgd_jax.netsim.links import Cost, cost

SUBSET_SHARE = 0.432  # embedding, head and two layers of the FGD paper's 1.5B model (arXiv 2606.22768)
MOST_WORKERS = 4096  # with so many the command takes some ten seconds


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
  """A method's round: its exchanges, for M workers that take H inner steps (worker m `own_steps[m]` of them, where set)."""

  method: str
  workers: int
  steps: int
  exchanges: tuple[Exchange, ...]
  own_steps: tuple[int, ...] | None = None

  @property
  def bytes_overlapped(self) -> float:
    """Bytes that one worker sends beside its inner steps, a round."""
    return sum(e.sent for e in self.exchanges if not e.blocking)

  @property
  def bytes_blocking(self) -> float:
    """Bytes that one worker sends while it waits, a round."""
    return sum(e.sent for e in self.exchanges if e.blocking)


def bits_of(codec: Codec | None, bits: float) -> float:
  """Bits that travel for each parameter: the codec's, with the scales of its blocks, or `bits` without one."""
  if codec is None:
    return bits
  size = 1 << 16
  return codec.nbytes(jax.ShapeDtypeStruct((size,), "float32")) * 8 / size


def make_plan(name: str, params: float, bits: float, workers: int, steps: int, subset_share: float = SUBSET_SHARE,
              kind: str | None = None, options: dict[str, Any] | None = None, seed: int = 0) -> Plan:
  """The plan of a method or preset by name, for a number of parameters.

  Args:
    params: of the model. bits: that travel for each of them where no codec compresses them.
    subset_share: share of the parameters that Mix2 covers in a method with a subset.
    kind: how means over workers travel (`links.KINDS`); None: in a ring, with a codec as an all-gather.
    options: of the method, such as fragments, delay and codec. seed: of the draws of its topologies.

  Raises:
    ValueError: one sentence.
  """
  for key, value, least, most in (("params", params, 1, 1e18), ("bits per parameter", bits, 1e-6, 1024),
                                  ("workers", workers, 1, MOST_WORKERS), ("inner_steps", steps, 1, 100_000)):
    if not least <= value <= most:
      raise ValueError(f"{key}={value:g} must be at least {least:g} and at most {most:g}.")
  if not 0 < subset_share <= 1:
    raise ValueError(f"subset_share={subset_share:g} must be above 0 and at most 1.")
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of learning rates, which do not matter here
    method = methods.make(name, **(options or {})).bind(workers, seed)
  sizes = [params]
  if isinstance(method, methods.Fragmented):
    method.check_steps(steps)
    sizes = [params / method.count] * method.count
  return Plan(name, workers, steps, _exchanges(method, sizes, bits, steps, kind, subset_share), _own_steps(method, steps))


def transfer_kind(kind: str | None, compressed: bool) -> str:
  """How a mean travels: as asked for, else as the round counts it: in a ring, or compressed as an all-gather of codes.

  Raises:
    ValueError: a kind that cannot carry a compressed mean.
  """
  if compressed and kind not in (None, "allgather"):
    raise ValueError(f"transfer={kind!r}: a mean with a codec is an all-gather of codes; leave transfer or the codec out.")
  return kind or ("allgather" if compressed else "ring")


def _exchanges(method: methods.Method, sizes: list[float], bits: float, steps: int, kind: str | None, share: float = 1.0
               ) -> tuple[Exchange, ...]:
  """The exchanges of a bound method.

  Args:
    sizes: parameters of its fragments, or of all. bits: that travel for each, where no codec compresses them.
    share: of the parameters in Mix2 of a method with a subset.
  """
  out = []

  def add(name: str, size: float, mixer: Mixer, start: int, due: int) -> None:
    out.append(Exchange(name, size * bits_of(mixer.codec, bits) / 8, mixer.topology, start, due, transfer_kind(
        kind if mixer.topology.bank[0].mean else None, mixer.codec is not None)))

  for field, mixer in zip(method.mixers, method.bound_mixers()):
    if mixer.topology.identity or mixer.topology.workers == 1:
      continue
    if isinstance(method, methods.Fragmented):
      for p, size in enumerate(sizes):
        start = p * (steps // method.count)
        add(f"fragment {p}", size, mixer, start, start + method.delay_of(steps))
    elif method.inner_grad is not None:
      for t in range(1, steps + 1):
        add(f"gradients {t}", sizes[0], mixer, t, t)
    else:
      covered = share if field == "mix2" and getattr(method, "subset", None) is not None else 1
      add(field, sizes[0] * covered, mixer, 0 if field == "mix1" else steps, steps)
  return tuple(out)


def _own_steps(method: methods.Method, steps: int) -> tuple[int, ...] | None:
  return None if method.inner_steps is None else tuple(min(n, steps) for n in method.inner_steps)


def load_config(text: str) -> Any:
  """The config of FILE or FILE:settings.

  Raises:
    ValueError: one sentence, whatever goes wrong while the file runs.
  """
  from fgd_jax.command import refuse_missing_file
  path, _, settings = text.partition(":")
  refuse_missing_file(text)
  try:
    found = runpy.run_path(path)
  except OSError as e:
    raise ValueError(f"config={path}: {e.strerror or e}.") from e
  except Exception as e:
    raise ValueError(f"config={path} is no Python file that runs: {type(e).__name__}: {e}.") from e
  if "get_config" not in found:
    raise ValueError(f"config={path}: the file defines no get_config.")
  try:
    config = found["get_config"](settings or None)
  except ValueError:
    raise  # a setting that the config refuses, in a sentence of its own
  except Exception as e:
    raise ValueError(f"config={path}: get_config({settings!r}) fails with {type(e).__name__}: {e}.") from e
  if not isinstance(config, ConfigDict):
    raise ValueError(f"config={path}: get_config returns no ConfigDict but {config!r}.")
  return config


def plan_of_method(name: str, method: methods.Method, workers: int, steps: int, traffic: tuple[float, float],
                   params: Any = None, kind: str | None = None) -> Plan:
  """The plan of a bound method, with the bytes that its round counts (dtypes, codecs, subsets and fragments by path).

  Args:
    name: that the plan shows. method: bound (`round_fn.method`). workers: M. steps: H.
    traffic: (overlapped, blocking) bytes that one worker sends in a round (`round_fn.traffic`).
    params: shapes of one worker's parameters, which only methods with fragments look at.
    kind: how means travel (`links.KINDS`); None: as the round counts them.

  Raises:
    ValueError: a kind that cannot carry compressed means.
  """
  sizes = [1.0]  # relative to each other: traffic knows the bytes
  if isinstance(method, methods.Fragmented):
    method.check_steps(steps)
    parts = method.partition(params)
    sizes = [float(sum(x.size for x in parts.shape(p).values())) for p in range(parts.count)]
  counted = _exchanges(method, sizes, 32, steps, None)
  nominal = {blocking: sum(e.sent for e in counted if e.blocking == blocking) for blocking in (False, True)}
  known = {False: traffic[0], True: traffic[1]}
  return Plan(name, workers, steps, tuple(
      dataclasses.replace(e, nbytes=e.nbytes * known[e.blocking] / nominal[e.blocking], kind=asked.kind)
      for e, asked in zip(counted, _exchanges(method, sizes, 32, steps, kind))), _own_steps(method, steps))


def plan_of_config(config: Any, kind: str | None = None) -> tuple[Plan, int]:
  """The plan of a training config and its number of parameters; no parameter is allocated.

  Raises:
    ValueError: a config that cannot be trained, or a kind that cannot carry compressed means.
  """
  import fgd_jax as fgd
  from fgd_jax import config as configs
  from fgd_jax import models

  configs.validate(config)
  model = models.make(configs.make_model_config(config, config.model.vocab_size or 256))  # without data: bytes
  _, round_fn = configs.build_round(config, model.loss, fgd.Workers(config.workers), overlap="auto")
  params = jax.eval_shape(model.init, jax.random.key(config.seed))
  tokens = jax.ShapeDtypeStruct((config.workers, config.inner_steps, config.batch_size, config.seq_len + 1), jnp.int32)
  traffic = round_fn.traffic(round_fn.abstract_state(params).params, {"tokens": tokens})
  plan = plan_of_method(config.method.name, round_fn.method, config.workers, config.inner_steps, traffic, params, kind)
  return plan, models.count_params(params)
