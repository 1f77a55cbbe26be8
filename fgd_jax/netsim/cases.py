"""From the words of a command to simulations: one case for each method and bandwidth."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from fgd_jax import methods
from fgd_jax.netsim import closed
from fgd_jax.netsim.failures import Drops, Interruptions, StepTimes, parse_step_times
from fgd_jax.netsim.layers import Layered
from fgd_jax.netsim.links import Links, read_links, write_bandwidth
from fgd_jax.netsim.plan import SUBSET_SHARE, Plan, load_config, make_plan, plan_of_config
from fgd_jax.netsim.rounds import simulate

WORKERS, STEPS = 8, 100
EXACT_ROUNDS, RANDOM_ROUNDS = 3, 200  # simulated where nothing is random, and otherwise
TIMELINE = 2000  # spans of the first round that are reported
LAYERED = ("data_parallel", "diloco", "streaming_diloco")  # that the per-layer model knows
METHOD_OPTIONS = ("fragments", "delay", "mix1", "mix2", "codec")


@dataclasses.dataclass(frozen=True)
class Chaos:
  """Everything that may go wrong."""

  drops: Drops
  crashes: Interruptions
  pauses: Interruptions
  on_crash: str

  @property
  def any(self) -> bool:
    return bool(self.drops.probability or self.crashes.every or self.pauses.every)


def refuse_idle(args: argparse.Namespace, keys: Sequence[str], active: Any, why: str) -> None:
  """Options that were given and would change nothing.

  Raises:
    ValueError: one sentence, for the first of `keys` that was given where `active` is false.
  """
  for key in keys:
    if not active and getattr(args, key) is not None:
      raise ValueError(f"{key}={getattr(args, key)} has no effect {why}; leave it out.")


def given(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
  """The options by name, where they were not given their defaults."""
  return {key: default if getattr(args, key) is None else getattr(args, key) for key, default in defaults.items()}


def chaos_of(args: argparse.Namespace) -> Chaos:
  """The failures that the options ask for."""
  refuse_idle(args, ("drop_unit", "drop_at", "late_mix1"), args.drop, "without drop")
  refuse_idle(args, ("crash_seconds", "crash_shape", "on_crash"), args.crash_every, "without crash_every")
  refuse_idle(args, ("pause_seconds",), args.pause_every, "without pause_every")
  for what in ("crash", "pause"):
    every = getattr(args, f"{what}_every")
    if every and not getattr(args, f"{what}_seconds"):
      raise ValueError(f"{what}_every={every:g} needs {what}_seconds, the time until a worker is back.")
  o = given(args, drop=0.0, drop_unit="message", drop_at="end", late_mix1="skip", crash_every=0.0, crash_seconds=0.0,
            crash_shape=1.0, pause_every=0.0, pause_seconds=0.0, on_crash="wait")
  return Chaos(Drops(o["drop"], o["drop_unit"], o["drop_at"], o["late_mix1"]),
               Interruptions(o["crash_every"], o["crash_seconds"], o["crash_shape"]),
               Interruptions(o["pause_every"], o["pause_seconds"], fixed=False), o["on_crash"])


def plans_of(args: argparse.Namespace) -> list[tuple[Plan, float]]:
  """A plan and its number of parameters for each method that the options name."""
  plans: list[tuple[Plan, float]]
  names = [name for name in (args.method or "").split(",") if name]
  if args.method is not None and not names:
    raise ValueError(f"method={args.method!r} names no method.")
  if args.config:
    for key in ("params", "bytes_per_param", "bits_per_param", "workers", "inner_steps", "subset_share", *METHOD_OPTIONS):
      if getattr(args, key) is not None:
        raise ValueError(f"{key}={getattr(args, key)} comes from the config here; set it after the colon of --config, or "
                         "leave --config out.")
    path, _, settings = args.config.partition(":")  # the method first: it unsets the options of the config's own
    words = [f"{path}:method={name}" + (f",{settings}" if settings else "") for name in names] or [args.config]
    plans = [(plan, float(count)) for plan, count in (plan_of_config(load_config(w), args.transfer) for w in words)]
  else:
    if args.params is None:
      raise ValueError("params is missing; give --params=1.5e9, or --config=FILE to take the model from a training config.")
    if sum(getattr(args, key) is not None for key in ("bytes_per_param", "bits_per_param", "codec")) > 1:
      raise ValueError("bytes_per_param, bits_per_param and codec exclude each other; give one of them.")
    o = given(args, bytes_per_param=2.0, workers=WORKERS, inner_steps=STEPS, subset_share=SUBSET_SHARE, seed=0)
    bits = 8 * o["bytes_per_param"] if args.bits_per_param is None else args.bits_per_param
    names = names or ["GlobalM1LocalM2"]
    refuse_idle(args, ("subset_share",), any(name.endswith("-subset") for name in names), "without a method with a subset")
    plans = [(make_plan(name, args.params, bits, o["workers"], o["inner_steps"], o["subset_share"], args.transfer, options,
                        o["seed"]), args.params) for name, options in zip(names, _options(names, args))]
  exchanges = [e for plan, _ in plans for e in plan.exchanges]
  refuse_idle(args, ("transfer",), any(e.mean for e in exchanges), "where no mean over all workers travels")
  refuse_idle(args, ("late_mix1",), any(e.mean and not e.blocking for e in exchanges), "without an overlapped mean")
  return plans


def _options(names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
  """Each method's options among the command's; at least one method must have each option that was given."""
  wanted = {key: getattr(args, key) for key in METHOD_OPTIONS if getattr(args, key) is not None}
  known = [methods.option_names(name) if name in methods.METHODS or name in methods.PRESETS else list(wanted)
           for name in names]  # of an unknown method all, as its name is what will be refused
  known = [[key for key in keys if (key, name) != ("delay", "eager_diloco")] for name, keys in zip(names, known)]
  for key, value in wanted.items():
    if not any(key in keys for keys in known):
      raise ValueError(f"{key}={value} has no effect on {', '.join(names)}; leave it out.")
  return [{key: value for key, value in wanted.items() if key in keys} for keys in known]


def utilization(args: argparse.Namespace) -> list[dict[str, Any]]:
  """The results of all cases, ready for JSON.

  Raises:
    ValueError: one sentence.
  """
  times, chaos = parse_step_times(args.step_seconds, args.jitter or "0"), chaos_of(args)
  if args.layers is not None:
    if chaos.any or times.jitter or len(times.seconds) > 1 or args.latency:
      raise ValueError(f"layers={args.layers}: the per-layer model knows no failures, stragglers or latency; leave them or "
                       "--layers out.")
    refuse_idle(args, ("rounds", "seed"), False, "on the per-layer model")
  out = []
  for plan, params in plans_of(args):
    for text in args.bandwidth.split(","):
      links = read_links(text, plan.workers, args.latency or 0.0)
      if args.layers is None:
        result = run(plan, links, times, chaos, args.rounds, args.seed or 0)
      else:
        result = _layered(plan, links, times.seconds[0], args.layers)
      name = write_bandwidth(links.uniform) if links.uniform and links.rates.ndim == 1 else text
      out.append({"method": plan.method, "bandwidth": name, "bits_per_second": links.uniform, "workers": plan.workers,
                  "inner_steps": plan.steps, "params": params, **result})
  return out


def run(plan: Plan, links: Links, times: StepTimes, chaos: Chaos, rounds: int | None = None, seed: int = 0
        ) -> dict[str, Any]:
  """One simulation as a dict, with its closed form where there is one."""
  uneven = links.uniform is None or len(set(times.seconds)) > 1 or plan.own_steps is not None
  random = bool(chaos.any or times.jitter or uneven and any(len(e.topology.bank) > 1 for e in plan.exchanges))
  result = dataclasses.asdict(simulate(plan, links, times, chaos.drops, chaos.crashes, chaos.pauses, chaos.on_crash,
                                       rounds or (RANDOM_ROUNDS if random else EXACT_ROUNDS), seed))
  expected = None
  if not (chaos.crashes.every or chaos.pauses.every or times.jitter) and len(set(times.seconds)) == 1:
    expected = closed.utilization(plan, links, times.seconds[0], chaos.drops)
  spans = result.pop("timeline")
  for key in ("failures", "finished"):
    result.pop(key)
  return {**result, "closed_form_utilization": expected, "timeline_left_out": max(len(spans) - TIMELINE, 0),
          "timeline": [dict(zip(("lane", "what", "start", "end"), span)) for span in spans[:TIMELINE]]}


def _layered(plan: Plan, links: Links, step_seconds: float, layers: int) -> dict[str, Any]:
  """The per-layer model: reductions beside the backward pass."""
  rate = links.uniform
  if plan.method not in LAYERED:
    raise ValueError(f"layers={layers}: the per-layer model knows {', '.join(LAYERED)}, not {plan.method}.")
  if rate is None and plan.workers > 1:
    raise ValueError(f"layers={layers}: the per-layer model needs equal links.")
  share, compute = 1.0, plan.steps * step_seconds
  if rate is not None and plan.exchanges:
    fragments = 0 if plan.method == "data_parallel" else len(plan.exchanges)
    first, payload = plan.exchanges[0], sum(e.nbytes for e in plan.exchanges) / (1 if fragments else plan.steps)
    price = first.cost.path if links.rates.ndim == 1 else first.cost.edge
    share = Layered(layers, step_seconds, 8 * payload * price, plan.steps, fragments, first.due - first.start
                    ).utilization(rate)
  return {"compute_utilization": share, "round_seconds": compute / share, "compute_seconds": compute,
          "stall_seconds": compute / share - compute, "down_seconds": 0.0, "bytes_overlapped": plan.bytes_overlapped,
          "bytes_blocking": plan.bytes_blocking, "layers": layers, "closed_form_utilization": None}


def clean(value: Any) -> Any:
  """JSON has no infinity and no NaN: they become null."""
  if isinstance(value, dict):
    return {k: clean(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [clean(v) for v in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
