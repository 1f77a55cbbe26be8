"""From the words of a command to simulations: one case for each method and bandwidth."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

from fgd_jax import methods
from fgd_jax.netsim import closed
from fgd_jax.netsim.failures import Drops, Interruptions, StepTimes, parse_step_times
from fgd_jax.netsim.layers import Layered
from fgd_jax.netsim.links import Links, cost, read_links, write_bandwidth
from fgd_jax.netsim.plan import SUBSET_SHARE, Plan, bits_of, load_config, make_plan, plan_of_config
from fgd_jax.netsim.rounds import simulate

WORKERS, STEPS = 8, 100
EXACT_ROUNDS, RANDOM_ROUNDS = 3, 200  # simulated where nothing is random, and otherwise
TIMELINE = 2000  # spans of the first round that are reported
LAYERED = ("data_parallel", "diloco", "streaming_diloco")  # that the per-layer model knows
RECOMMEND_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


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


def chaos_of(args: argparse.Namespace) -> Chaos:
  """The failures that the options ask for."""
  for what in ("crash", "pause"):
    every = getattr(args, f"{what}_every")
    if every and not getattr(args, f"{what}_seconds"):
      raise ValueError(f"{what}_every={every:g} needs {what}_seconds, the time until a worker is back.")
  return Chaos(Drops(args.drop, args.drop_unit, args.drop_at, args.late_mix1),
               Interruptions(args.crash_every, args.crash_seconds, args.crash_shape),
               Interruptions(args.pause_every, args.pause_seconds, fixed=False), args.on_crash)


def plans_of(args: argparse.Namespace) -> list[tuple[Plan, float]]:
  """A plan and its number of parameters for each method that the options name."""
  names = [name for name in (args.method or "").split(",") if name]
  if args.config:
    for key in ("params", "bytes_per_param", "bits_per_param", "codec", "workers", "inner_steps", "subset_share",
                "fragments", "delay", "mix1", "mix2"):
      if getattr(args, key) is not None:
        raise ValueError(f"{key}={getattr(args, key)} comes from the config here; set it after the colon of --config, or "
                         "leave --config out.")
    path, _, settings = args.config.partition(":")  # the method first: it unsets the options of the config's own
    words = [f"{path}:method={name}" + (f",{settings}" if settings else "") for name in names] or [args.config]
    return [plan_of_config(load_config(word), args.transfer) for word in words]
  if args.params is None:
    raise ValueError("params is missing; give --params=1.5e9, or --config=FILE to take the model from a training config.")
  if args.bits_per_param is not None and args.codec is not None:
    raise ValueError("bits_per_param and codec exclude each other; give one of them.")
  bits = 8 * (2.0 if args.bytes_per_param is None else args.bytes_per_param)
  bits = bits_of(args.codec, bits) if args.bits_per_param is None else args.bits_per_param
  share = SUBSET_SHARE if args.subset_share is None else args.subset_share
  out = []
  for name in names or ["GlobalM1LocalM2"]:
    out.append((make_plan(name, args.params, bits, args.workers or WORKERS, args.inner_steps or STEPS, share, args.transfer,
                          _options(name, args)), args.params))
  return out


def _options(name: str, args: argparse.Namespace) -> dict[str, Any]:
  """The method's options among the command's; with one method, all that were given must be its own."""
  known = methods.option_names(name) if name in methods.METHODS or name in methods.PRESETS else []
  given = {key: getattr(args, key) for key in ("fragments", "delay", "mix1", "mix2") if getattr(args, key) is not None}
  several = "," in (args.method or "")
  return {key: value for key, value in given.items() if key in known or not several}


def utilization(args: argparse.Namespace) -> list[dict[str, Any]]:
  """The results of all cases, ready for JSON.

  Raises:
    ValueError: one sentence.
  """
  times, chaos = parse_step_times(args.step_seconds, args.jitter), chaos_of(args)
  if args.layers is not None and (chaos.any or times.jitter or len(times.seconds) > 1 or args.latency):
    raise ValueError(f"layers={args.layers}: the per-layer model knows no failures, stragglers or latency; leave them or "
                     "--layers out.")
  out = []
  for plan, params in plans_of(args):
    for text in args.bandwidth.split(","):
      links = read_links(text, plan.workers, args.latency)
      if args.layers is None:
        result = run(plan, links, times, chaos, args.rounds, args.seed)
      else:
        result = _layered(plan, links, times.seconds[0], args.layers)
      name = write_bandwidth(links.uniform) if links.uniform and links.rates.ndim == 1 else text
      out.append({"method": plan.method, "bandwidth": name, "bits_per_second": links.uniform, "workers": plan.workers,
                  "inner_steps": plan.steps, "params": params, **result})
  return out


def run(plan: Plan, links: Links, times: StepTimes, chaos: Chaos, rounds: int | None = None, seed: int = 0
        ) -> dict[str, Any]:
  """One simulation as a dict, with its closed form where there is one."""
  random = bool(chaos.any or times.jitter)
  result = dataclasses.asdict(simulate(plan, links, times, chaos.drops, chaos.crashes, chaos.pauses, chaos.on_crash,
                                       rounds or (RANDOM_ROUNDS if random else EXACT_ROUNDS), seed))
  expected = None
  if not (chaos.crashes.every or chaos.pauses.every or times.jitter) and len(set(times.seconds)) == 1:
    expected = closed.utilization(plan, links, times.seconds[0], chaos.drops)
  spans = result.pop("timeline")
  for key in ("failures", "finished"):
    result.pop(key)
  return {**result, "closed_form_utilization": expected,
          "timeline": [dict(zip(("lane", "what", "start", "end"), span)) for span in spans[:TIMELINE]]}


def _layered(plan: Plan, links: Links, step_seconds: float, layers: int) -> dict[str, Any]:
  """The per-layer model: reductions beside the backward pass."""
  rate = links.uniform
  if plan.method not in LAYERED:
    raise ValueError(f"layers={layers}: the per-layer model knows {', '.join(LAYERED)}, not {plan.method}.")
  if rate is None:
    raise ValueError(f"layers={layers}: the per-layer model needs equal links.")
  fragments = {"data_parallel": 0, "diloco": 1}.get(plan.method, len(plan.exchanges))
  delay = plan.exchanges[0].due - plan.exchanges[0].start if fragments > 1 else 0
  payload = sum(e.nbytes for e in plan.exchanges) / (1 if fragments else plan.steps)
  path = cost(plan.exchanges[0].kind, plan.workers).path if plan.exchanges else 0.0
  model = Layered(layers, step_seconds, max(8 * payload * path, 1e-9), plan.steps, fragments, delay)
  share = model.utilization(rate)
  compute = plan.steps * step_seconds
  return {"compute_utilization": share, "round_seconds": compute / share, "compute_seconds": compute,
          "stall_seconds": compute / share - compute, "down_seconds": 0.0, "bytes_overlapped": plan.bytes_overlapped,
          "bytes_blocking": plan.bytes_blocking, "layers": layers, "closed_form_utilization": None, "timeline": []}


def recommend(args: argparse.Namespace) -> dict[str, Any]:
  """For each method the fewest inner steps with which it reaches the wanted utilisation, fewest first.

  The simulator knows nothing of the loss: fewer inner steps are taken to be better, and bytes break a tie.

  Raises:
    ValueError: one sentence.
  """
  if not 0 < args.target <= 1:
    raise ValueError(f"target={args.target:g} must be above 0 and at most 1.")
  if args.params is None:
    raise ValueError("params is missing; give --params=1.5e9.")
  times = parse_step_times(args.step_seconds)
  links = read_links(args.bandwidth, args.workers, args.latency)
  none = Chaos(Drops(), Interruptions(), Interruptions(), "wait")
  rows = []
  for name in ("data_parallel", "diloco", "eager_diloco", "GlobalM1", "GlobalM1LocalM2", "GlobalM1LocalM2-subset",
               "LocalM1M2", "noloco", "gasloc", "pipelined_diloco"):
    best: dict[str, Any] = {}
    for steps in RECOMMEND_STEPS if name != "data_parallel" else (1,):
      parts = max(p for p in range(1, min(steps, 10) + 1) if steps % p == 0)
      options = {"fragments": parts} if name == "pipelined_diloco" else None
      plan = make_plan(name, args.params, 8 * args.bytes_per_param, args.workers, steps, options=options)
      result = run(plan, links, times, none, rounds=2)
      best = {"method": name, "inner_steps": steps, "reaches_target": result["compute_utilization"] >= args.target - 1e-9,
              **{key: result[key] for key in ("compute_utilization", "round_seconds", "bytes_overlapped", "bytes_blocking")}}
      if best["reaches_target"]:
        break
    rows.append(best)
  key = lambda r: (not r["reaches_target"], r["inner_steps"] if r["reaches_target"] else -r["compute_utilization"],
                   (r["bytes_overlapped"] + r["bytes_blocking"]) / max(r["inner_steps"], 1))
  rows.sort(key=key)
  return {"target": args.target, "recommended": rows[0]["method"] if rows[0]["reaches_target"] else None, "methods": rows}


def clean(value: Any) -> Any:
  """JSON has no infinity and no NaN: they become null."""
  if isinstance(value, dict):
    return {k: clean(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [clean(v) for v in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
