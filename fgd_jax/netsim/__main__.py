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
from collections.abc import Sequence
from typing import Any, NoReturn

from fgd_jax import methods
from fgd_jax.netsim import cases, published, show
from fgd_jax.netsim.failures import UNITS, YEAR
from fgd_jax.netsim.goodput import WEEK, ChipFailures, simulate_goodput
from fgd_jax.netsim.links import KINDS


class _Parser(argparse.ArgumentParser):
  """Says what is wrong in one sentence."""

  def error(self, message: str) -> NoReturn:
    print(f"Error: {message} (see {self.prog} --help).", file=sys.stderr)
    raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
  """All commands and their options."""
  top = _Parser(prog="python -m fgd_jax.netsim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False)
  commands = top.add_subparsers(dest="command", required=True, metavar="utilization|table|goodput|recommend")
  add = lambda name, help: commands.add_parser(name, help=help, description=help, allow_abbrev=False)

  p = add("utilization", "Simulate rounds of methods on links: compute utilisation, bytes, stalls, a timeline.")
  p.add_argument("--method", help="comma separated: " + ", ".join([*methods.METHODS, *methods.PRESETS]) +
                 " (default GlobalM1LocalM2, or the config's)")
  p.add_argument("--config", help="training config FILE[:settings]: workers, inner steps, bytes as its round "
                 "counts them")
  p.add_argument("--params", type=float, help="parameters of the model")
  p.add_argument("--bytes-per-param", type=float, help="that travel without a codec (default 2)")
  p.add_argument("--bits-per-param", type=float, help="that travel, instead of --bytes-per-param or --codec")
  p.add_argument("--codec", help="none, bf16, int8, int4, e3m0 or topk, with the scales of its blocks")
  p.add_argument("--workers", type=int, help="M (default 8)")
  p.add_argument("--inner-steps", type=int, help="H (default 100)")
  p.add_argument("--step-seconds", required=True, help="of an inner step; a;b;c for each worker")
  p.add_argument("--jitter", default="0", help="coefficient of variation of step times: 0.2, gamma:0.2, uniform:0.1")
  p.add_argument("--bandwidth", required=True, help="100Mbps, comma separated cases; a;b;c for each worker, or a file with "
                 "a matrix [from, to]")
  p.add_argument("--latency", type=float, default=0.0, help="seconds for each message")
  p.add_argument("--transfer", default="ring", choices=KINDS, help="how a mean over workers travels")
  p.add_argument("--subset-share", type=float, help="share of the parameters in Mix2 of -subset (default 0.432)")
  p.add_argument("--fragments", type=int, help="of streaming_diloco and pipelined_diloco")
  p.add_argument("--delay", type=int, help="inner steps that a fragment of streaming_diloco may travel")
  p.add_argument("--mix1", help="topology of fgd's Mix1")
  p.add_argument("--mix2", help="topology of fgd's Mix2")
  p.add_argument("--layers", type=int, help="per-layer model of " + ", ".join(cases.LAYERED) + " (arXiv 2501.18512)")
  p.add_argument("--drop", type=float, default=0.0, help="probability that communication fails")
  p.add_argument("--drop-unit", default="message", choices=UNITS, help="of what that is the probability")
  p.add_argument("--drop-at", default="end", choices=("end", "uniform"), help="when a failure is noticed")
  p.add_argument("--late-mix1", default="skip", choices=("skip", "wait"), help="what a failed overlapped mean does when due")
  p.add_argument("--crash-every", type=float, default=0.0, help="mean seconds of computing between crashes of a worker")
  p.add_argument("--crash-seconds", type=float, default=0.0, help="until it is back")
  p.add_argument("--crash-shape", type=float, default=1.0, help="Weibull shape of the time between them (1: Poisson)")
  p.add_argument("--on-crash", default="wait", choices=("wait", "proceed"), help="what the other workers do")
  p.add_argument("--pause-every", type=float, default=0.0, help="mean seconds of computing between pauses of a worker")
  p.add_argument("--pause-seconds", type=float, default=0.0, help="mean length of a pause")
  p.add_argument("--rounds", type=int, help="simulated (default 3, or 200 where anything is random)")
  p.add_argument("--seed", type=int, default=0)
  p.add_argument("--plot", help="write a picture to this PNG file")
  p.add_argument("--json", action="store_true", help="print one JSON object; of several cases, under `results`")

  p = add("table", "A published table beside what the simulator makes of it.")
  p.add_argument("name", choices=("fgd", "streaming", "goodput", "failures"))
  p.add_argument("--size", default="1B", choices=tuple(published.SIZES), help="model of the streaming table")
  p.add_argument("--drop", type=float, default=0.05, help="probability of the failures table")
  p.add_argument("--bandwidth", default="200Mbps", help="of the failures table")
  p.add_argument("--seed", type=int, default=0)
  p.add_argument("--json", action="store_true", help="print one JSON object")

  p = add("goodput", "Share of the chips' time that does useful work, with chips that fail (arXiv 2604.21428).")
  model = ChipFailures()
  p.add_argument("--learners", type=int, default=8, help="M, each elastic; 1 is elastic data parallelism")
  p.add_argument("--chips", type=int, default=1_200_000, help="of all learners")
  p.add_argument("--rigid", action="store_true", help="no elasticity: a failure stalls the learner until it has restarted")
  p.add_argument("--chip-years", type=float, default=1.0, help="mean time between failures of a chip")
  p.add_argument("--shape", type=float, default=1.0, help="Weibull shape of chips' lifetimes (1: Poisson)")
  for key in ("restart", "scale_down", "scale_up", "gather", "away"):
    p.add_argument("--" + key.replace("_", "-"), type=float, default=getattr(model, key), help=f"seconds (default "
                   f"{getattr(model, key):g}; goodput.py says what of)")
  p.add_argument("--slice-chips", type=int, default=model.slice_chips, help="chips that are away with a failed one")
  p.add_argument("--barrier-seconds", type=float, default=0.0, help="learners wait for each other after so many seconds of "
                 "computing, as in DiLoCo (default 0: never)")
  p.add_argument("--days", type=float, default=7.0, help="simulated")
  p.add_argument("--seed", type=int, default=0)
  p.add_argument("--json", action="store_true", help="print one JSON object")

  p = add("recommend", "The fewest inner steps with which each method reaches a utilisation.")
  p.add_argument("--bandwidth", required=True, help="of each worker, such as 1Gbps")
  p.add_argument("--params", type=float, help="parameters of the model")
  p.add_argument("--bytes-per-param", type=float, default=2.0)
  p.add_argument("--step-seconds", required=True, help="of an inner step")
  p.add_argument("--workers", type=int, default=cases.WORKERS)
  p.add_argument("--latency", type=float, default=0.0, help="seconds for each message")
  p.add_argument("--target", type=float, default=0.9, help="utilisation that is wanted")
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
  print(json.dumps(cases.clean(answer)) if args.json else text)


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
  if r["timeline"]:
    notes += ["first round:", show.timeline([argparse.Namespace(**span) for span in r["timeline"]])]
  return r, "\n".join(notes).rstrip()


def _table(args: argparse.Namespace) -> tuple[Any, str]:
  if args.name == "streaming":
    cells = published.streaming_cells(args.size)
    values = {m: [c.simulated for c in cells if c.row == m] for m in dict.fromkeys(c.row for c in cells)}
    write = lambda c: f"{c.simulated:.1f}" + ("" if math.isnan(c.published) else f" ({c.published:g})")
    rows = [[m, *(write(c) for c in cells if c.row == m)] for m in values]
    text = show.table(rows, [f"Gbit/s, {args.size}", *(f"{t:.0%}" for t in published.TARGETS)])
    known = [(c, published.grid_steps(c.published, c.simulated)) for c in cells if not math.isnan(c.published)]
    if known:
      same, near = sum(s == 0 for _, s in known), sum(abs(s) <= 1 for _, s in known)
      text += (f"\n(published, arXiv 2501.18512) {same} of {len(known)} cells are the same value of the grid, {near} within "
               "one step of it; others: " + (", ".join(f"{c.row} {c.column} {s:+d}" for c, s in known if s) or "none"))
    return values, text
  if args.name == "failures":
    return _failures(args)
  cells = published.fgd_table() if args.name == "fgd" else published.goodput_table(args.seed)
  head = ("method", "bandwidth") if args.name == "fgd" else ("job", "chips")
  rows = [[c.row, c.column, f"{c.published:g}", f"{c.simulated:.1f}", f"{c.simulated - c.published:+.1f}"] for c in cells]
  return {"cells": [c._asdict() for c in cells]}, show.table(rows, (*head, "published %", "simulated %", "difference"))


def _failures(args: argparse.Namespace) -> tuple[Any, str]:
  rows = published.failure_table(args.drop, args.bandwidth, seed=args.seed)
  parts = []
  for unit, what in (("message", "message (a collective, or the swap of a pair)"), ("link", "link of a worker")):
    keys = (unit, f"{unit}_closed_form", f"{unit}_retries", f"{unit}_skipped", f"{unit}_lost_pairs")
    parts.append(f"A failure with probability {args.drop:g} of each {what}, {args.bandwidth}:\n" + show.table(
        [[r["method"], r["none"], *(r[k] for k in keys)] for r in rows],
        ("method", "no failures %", "with them %", "closed form %", "retries", "means given up", "pairs without exchange")))
  return {"drop": args.drop, "bandwidth": args.bandwidth, "rows": rows}, "\n\n".join(parts) + (
      "\nRetries and the rest are counts a round.")


def _goodput(args: argparse.Namespace) -> tuple[Any, str]:
  model = ChipFailures(args.chip_years * YEAR, args.shape, args.restart, args.scale_down, args.scale_up, args.gather,
                       args.slice_chips, args.away)
  result = dataclasses.asdict(simulate_goodput(
      args.learners, args.chips, model, not args.rigid, args.days / 7 * WEEK, args.seed, args.barrier_seconds))
  if args.shape != 1:
    result["closed_form"] = math.nan
  expected = "" if math.isnan(result["closed_form"]) else f" (closed form {100 * result['closed_form']:.1f} %)"
  return {"learners": args.learners, "chips": args.chips, **result}, (
      f"goodput {100 * result['goodput']:.1f} %{expected}, uptime {100 * result['uptime']:.2f} %: {args.learners} "
      f"{'rigid' if args.rigid else 'elastic'} learners on {args.chips:,} chips, {result['failures']:,} failures and "
      f"{result['stalls']:,} stalls in {args.days:g} days")


def _recommend(args: argparse.Namespace) -> tuple[Any, str]:
  answer = cases.recommend(args)
  rows = [[r["method"], r["inner_steps"], f"{100 * r['compute_utilization']:.1f} %", "yes" if r["reaches_target"] else "no",
           f"{r['bytes_overlapped'] / 1e9:.4g}", f"{r['bytes_blocking'] / 1e9:.4g}"] for r in answer["methods"]]
  text = show.table(rows, ("method", "inner steps", "utilisation", f"{args.target:.0%}", "GB overlapped", "GB blocking"))
  return answer, text + (f"\nFewest inner steps: {answer['recommended']}; what they do to the loss is not simulated."
                         if answer["recommended"] else "\nNo method gets there.")


if __name__ == "__main__":
  main()
