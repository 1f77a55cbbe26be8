"""From a config (configs/default.py has every key) to the parts of a run, refusing what cannot work before it starts."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from fgd_jax import methods, netsim, overlap, sharding
from fgd_jax.arguments import check_quarantine, shares
from fgd_jax.default_config import get_config as default
from fgd_jax.methods.base import Outer
from fgd_jax.mixing import path_of
from fgd_jax.models import LlamaConfig
from fgd_jax.round import Round
from fgd_jax.round import build_round as build
from fgd_jax.workers import Workers

# Keys that a resumed run may change: they do not change what is computed (the placement: but for rounding).
FREE_KEYS = ("checkpoint_every", "checkpoint_keep", "allow_cpu", "profile", "limits.start", "limits.stall", "resume.workers",
             "mesh.worker", "mesh.fsdp", "mesh.tensor", "cpu_devices", "overlap.form")
# Keys that must fit the number of workers, so a run that goes on with another number may change them, too.
WORKER_KEYS = ("workers", "worker_weights", "method.inner_steps", "method.group_size", "method.mix1", "method.mix2",
               "method.topology", "network.bandwidth", "network.step_seconds")


def flat(config: ConfigDict) -> dict[str, Any]:
  """All keys of a config with dots, `model.dim`, and their values (lists for tuples, as JSON has them)."""
  out: dict[str, Any] = {}
  for key, value in json.loads(config.to_json_best_effort()).items():
    if isinstance(value, dict):
      out.update({f"{key}.{k}": v for k, v in value.items()})
    else:
      out[key] = value
  return out


def unflat(values: dict[str, Any]) -> ConfigDict:
  """The config whose `flat` is `values`; keys that are newer than them have their defaults.

  Raises:
    ValueError: a key that does not exist (any more), or a value of another type.
  """
  config = default()
  refuse_unknown(list(values))
  for key, value in values.items():
    section, _, leaf = key.rpartition(".")
    try:
      (config[section] if section else config)[leaf] = value
    except TypeError as e:
      raise ValueError(f"{key}={value!r} is of the wrong type ({e}).") from e
  return config


def apply_variant(config: ConfigDict, arg: str | None) -> None:
  """Sets keys from a config string such as "workers=8,method=LocalM1M2,inner.lr=1e-3".

  `method=NAME` means that method with its own defaults: options that the config chose for another method are unset.

  Raises:
    ValueError: a word that is not key=value, an unknown key or a value of the wrong type.
  """
  for word in filter(None, (arg or "").split(",")):
    key, equals, text = word.partition("=")
    key = key.strip()
    if key == "method":
      key = "method.name"
      config.method.update({option: None for option in config.method if option != "name"})
    if not equals:
      raise ValueError(f"Config variant {word!r} is not of the form key=value.")
    refuse_unknown([key], "method")
    section, _, leaf = key.rpartition(".")
    holder = config[section] if section else config
    try:
      holder[leaf] = _parse(text, holder.get_type(leaf))
    except (TypeError, ValueError) as e:
      raise ValueError(f"Config variant {word!r}: {key} cannot be {text!r} ({e}).") from e


def _parse(text: str, kind: type) -> Any:
  if kind is bool:
    if text.lower() not in ("true", "false"):
      raise ValueError("use true or false")
    return text.lower() == "true"
  return kind(text)


def refuse_unknown(keys: list[str], method: str = "method.name") -> None:
  """Raises ValueError for a key that no config has; `method`: what to say where "method" is meant."""
  known = list(flat(default()))
  for key in keys:
    if key not in known:
      near = [word if word in known else method for word in difflib.get_close_matches(key, [*known, "method"], n=1)]
      raise ValueError(f"Unknown config key {key!r}{f'; did you mean {near[0]!r}?' if near else ''} "
                       "(all keys: configs/default.py).")


def validate(config: ConfigDict) -> None:
  """Stops at what can be seen to be wrong without data or devices.

  Raises:
    ValueError: one sentence that names the key, its value and what to do.
  """
  try:
    values = flat(config)
  except ZeroDivisionError as e:  # of keys that a config file computes from others
    raise ValueError("A key from which others are computed (workers, inner_steps, batch_size, seq_len) is 0; each must be "
                     "at least 1.") from e
  refuse_unknown(list(values))
  for key in flat(default()):
    if key not in values:
      raise ValueError(f"The config lacks the key {key!r}; start from configs/default.py.")
  for key in ("rounds", "inner_steps", "workers", "batch_size", "accumulate", "seq_len", "eval_batches",
              "eval_batch_size", "measure_sequences", "checkpoint_keep", "mesh.fsdp", "mesh.tensor", "model.dim",
              "model.layers"):
    if values[key] < 1:
      raise ValueError(f"{key}={values[key]} must be at least 1.")
  for key in ("eval_every", "measure_every", "checkpoint_every", "seed", "inner.warmup_steps", "inner.weight_decay",
              "inner.clip", "limits.stall"):
    if values[key] < 0:
      raise ValueError(f"{key}={values[key]} must not be negative.")
  for key, value in values.items():
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(f"{key}={value} must be finite.")
  for key in ("inner.b1", "inner.b2"):
    if not 0 <= values[key] < 1:
      raise ValueError(f"{key}={values[key]} must be in [0, 1).")
  for key in ("mesh.worker", "cpu_devices", "model.vocab_size"):
    if values[key] is not None and values[key] < 1:
      raise ValueError(f"{key}={values[key]} must be at least 1, or None.")
  if config.limits.start <= 0:
    raise ValueError(f"limits.start={config.limits.start} must be above 0 seconds.")
  if config.measure_every and config.measure_sequences > config.eval_batches * config.eval_batch_size:
    raise ValueError(f"measure_sequences={config.measure_sequences} exceeds the eval_batches x eval_batch_size = "
                     f"{config.eval_batches * config.eval_batch_size} held-out sequences; lower it.")
  if config.batch_size % config.accumulate:
    raise ValueError(f"accumulate={config.accumulate} must divide batch_size={config.batch_size}.")
  if config.mesh.worker is not None and config.workers % config.mesh.worker:
    raise ValueError(f"mesh.worker={config.mesh.worker} must divide workers={config.workers}.")
  _check_inside_worker(config)
  if config.rounds * config.inner_steps >= 2**31:
    raise ValueError(f"rounds={config.rounds} x inner_steps={config.inner_steps} overflow the 32-bit step counter.")
  if config.resume.workers not in ("mean", "first"):
    raise ValueError(f"resume.workers={config.resume.workers!r} must be 'mean' or 'first'.")
  if config.inner.schedule not in ("cosine", "constant"):
    raise ValueError(f"inner.schedule={config.inner.schedule!r} must be 'cosine' or 'constant'.")
  if config.inner.lr <= 0:
    raise ValueError(f"inner.lr={config.inner.lr} must be positive.")
  if "float64" in (config.model.dtype, config.model.param_dtype) and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
    raise ValueError("model.dtype or model.param_dtype is 'float64', which needs JAX_ENABLE_X64=1 in the environment.")
  if config.overlap.form not in overlap.FORMS:
    raise ValueError(f"overlap.form={config.overlap.form!r} must be one of {', '.join(overlap.FORMS)}.")
  profiled_rounds(config)
  worker_weights(config)
  fault_model(config)
  method = make_method(config).bind(config.workers, config.seed)
  if isinstance(method, methods.Fragmented):
    method.check_steps(config.inner_steps)
  if config.faults.quarantine:
    check_quarantine(method, config.worker_weights)
  if method.inner_steps is not None and max(method.inner_steps) > config.inner_steps:
    raise ValueError(f"method.inner_steps={list(method.inner_steps)} exceeds inner_steps={config.inner_steps}, the steps of "
                     "a round; lower it.")


def steps_of_workers(config: ConfigDict) -> list[int]:
  """[M] inner steps that each worker takes in a round."""
  return list(make_method(config).inner_steps or [config.inner_steps] * config.workers)


def worker_weights(config: ConfigDict) -> list[float] | None:
  """Weights of the workers' gradients, None where all count alike.

  Raises:
    ValueError: not one positive number for each worker.
  """
  if config.worker_weights is None:
    return None
  try:
    weights = [float(word) for word in config.worker_weights.split(";")]
  except ValueError as e:
    raise ValueError(f"worker_weights={config.worker_weights!r} must be numbers joined by ';'.") from e
  shares(weights, config.workers)
  return weights


def faulty(config: ConfigDict) -> bool:
  """Whether something fails in training."""
  return bool(config.faults.drop or (config.faults.crash_every and config.faults.on_crash == "proceed"))


def simulated(config: ConfigDict) -> bool:
  """Whether the run is simulated: it asks for faults, or for the time on a network."""
  faults = config.faults
  return bool(faults.drop or faults.crash_every or faults.pause_every or config.network.bandwidth)


def fault_model(config: ConfigDict) -> tuple[netsim.Links, netsim.StepTimes, netsim.Drops, netsim.Interruptions,
                                             netsim.Interruptions]:
  """Links, step times, drops, crashes and pauses of a config, as `fgd_jax.netsim.simulate` takes them.

  Raises:
    ValueError: an impossible value, or one without effect, in one sentence that names the key.
  """
  faults, network = config.faults, config.network
  _refuse_idle_faults(config)
  if faults.on_crash not in ("wait", "proceed"):
    raise ValueError(f"faults.on_crash={faults.on_crash!r} must be 'wait' or 'proceed'.")
  if faults.seed is not None and faults.seed < 0:
    raise ValueError(f"faults.seed={faults.seed} must not be negative.")
  try:
    links = netsim.read_links(network.bandwidth or "1Gbps", config.workers, network.latency)
    times = netsim.parse_step_times(network.step_seconds or "1", network.jitter)
    if network.transfer is not None:
      netsim.cost(network.transfer, config.workers)
  except (ValueError, OSError) as e:
    raise ValueError(f"network.{e}") from e
  try:
    drops = netsim.Drops(faults.drop, faults.drop_unit, faults.drop_at, faults.late_mix1)
    crashes = netsim.Interruptions(faults.crash_every, faults.crash_seconds, faults.crash_shape)
    pauses = netsim.Interruptions(faults.pause_every, faults.pause_seconds, fixed=False)
  except ValueError as e:
    raise ValueError(f"faults.{e}") from e
  if len(times.seconds) not in (1, config.workers):
    raise ValueError(f"network.step_seconds={network.step_seconds!r} holds {len(times.seconds)} values for "
                     f"workers={config.workers}; give one, or one for each.")
  return links, times, drops, crashes, pauses


def refuse_set(config: ConfigDict, section: str, keys: Sequence[str], why: str) -> None:
  """Raises ValueError for the first of these keys of a section that is set; `why` ends "... has no effect"."""
  usual = default()
  for key in keys:
    if config[section][key] != usual[section][key]:
      raise ValueError(f"{section}.{key}={config[section][key]!r} has no effect {why}")


def _refuse_idle_faults(config: ConfigDict) -> None:
  """Keys that would do nothing."""
  needs = [("network", ("step_seconds", "latency", "jitter", "transfer"), "network.bandwidth", simulated(config)),
           ("faults", ("drop_unit", "drop_at", "late_mix1"), "faults.drop", config.faults.drop),
           ("faults", ("crash_seconds", "crash_shape", "on_crash"), "faults.crash_every", config.faults.crash_every),
           ("faults", ("pause_seconds",), "faults.pause_every", config.faults.pause_every)]
  for section, keys, needed, there in needs:
    if not there:
      refuse_set(config, section, keys, f"without {needed}; set that, or leave it out.")
  for what in ("crash", "pause"):
    if config.faults[f"{what}_every"] and not config.faults[f"{what}_seconds"]:
      raise ValueError(f"faults.{what}_every={config.faults[f'{what}_every']:g} needs faults.{what}_seconds, the time until "
                       "a worker is back.")


def profiled_rounds(config: ConfigDict) -> range:
  """The rounds, counted from 1, of which a trace is written.

  Raises:
    ValueError: `profile` is not a round, or two joined by a hyphen.
  """
  if config.profile is None:
    return range(0)
  words = config.profile.split("-")
  first, last = words[0], words[-1]
  if len(words) > 2 or not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last) <= config.rounds:
    raise ValueError(f"profile={config.profile!r} must be a round, such as '5', or rounds, such as '5-7', counted from 1 to "
                     f"rounds={config.rounds}.")
  return range(int(first), int(last) + 1)


def _check_inside_worker(config: ConfigDict) -> None:
  """What the mesh axes fsdp and tensor divide, by the rules of fgd_jax.sharding."""
  fsdp, tensor, model = config.mesh.fsdp, config.mesh.tensor, config.model
  if config.batch_size // config.accumulate % fsdp:
    raise ValueError(f"mesh.fsdp={fsdp} must divide batch_size={config.batch_size} / accumulate={config.accumulate}, the "
                     "sequences of a micro-batch; change one of them.")
  for key in ("heads", "kv_heads"):
    if model[key] % tensor:
      raise ValueError(f"mesh.tensor={tensor} must divide model.{key}={model[key]}, which it shards; change one of them.")
  for key in ("dim", "ffn_dim"):
    if model[key] % (fsdp * tensor):
      raise ValueError(f"mesh.fsdp={fsdp} x mesh.tensor={tensor} must divide model.{key}={model[key]}, which they shard; "
                       "change one of them.")


def make_method(config: ConfigDict) -> methods.Method:
  """The method with its options; options left None keep their defaults.

  Raises:
    ValueError: an option that the method does not have, or an impossible value.
  """
  options = {k: v for k, v in config.method.items() if k != "name" and v is not None}
  for field in ("mix1", "mix2", "topology", "codec"):
    if field in options:
      options[field] = with_options(f"method.{field}", options[field])
  if "aggregator" in options and not isinstance(named := with_options("method.aggregator", options["aggregator"]), str):
    options["aggregator"], options["aggregator_options"] = named
  if "inner_steps" in options:
    try:
      options["inner_steps"] = tuple(int(n) for n in options["inner_steps"].split(";"))
    except ValueError as e:
      raise ValueError(f"method.inner_steps={options['inner_steps']!r} must be numbers of steps joined by ';'.") from e
  if "fragment_patterns" in options:
    if "fragments" in options:
      raise ValueError("method.fragments and method.fragment_patterns say the same; give one of them.")
    options["fragments"] = options.pop("fragment_patterns").split(";")
  over_rounds = {k: options.pop(k) for k in ("outer_schedule", "outer_warmup_rounds") if k in options}
  try:
    method = methods.make(config.method.name, **options)
    return _scheduled(method, config, **over_rounds) if over_rounds else method
  except ValueError as e:
    raise ValueError(f"method: {e}") from e


def _scheduled(method: methods.Method, config: ConfigDict, outer_schedule: str = "constant", outer_warmup_rounds: int = 0
               ) -> methods.Method:
  """The method with an outer learning rate that changes over the rounds of the config."""
  if not isinstance(method, Outer):
    raise ValueError(f"outer_schedule and outer_warmup_rounds have no effect with {config.method.name!r}, which has no "
                     "outer learning rate; leave them out.")
  named = with_options("outer_schedule", outer_schedule)
  shape, options = (named, {}) if isinstance(named, str) else named
  end = options.pop("end", 0.0)
  share = isinstance(end, (int, float)) and not isinstance(end, bool) and 0 <= end <= 1
  plain = shape == "constant" and outer_schedule == shape or shape in ("cosine", "linear")
  if not plain or options or not share:
    raise ValueError(f"outer_schedule={outer_schedule!r} must be 'constant', 'cosine' or 'linear', the latter two with an "
                     "end from 0 to 1 (of outer_lr) if wanted, as in 'cosine:end=0.1'.")
  if not 0 <= outer_warmup_rounds < config.rounds:
    raise ValueError(f"outer_warmup_rounds={outer_warmup_rounds} must be at least 0 and less than rounds={config.rounds}.")
  if shape == "constant" and not outer_warmup_rounds:
    return method
  lr, _ = method.lr_and_momentum
  return dataclasses.replace(method, outer_lr=LearningRate(lr, config.rounds, shape, end, outer_warmup_rounds))


def with_options(key: str, text: str) -> Any:
  """ "random_groups:group_size=2" -> ("random_groups", {"group_size": 2})."""
  name, _, rest = text.partition(":")
  try:
    options = {k.strip(): _value(v.strip()) for k, v in (word.split("=") for word in filter(None, rest.split(",")))}
  except ValueError as e:
    raise ValueError(f"{key}={text!r} must be a name, or name:option=value.") from e
  return (name, options) if options else name


def _value(text: str) -> Any:
  """A number, truth value or word."""
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      pass
  return {"true": True, "false": False}.get(text.lower(), text)


def make_schedule(config: ConfigDict) -> optax.Schedule:
  """Learning rate by inner step, counted over the whole run (it does not restart in a round)."""
  inner, steps = config.inner, config.rounds * config.inner_steps
  warmup = inner.warmup_steps if inner.schedule == "constant" else min(inner.warmup_steps, steps - 1)
  return LearningRate(inner.lr, steps, inner.schedule, inner.end_lr_fraction, warmup)


@dataclasses.dataclass(frozen=True)
class LearningRate:
  """A schedule: a linear warm-up to `peak`, then a constant value or a decay that would reach `end` times the peak after the
  last of all steps.

  Args:
    peak: the highest learning rate. steps: in all. shape: "constant" | "cosine" | "linear". end: of the peak, from 0 to 1.
    warmup: steps of it.
  """

  peak: float
  steps: int
  shape: str
  end: float
  warmup: int

  def __call__(self, count: Any) -> Any:
    left = max(self.steps - self.warmup, 1)
    after = {"constant": optax.constant_schedule(self.peak),
             "cosine": optax.cosine_decay_schedule(self.peak, left, alpha=self.end),
             "linear": optax.linear_schedule(self.peak, self.end * self.peak, left)}[self.shape]
    if not self.warmup:
      return after(count)
    rise = optax.linear_schedule(self.peak / (self.warmup + 1), self.peak, self.warmup)
    return optax.join_schedules([rise, after], [self.warmup])(count)


def make_inner_optimizer(config: ConfigDict) -> optax.GradientTransformation:
  """AdamW with warm-up, decay on kernels and embeddings, and clipping of each worker's gradient."""
  inner = config.inner
  decays = lambda params: jax.tree_util.tree_map_with_path(
      lambda path, _: path_of(path).rsplit("/", 1)[-1] in ("kernel", "embedding"), params)
  adamw = optax.adamw(make_schedule(config), b1=inner.b1, b2=inner.b2, weight_decay=inner.weight_decay, mask=decays)
  return optax.chain(optax.clip_by_global_norm(inner.clip), adamw) if inner.clip else adamw


