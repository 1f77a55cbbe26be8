"""What of a config the learners and the syncer of a run need, refused where it cannot work."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import optax
from ml_collections import ConfigDict

from fgd_jax import config as configs
from fgd_jax.checkpoint import refuse_other_config
from fgd_jax.default_config import get_config as default
from fgd_jax.methods.base import Outer
from fgd_jax.mixing.fragments import check_fragments
from fgd_jax.outer import delayed_nesterov
from fgd_jax.outer.merge import Aggregator, make_aggregator

POLICIES = ("decoupled", "delayed_nesterov", "async_mean")
# Keys that may differ between starts of one run, and between a learner that joins and the run: they say how long, with how
# many and how patiently, not what a learner or a merge computes. (`steps` also shapes a cosine schedule;
# with merges on arrival `learners` scales the outer step, and is not free.)
FREE_KEYS = ("learners", "quorum", "rounds", "eval_every", "measure_every", "decoupled.grace", "decoupled.grace_cap",
             "decoupled.silent_after", "decoupled.pace", "decoupled.resources", "decoupled.dylu", "checkpoint_every",
             "checkpoint_keep", "allow_cpu", "cpu_devices", "profile", "limits.start", "limits.stall", "resume.workers")
LEARNER_KEYS = ("decoupled.pace", "decoupled.resources", "allow_cpu")  # those of them that a learner has a use for
DYLU_LEAST = 5  # inner steps of a learner, however slow (arXiv 2401.09135)


@dataclasses.dataclass(frozen=True)
class Options:
  """Attributes:
    policy: "decoupled", or an asynchronous baseline that merges every contribution on arrival: "delayed_nesterov"
      (arXiv 2401.09135) or "async_mean".
    learners: M. quorum: K. steps: syncer steps of the run. inner_steps: H. fragments: P. syncers: S.
    shards: shares of the training data; the M of the run's first start.
    overlap: tau, in inner steps; 0: learners wait for what they contributed to. blend: alpha, weight of the local value.
    grace: gamma. grace_cap, silent_after, pace: seconds. dylu: whether slow learners take fewer inner steps.
    batch_tokens: tokens of a learner's batch.
    aggregator: merges the contributions. outer: codec, error feedback and outer optimizer.
  """

  policy: str
  learners: int
  quorum: int
  steps: int
  inner_steps: int
  fragments: int
  syncers: int
  shards: int
  overlap: int
  blend: float
  grace: float
  grace_cap: float
  silent_after: float
  pace: float
  dylu: bool
  batch_tokens: int
  aggregator: Aggregator
  outer: Outer

  @property
  def on_arrival(self) -> bool:
    """Whether every contribution is merged by itself, at once."""
    return self.policy != "decoupled"

  @property
  def waits(self) -> bool:
    """Whether a learner waits for the answer to its contribution."""
    return self.on_arrival or self.overlap == 0

  @property
  def interval(self) -> int:
    """h = H/P, inner steps between two fragments of a learner."""
    return self.inner_steps // self.fragments

  def fragment(self, t: int) -> int:
    """The fragment of syncer step t, which counts from 1: p = (t - 1) mod P."""
    return (t - 1) % self.fragments

  def syncer_of(self, p: int) -> int:
    """The syncer that has fragment p."""
    return p % self.syncers


def make_options(config: ConfigDict, shards: int | None = None) -> Options:
  """The options of a config that `check` has passed.

  Args:
    shards: of the training data, where the run began with another number of learners.
  """
  d = config.decoupled
  arrival = d.policy != "decoupled"
  learners = config.learners
  lr = d.outer_lr if d.outer_lr is not None else 1.0 if d.policy == "async_mean" else None
  if d.policy == "delayed_nesterov":
    steps: dict[str, Any] = {"outer": delayed_nesterov(*Outer(outer_lr=lr, outer_momentum=d.outer_momentum)
                                                       .lr_and_momentum, arrivals=learners)}
  elif d.policy == "async_mean":
    steps = {"outer": optax.sgd(lr / learners)}
  else:
    steps = {"outer_lr": lr, "outer_momentum": d.outer_momentum}
  codec = None if d.codec is None else configs.with_options("decoupled.codec", d.codec)
  named = configs.with_options("decoupled.merge", d.merge)
  name, extra = (named, None) if isinstance(named, str) else named
  return Options(
      policy=d.policy, learners=learners, quorum=config.quorum, steps=config.steps, inner_steps=config.inner_steps,
      fragments=d.fragments or (1 if arrival else config.inner_steps), syncers=d.syncers, shards=shards or learners,
      overlap=d.overlap, blend=d.blend, grace=d.grace, grace_cap=d.grace_cap, silent_after=d.silent_after, pace=d.pace,
      dylu=d.dylu, batch_tokens=config.batch_size * config.seq_len, aggregator=make_aggregator(name, extra),
      outer=Outer(codec=codec, error_feedback=d.error_feedback, **steps))


def check(config: ConfigDict) -> Options:
  """Stops at what can be seen to be wrong without data, devices or Ray; returns the options.

  Raises:
    ValueError: one sentence that names the key, its value and what to do.
  """
  d = config.decoupled
  for key in ("learners", "quorum", "steps"):
    if config[key] < 1:
      raise ValueError(f"{key}={config[key]} must be at least 1.")
  if config.quorum > config.learners:
    raise ValueError(f"quorum={config.quorum} exceeds learners={config.learners}, so that no step could end; lower it.")
  if d.policy not in POLICIES:
    raise ValueError(f"decoupled.policy={d.policy!r} must be one of {', '.join(POLICIES)}.")
  used = {k: v for k, v in config.method.items() if k != "name" and v is not None}
  if used:
    raise ValueError(f"method.{next(iter(used))}={next(iter(used.values()))!r} has no effect on decoupled learners; set the "
                     "keys under decoupled instead.")
  for section in ("faults", "network"):
    configs.refuse_set(config, section, list(config[section]), "on decoupled learners, whose faults are real; leave it out.")
  if config.worker_weights is not None:
    raise ValueError(f"worker_weights={config.worker_weights!r} has no effect on decoupled learners, which are weighted by "
                     "their tokens; unset it.")
  configs.validate(schedule_config(config))
  for key, low, high in (("grace", 0, 1), ("blend", 0, 1 + 1e-12)):
    if not low <= d[key] < high:
      raise ValueError(f"decoupled.{key}={d[key]} must be at least {low} and {'at most' if high > 1 else 'below'} 1.")
  for key in ("overlap", "grace_cap", "pace"):
    if d[key] < 0:
      raise ValueError(f"decoupled.{key}={d[key]} must not be negative.")
  if d.silent_after <= 0:
    raise ValueError(f"decoupled.silent_after={d.silent_after} must be a positive number of seconds.")
  try:
    options = make_options(config)
    check_fragments(options.fragments, "balanced", "own")
  except ValueError as e:
    raise ValueError(f"decoupled: {e}") from e
  if options.on_arrival and (options.fragments > 1 or d.syncers > 1 or config.quorum > 1):
    raise ValueError(f"decoupled.policy={d.policy!r} merges each contribution by itself; leave decoupled.fragments, "
                     "decoupled.syncers and quorum at 1.")
  if options.on_arrival and options.aggregator.name not in ("mean", "rda"):
    raise ValueError(f"decoupled.merge={d.merge!r} has no effect with decoupled.policy={d.policy!r}; leave it unset.")
  if options.on_arrival and d.blend:
    raise ValueError(f"decoupled.blend={d.blend} has no effect with decoupled.policy={d.policy!r}, whose learners restart "
                     "from the global parameters; leave it at 0.")
  if config.inner_steps % options.fragments:
    raise ValueError(f"decoupled.fragments={options.fragments} must divide inner_steps={config.inner_steps}; change one of "
                     "them.")
  if d.syncers < 1 or options.fragments % d.syncers:
    raise ValueError(f"decoupled.syncers={d.syncers} must divide decoupled.fragments={options.fragments}; change one of "
                     "them.")
  resources(config)
  return options


def schedule_config(config: ConfigDict) -> ConfigDict:
  """The config whose rounds are as long as an undisturbed learner trains, for schedules and for what train also refuses."""
  c = config.copy_and_resolve_references()
  with c.unlocked():
    # A learner takes H steps to its first fragment, and H/P to each of the next ones.
    fragments = c.decoupled.fragments or (1 if c.decoupled.policy != "decoupled" else c.inner_steps)
    c.rounds = max(1, math.ceil(c.steps / max(1, fragments)))
    if c.decoupled.policy != "decoupled":
      c.rounds = max(1, math.ceil(c.steps / c.learners))
    c.workers = c.learners
    c.method.name = "diloco"
    c.measure_every, c.profile = 0, None
  return c


def resources(config: ConfigDict) -> dict[str, float]:
  """Ray resources of a learner, by name.

  Raises:
    ValueError: not of the form "GPU=1" or "TPU=4;custom=1".
  """
  text = config.decoupled.resources
  words = [word.split("=") for word in filter(None, (text or "").split(";"))]
  try:
    return {name.strip(): float(count) for name, count in words}
  except ValueError as e:
    raise ValueError(f"decoupled.resources={text!r} must be of the form 'GPU=1' or 'TPU=4;custom=1'.") from e


def environment(config: ConfigDict, platforms: str) -> dict[str, str]:
  """Environment variables of a learner's or syncer's process.

  On CPU it has one thread, since processes that share a few cores must not each ask for all of them, and as many virtual
  devices as a learner's mesh. A replay needs the same.

  Args:
    platforms: JAX_PLATFORMS; "" for jax's own choice.
  """
  devices = config.mesh.fsdp * config.mesh.tensor
  flags = "--xla_cpu_multi_thread_eigen=false" + (
      f" --xla_force_host_platform_device_count={devices}" if devices > 1 else "")
  precision = {k: os.environ[k] for k in ("JAX_ENABLE_X64",) if k in os.environ}
  return {"JAX_PLATFORMS": platforms, "XLA_FLAGS": flags, "NPROC": "1", "OMP_NUM_THREADS": "1", **precision}


def fingerprint(config: ConfigDict) -> dict[str, Any]:
  """The keys that a learner and the syncer must agree on."""
  unused = ("method.", "overlap.", "worker", "limits.", "resume.")
  free = _free_keys(config)
  return {key: value for key, value in configs.flat(config).items() if key not in free and not key.startswith(unused)}


def _free_keys(config: ConfigDict) -> tuple[str, ...]:
  return tuple(k for k in FREE_KEYS if k != "learners" or config.decoupled.policy == "decoupled")


def refuse_other_run(config: ConfigDict, saved: Mapping[str, Any], where: str) -> None:
  """Raises checkpoint.ConfigMismatchError for the first key in which a config contradicts the saved keys of its run.

  FREE_KEYS may change (`learners` not with merges on arrival), and `steps` where the learning rate does not depend on it
  (inner.schedule=constant).
  """
  alike = config.copy_and_resolve_references()
  for key in (*_free_keys(config), *(("steps",) if config.inner.schedule == "constant" else ())):
    section, _, leaf = key.rpartition(".")
    if key in saved:
      (alike[section] if section else alike)[leaf] = saved[key]
  refuse_other_config(alike, dict(saved), where)


def digest(keys: Mapping[str, Any]) -> str:
  """A short hash of such keys."""
  return hashlib.sha256(json.dumps(dict(keys), sort_keys=True).encode()).hexdigest()[:16]


def refuse_mismatch(ours: Mapping[str, Any], theirs: Mapping[str, Any], who: str) -> None:
  """Raises ValueError for the first key in which a learner that joins contradicts the run."""
  if digest(ours) == digest(theirs):
    return
  defaults = configs.flat(default())
  for key in sorted(set(ours) | set(theirs)):
    here, there = ours.get(key, defaults.get(key)), theirs.get(key, defaults.get(key))
    if here != there:
      raise ValueError(f"{who} has {key}={there!r}, but the run has {here!r}; start it with the run's config.")
