"""Compute utilisation of a method on a network, goodput on failing chips, and the published tables.

    python -m fgd_jax.netsim utilization --method=GlobalM1LocalM2 --params=1.498e9 --step-seconds=2.35 --bandwidth=100Mbps
    python -m fgd_jax.netsim utilization --method=diloco,GlobalM1 --params=1.498e9 --step-seconds=2.35 \\
        --bandwidth=100Mbps,200Mbps,1Gbps --plot=utilization.png
    python -m fgd_jax.netsim utilization --config=configs/llama_1p5b.py:workers=16 --step-seconds=2.35 --bandwidth=1Gbps
    python -m fgd_jax.netsim table fgd          (or: streaming --size=1B, goodput, failures)
    python -m fgd_jax.netsim goodput --learners=8 --chips=1200000
    python -m fgd_jax.netsim recommend --bandwidth=1Gbps --params=1.5e9 --step-seconds=2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fgd_jax import methods
from fgd_jax.netsim import cases, published, show
from fgd_jax.netsim.failures import MOST_SECONDS, UNITS, parse_step_times
from fgd_jax.netsim.goodput import DAY, YEAR, ChipFailures, simulate_goodput
from fgd_jax.netsim.links import KINDS, read_links
from fgd_jax.netsim.plan import MOST_WORKERS
from fgd_jax.netsim.recommend import NO_ROUNDS, recommend


class _Parser(argparse.ArgumentParser):
  """Says what is wrong in one sentence."""

  def error(self, message: str) -> NoReturn:
    print(f"Error: {message} (see {self.prog} --help).", file=sys.stderr)
    raise SystemExit(2)


def _number(kind: Callable[[str], Any], words: str, least: float, most: float) -> Callable[[str], Any]:
  """The type of an option: an int or a float in a range, which `words` say."""
  def parse(text: str) -> Any:
    try:
      value = kind(text)
    except ValueError:
      value = math.nan
    if not least <= value <= most:
      raise argparse.ArgumentTypeError(f"{text!r} must be {words}")
    return value
  return parse


COUNT = _number(int, "a whole number, at least 1", 1, 1e12)
WORKERS = _number(int, f"a whole number from 1 to {MOST_WORKERS}", 1, MOST_WORKERS)
NATURAL = _number(int, "a whole number, at least 0", 0, 1e12)
POSITIVE = _number(float, "a number above 0, at most 1e18", 1e-18, 1e18)
SECONDS = _number(float, f"a number of seconds from 0 to {MOST_SECONDS:g}", 0, MOST_SECONDS)
SHARE = _number(float, "a number from 0 to 1", 0, 1)


def parser() -> argparse.ArgumentParser:
  """All commands and their options. What was not given is None, so that an option without effect can be refused."""
  top = _Parser(prog="python -m fgd_jax.netsim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False)
  commands = top.add_subparsers(dest="command", required=True, metavar="utilization|table|goodput|recommend")
  add = lambda name, help: commands.add_parser(name, help=help, description=help, allow_abbrev=False)

  p = add("utilization", "Simulate rounds of methods on links: compute utilisation, bytes, stalls, a timeline.")
  p.add_argument("--method", help="comma separated: " + ", ".join([*methods.METHODS, *methods.PRESETS]) +
                 " (default GlobalM1LocalM2, or the config's)")
  p.add_argument("--config", help="training config FILE[:settings]: workers, inner steps, bytes as its round "
                 "counts them")
  p.add_argument("--params", type=POSITIVE, help="parameters of the model")
  p.add_argument("--bytes-per-param", type=POSITIVE, help="that travel without a codec (default 2)")
  p.add_argument("--bits-per-param", type=POSITIVE, help="that travel, instead of --bytes-per-param or --codec")
  p.add_argument("--codec", help="none, bf16, int8, int4, e3m0 or topk, with the scales of its blocks; means are then "
                 "all-gathers")
  p.add_argument("--workers", type=WORKERS, help=f"M (default {cases.WORKERS})")
  p.add_argument("--inner-steps", type=COUNT, help=f"H (default {cases.STEPS})")
  p.add_argument("--step-seconds", required=True, help="of an inner step; a;b;c for each worker")
  p.add_argument("--jitter", help="coefficient of variation of step times: 0.2, gamma:0.2, uniform:0.1 (default 0)")
  p.add_argument("--bandwidth", required=True, help="100Mbps, comma separated cases; a;b;c for each worker, or a file with "
                 "a matrix [from, to]")
  p.add_argument("--latency", type=SECONDS, help="seconds for each message (default 0)")
  p.add_argument("--transfer", choices=KINDS, help="how a mean over workers travels (default ring)")
  p.add_argument("--subset-share", type=POSITIVE, help="share of the parameters in Mix2 of -subset (default 0.432)")
  p.add_argument("--fragments", type=COUNT, help="of streaming_diloco and pipelined_diloco")
  p.add_argument("--delay", type=NATURAL, help="inner steps that a fragment of streaming_diloco may travel")
  p.add_argument("--mix1", help="topology of fgd's Mix1")
  p.add_argument("--mix2", help="topology of fgd's Mix2")
  p.add_argument("--layers", type=COUNT, help="per-layer model of " + ", ".join(cases.LAYERED) + " (arXiv 2501.18512)")
  p.add_argument("--drop", type=SHARE, help="probability that communication fails (default 0)")
  p.add_argument("--drop-unit", choices=UNITS, help="of what that is the probability (default message)")
  p.add_argument("--drop-at", choices=("end", "uniform"), help="when it is noticed (default end)")
  p.add_argument("--late-mix1", choices=("skip", "wait"), help="what a failed overlapped mean does then (default skip)")
  p.add_argument("--crash-every", type=SECONDS, help="mean seconds of computing between a worker's crashes (default: never)")
  p.add_argument("--crash-seconds", type=SECONDS, help="until it is back")
  p.add_argument("--crash-shape", type=POSITIVE, help="Weibull shape of the time between them (default 1: Poisson)")
  p.add_argument("--on-crash", choices=("wait", "proceed"), help="what the other workers do (default wait)")
  p.add_argument("--pause-every", type=SECONDS, help="mean seconds of computing between pauses of a worker (default: never)")
  p.add_argument("--pause-seconds", type=SECONDS, help="mean length of a pause")
  p.add_argument("--rounds", type=COUNT, help=f"simulated (default {cases.EXACT_ROUNDS}, or {cases.RANDOM_ROUNDS} where "
                 "they differ)")
  p.add_argument("--seed", type=NATURAL, help="of pairs, failures and step times (default 0)")
  p.add_argument("--plot", help="write a picture to this PNG file")
  p.add_argument("--json", action="store_true", help="print one JSON object; of several cases, under `results`")

  p = add("table", "A published table beside what the simulator makes of it.")
  p.add_argument("name", choices=("fgd", "streaming", "goodput", "failures"))
  p.add_argument("--size", choices=tuple(published.SIZES), help="model of the streaming table (default 1B)")
  p.add_argument("--bits", type=POSITIVE, help=f"a parameter, of the streaming table (default {published.BITS:g}, fitted)")
  p.add_argument("--drop", type=SHARE, help="probability of the failures table (default 0.05)")
  p.add_argument("--bandwidth", help="of the failures table (default 200Mbps)")
  p.add_argument("--seed", type=NATURAL, help="of the failures and goodput tables (default 0)")
  p.add_argument("--json", action="store_true", help="print one JSON object")

  p = add("goodput", "Share of the chips' time that does useful work, with chips that fail (arXiv 2604.21428).")
  model = ChipFailures()
  p.add_argument("--learners", type=COUNT, default=8, help="M, each elastic; 1 is elastic data parallelism (default 8)")
  p.add_argument("--chips", type=COUNT, default=1_200_000, help="of all learners (default 1200000)")
  p.add_argument("--rigid", action="store_true", help="no elasticity: a failure stalls a learner until it has restarted")
  p.add_argument("--chip-years", type=POSITIVE, default=1.0, help="mean time between failures of a chip (default 1)")
  p.add_argument("--shape", type=POSITIVE, default=1.0, help="Weibull shape of chips' lifetimes (default 1: Poisson)")
  for key, what in (("restart", "stall of a rigid learner"), ("scale_down", "stall of an elastic learner to go on without a "
                    "slice"), ("scale_up", "stall to take slices in again"), ("gather", "wait for more slices before that"),
                    ("away", "mean time for which a slice is away")):
    p.add_argument("--" + key.replace("_", "-"), type=SECONDS, help=f"seconds: {what} (default "
                   f"{getattr(model, key):g})")
  p.add_argument("--slice-chips", type=COUNT, help=f"chips that are away with a failed one (default {model.slice_chips})")
  p.add_argument("--barrier-seconds", type=SECONDS, default=0.0, help="learners wait for each other after so many "
                 "seconds of computing, as in DiLoCo (default 0: never)")
  p.add_argument("--days", type=POSITIVE, default=7.0, help="simulated (default 7)")
  p.add_argument("--seed", type=NATURAL, default=0)
  p.add_argument("--json", action="store_true", help="print one JSON object")

  p = add("recommend", "Rank methods and inner steps by simulated time to a loss, from measured losses of a small model.")
  p.add_argument("--bandwidth", required=True, help="of each worker, such as 1Gbps; a;b;c, or a file as in utilization")
  p.add_argument("--params", type=POSITIVE, required=True, help="parameters of the model")
  p.add_argument("--bytes-per-param", type=POSITIVE, default=2.0, help="that travel (default 2)")
  p.add_argument("--step-seconds", required=True, help="of an inner step; a;b;c for each worker")
  p.add_argument("--workers", type=WORKERS, default=cases.WORKERS, help=f"M (default {cases.WORKERS})")
  p.add_argument("--latency", type=SECONDS, default=0.0, help="seconds for each message (default 0)")
  p.add_argument("--steps", type=COUNT, default=10_000, help="in which DiLoCo with H = 10 reaches the loss (default 10000)")
  p.add_argument("--inner-steps", help="further H, comma separated, outside the ranking as their losses were not "
                 "measured; the methods with 5 fragments take multiples of 5")
  p.add_argument("--json", action="store_true", help="print one JSON object")
  return top


def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  try:
    command = {"utilization": _utilization, "table": _table, "goodput": _goodput, "recommend": _recommend}[args.command]
    answer, text = command(args)
  except (ValueError, OSError) as e:
    if os.environ.get("FGD_JAX_TRACEBACK"):
      raise
    print(f"Error: {' '.join(str(e).split())}", file=sys.stderr)
    raise SystemExit(2) from e
  try:
    print(json.dumps(cases.clean(answer)) if args.json else text, flush=True)
  except BrokenPipeError:  # `| head` has seen enough; what Python still writes at its end goes nowhere
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _utilization(args: argparse.Namespace) -> tuple[Any, str]:
  if args.plot and not os.path.isdir(os.path.dirname(args.plot) or "."):
    raise ValueError(f"The folder of {args.plot} does not exist.")
  results = cases.utilization(args)
  if args.plot:
    show.plot(args.plot, results)
  rows = [[r["method"], r["bandwidth"], f"{100 * r['compute_utilization']:.1f} %", r["round_seconds"], r["compute_seconds"],
           r["stall_seconds"], r["down_seconds"], f"{r['bytes_overlapped'] / 1e9:.4g}", f"{r['bytes_blocking'] / 1e9:.4g}"]
          for r in results]
  text = show.table(rows, ("method", "bandwidth", "utilisation", "round s", "compute s", "stall s", "down s",
                           "GB overlapped", "GB blocking"))
  if len(results) > 1:
    return {"results": results}, text
  r = results[0]
  notes = [text, ""]
  if r["closed_form_utilization"] is not None:
    notes.append(f"closed form: {100 * r['closed_form_utilization']:.1f} %")
  if r.get("retries") or r.get("skipped") or r.get("lost_pairs"):
    notes.append(f"a round: {r['retries']:.3g} collectives repeated, {r['skipped']:.3g} given up, "
                 f"{r['lost_pairs']:.3g} pairs kept their own value")
  if r.get("timeline"):
    notes += ["first round:", show.timeline([argparse.Namespace(**span) for span in r["timeline"]])]
    if r["timeline_left_out"]:
      notes.append(f"({r['timeline_left_out']} later spans of {len(r['timeline']) + r['timeline_left_out']} are left out)")
  return r, "\n".join(notes).rstrip()


def _table(args: argparse.Namespace) -> tuple[Any, str]:
  cases.refuse_idle(args, ("size", "bits"), args.name == "streaming", f"on the table {args.name}")
  cases.refuse_idle(args, ("drop", "bandwidth"), args.name == "failures", f"on the table {args.name}")
  cases.refuse_idle(args, ("seed",), args.name in ("failures", "goodput"), f"on the table {args.name}")
  if args.name == "streaming":
    return _streaming(**cases.given(args, size="1B", bits=published.BITS))
  if args.name == "failures":
    return _failures(**cases.given(args, drop=0.05, bandwidth="200Mbps", seed=0))
  cells = published.fgd_table() if args.name == "fgd" else published.goodput_table(args.seed or 0)
  head = ["method", "bandwidth"] if args.name == "fgd" else ["job", "chips"]
  rows = [[c.row, c.column, f"{c.published:g}", f"{c.simulated:.1f}", f"{c.simulated - c.published:+.1f}"] for c in cells]
  head += ["published %", "simulated %", "difference"]
  if args.name == "goodput":
    rows, head = [[*row, f"{c.standard_error:.1f}"] for row, c in zip(rows, cells)], [*head, "standard error"]
  return {"cells": [c._asdict() for c in cells]}, show.table(rows, head)


def _streaming(size: str, bits: float) -> tuple[Any, str]:
  cells = published.streaming_cells(size, bits)
  values = {m: [c.simulated for c in cells if c.row == m] for m in dict.fromkeys(c.row for c in cells)}
  write = lambda c: f"{c.simulated:.1f}" + ("" if math.isnan(c.published) else f" ({c.published:g})")
  rows = [[m, *(write(c) for c in cells if c.row == m)] for m in values]
  text = show.table(rows, [f"Gbit/s, {size}", *(f"{t:.0%}" for t in published.TARGETS)])
  known = [(c, published.grid_steps(c.published, c.simulated)) for c in cells
           if not math.isnan(c.published) and math.isfinite(c.simulated)]
  if known:
    same, near = sum(s == 0 for _, s in known), sum(abs(s) <= 1 for _, s in known)
    text += (f"\n(published, arXiv 2501.18512) {same} of {len(known)} cells are the same value of the grid, {near} within "
             "one step of it; others: " + (", ".join(f"{c.row} {c.column} {s:+d}" for c, s in known if s) or "none"))
  return values, text


def _failures(drop: float, bandwidth: str, seed: int) -> tuple[Any, str]:
  rows = published.failure_table(drop, bandwidth, seed=seed)
  parts = []
  for unit, what in (("message", "message (a collective, or the swap of a pair)"), ("link", "link of a worker")):
    keys = (unit, f"{unit}_closed_form", f"{unit}_retries", f"{unit}_skipped", f"{unit}_lost_pairs")
    parts.append(f"A failure with probability {drop:g} of each {what}, {bandwidth}:\n" + show.table(
        [[r["method"], r["none"], *(r[k] for k in keys)] for r in rows],
        ("method", "no failures %", "with them %", "closed form %", "retries", "means given up", "pairs without exchange")))
  return {"drop": drop, "bandwidth": bandwidth, "rows": rows}, "\n\n".join(parts) + (
      "\nRetries and the rest are counts a round.")


def _goodput(args: argparse.Namespace) -> tuple[Any, str]:
  cases.refuse_idle(args, ("restart",), args.rigid, "on elastic learners")
  cases.refuse_idle(args, ("scale_down", "scale_up", "gather", "away", "slice_chips"), not args.rigid, "on rigid learners")
  if args.barrier_seconds and args.learners == 1:
    raise ValueError(f"barrier_seconds={args.barrier_seconds:g} has no effect on one learner; leave it out.")
  own = {key: getattr(args, key) for key in ("restart", "scale_down", "scale_up", "gather", "away", "slice_chips")}
  model = ChipFailures(args.chip_years * YEAR, args.shape, **{key: value for key, value in own.items() if value is not None})
  result = dataclasses.asdict(simulate_goodput(
      args.learners, args.chips, model, not args.rigid, args.days * DAY, args.seed, args.barrier_seconds))
  expected = "" if math.isnan(result["closed_form"]) else f" (closed form {100 * result['closed_form']:.1f} %)"
  return {"learners": args.learners, "chips": args.chips, **result}, (
      f"goodput {100 * result['goodput']:.1f} %{expected}, uptime {100 * result['uptime']:.2f} %: {args.learners} "
      f"{'rigid' if args.rigid else 'elastic'} learners on {args.chips:,} chips, {result['failures']:,} failures and "
      f"{result['stalls']:,} stalls in {args.days:g} days")


def _recommend(args: argparse.Namespace) -> tuple[Any, str]:
  try:
    further = tuple(COUNT(word) for word in (args.inner_steps or "").split(",") if word)
  except argparse.ArgumentTypeError as e:
    raise ValueError(f"inner_steps: {e}.") from e
  answer = recommend(args.params, 8 * args.bytes_per_param, read_links(args.bandwidth, args.workers, args.latency),
                     parse_step_times(args.step_seconds), args.steps, further)
  rows = [["-" if r["rank"] is None else str(r["rank"]), r["name"], "any" if r["name"] in NO_ROUNDS else r["inner_steps"],
           f"{100 * r['compute_utilization']:.1f} %", f"{r['relative_steps']:.2f}" + ("" if r["trained"] else " ?"),
           f"{r['hours']:.4g}"] for r in answer["methods"]]
  best = answer["recommended"]
  return answer, "\n".join([
      show.table(rows, ("rank", "method", "H", "utilisation", "relative steps", "hours")), "",
      f"Hours to the loss that DiLoCo with H = 10 reaches in {args.steps:,} steps; soonest: {best['name']}, H = "
      f"{best['inner_steps']}.", "Assumed:", *(f"* {text}" for text in answer["assumptions"])])


if __name__ == "__main__":
  main()