def make_model_config(config: ConfigDict, vocab_size: int) -> LlamaConfig:
  """The model's shape; `vocab_size` is the data's.

  Raises:
    ValueError: model.vocab_size smaller than the tokenizer's.
  """
  options = dict(config.model.items())
  options["vocab_size"] = vocab_size if options["vocab_size"] is None else options["vocab_size"]
  if options["vocab_size"] < vocab_size:
    raise ValueError(f"model.vocab_size={options['vocab_size']} is smaller than the tokenizer's {vocab_size}.")
  return LlamaConfig(**options)


def build_round(config: ConfigDict, loss_fn: Callable, workers: Workers, measure: Sequence[Any] = (),
                overlap: str | None = None) -> tuple[Callable, Round]:
  """`fgd_jax.build_round` with all that a config says; `overlap` in place of its form of overlap."""
  return build(
      make_method(config), loss_fn, make_inner_optimizer(config), workers=workers, seed=config.seed, measure=measure,
      accumulate=config.accumulate, overlap=overlap or config.overlap.form, worker_weights=worker_weights(config),
      quarantine=config.faults.quarantine, faults=faulty(config), **sharding.inside_worker(workers.mesh))


def set_cpu_devices(config: ConfigDict, processes: int = 1) -> None:
  """Asks for virtual CPU devices, before the first use of jax's devices; without effect where they were set already."""
  count = config.cpu_devices
  mix1 = make_method(config).bind(config.workers, config.seed).overlapped
  if count is None and (processes > 1 or (mix1 is not None and mix1.varying)):
    count = 1  # a mesh needs an executable for each permutation of Mix1, and on CPU nothing is gained by it
  elif count is None:
    count = max(n for n in range(1, min(os.cpu_count() or 1, config.workers) + 1) if config.workers % n == 0)
  if config.cpu_devices is None:
    total = (config.mesh.worker or count * processes) * config.mesh.fsdp * config.mesh.tensor
    count = math.ceil(total / processes)
  if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    try:
      jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # devices are in use already (a notebook, a test): keep what there is
      pass


def make_workers(config: ConfigDict, devices: Sequence[Any] | None = None) -> Workers:
  """The workers and their mesh: as many device positions as fit and divide, with fsdp x tensor devices each.

  Each slice gets the same number of workers; a mesh of one of this process's devices is none.

  Args:
    config: workers and mesh.*.
    devices: those to use, which may belong to a compile-only topology; None: jax.devices().

  Raises:
    ValueError: too few devices, slices among which the workers cannot be divided evenly, or no accelerator where
      allow_cpu is False.
  """
  ours = devices is None
  devices = jax.devices() if devices is None else devices
  if ours and devices[0].platform == "cpu" and not config.allow_cpu:
    raise ValueError("allow_cpu=False and jax found no accelerator, only CPU; check the installation (pip install "
                     "'.[tpu]' or '.[cuda]') or set allow_cpu=True.")
  inside, parts = config.mesh.fsdp * config.mesh.tensor, sharding.slices(devices)
  if config.workers % len(parts):
    raise ValueError(f"workers={config.workers} cannot be divided evenly among {len(parts)} slices; make workers a "
                     f"multiple of {len(parts)} or use fewer slices.")
  positions = config.mesh.worker
  if positions is None:
    fitting = min(len(part) for part in parts) // inside * len(parts)
    positions = max((n for n in range(len(parts), fitting + 1, len(parts)) if config.workers % n == 0), default=len(parts))
  processes = {d.process_index for d in devices} if ours else {0}
  if len(processes) == 1 and ours and positions * inside == 1:
    return Workers(config.workers)
  try:
    mesh = sharding.make_mesh(devices, positions, config.mesh.fsdp, config.mesh.tensor)
  except ValueError as e:
    raise ValueError(f"mesh: {e}") from e
  if ours and (idle := sorted(processes - {d.process_index for d in mesh.devices.flat})):
    raise ValueError(f"workers={config.workers} on {len(processes)} processes: a mesh of {positions} positions with "
                     f"{inside} devices each leaves process {idle[0]} without a part; make workers a multiple of "
                     f"{len(processes)}, or start fewer processes.")
  return Workers(config.workers, mesh)
