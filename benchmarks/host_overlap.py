"""Does the host form hide a slow link? Two CPU processes train together; Mix1 reaches one of them late.

    python benchmarks/host_overlap.py [--delay=1.0] [--rounds=6] [--json]

The slow link is a pause before the second process joins Mix1. Printed for the first process: the round's time in one
program (pause and inner steps one after the other) and in the host form (beside each other), the order of events in the
host form, and whether both forms give the same numbers bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--delay", type=float, default=1.0, help="seconds by which the second process joins Mix1 later")
  parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each form")
  parser.add_argument("--inner-steps", type=int, default=200, help="H")
  parser.add_argument("--dim", type=int, default=512, help="width of the two-layer model")
  parser.add_argument("--json", action="store_true")
  parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
  parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.process is not None:
    run(args)
    return
  with socket.socket() as s:
    s.bind(("localhost", 0))
    port = s.getsockname()[1]
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
  processes = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], f"--process={i}", f"--port={port}"], env=env,
                                stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL, text=True) for i in range(2)]
  try:
    out, _ = processes[0].communicate(timeout=600)
  finally:
    for p in processes:
      p.kill()
  if processes[0].returncode:
    sys.exit("A process failed; its error is above.")
  result = json.loads(out.splitlines()[-1])
  if args.json:
    print(json.dumps(result))
    return
  print(f"inner steps {result['inner_seconds']:.2f} s, Mix1 late by {args.delay:.2f} s; medians of {args.rounds} rounds")
  print(f"{'form':12s} {'round, s':>9s}")
  print(f"{'one program':12s} {result['one_program_seconds']:9.2f}   inner steps + Mix1")
  print(f"{'host':12s} {result['host_seconds']:9.2f}   the longer of the two")
  print("order of events in the host form:", " < ".join(result["events"]))
  print("same numbers, bit for bit:", result["bitwise_equal"])


def run(args: argparse.Namespace) -> None:
  """One of the two processes; the first prints the figures."""
  import jax
  jax.distributed.initialize(f"localhost:{args.port}", 2, args.process)
  import numpy as np
  import optax

  import fgd_jax as fgd

  def loss(params, batch, rng):
    return ((jax.nn.tanh(batch @ params["a"]) @ params["b"]) ** 2).mean()

  rng = np.random.default_rng(0)
  params = {"a": rng.normal(size=(args.dim, args.dim)).astype(np.float32) / args.dim**0.5,
            "b": rng.normal(size=(args.dim, 8)).astype(np.float32)}
  batches = rng.normal(size=(2, args.inner_steps, 64, args.dim)).astype(np.float32)
  mesh = jax.make_mesh((2,), ("worker",))

  def late(call: Any) -> Any:
    """The call of the second process, made after the pause."""
    def delayed(*args_):
      time.sleep(args.delay)
      return call(*args_)
    return delayed if args.process else call

  def measure(form: str) -> tuple[Any, list[float], list[dict[str, float]]]:
    init, round_fn = fgd.build_round(fgd.methods.make("GlobalM1"), loss, optax.adamw(1e-3),
                                     workers=fgd.Workers(2, mesh), overlap=form)
    state, times, lines = init(params), [], []
    if form == "host":
      (program,) = round_fn.compile(state, batches).values()
      program.start = late(program.start)
      step = round_fn
    else:
      round_fn.compile(state, batches)
      step = late(round_fn)
    for _ in range(args.rounds + 1):
      began = time.monotonic()
      state, _ = step(state, batches)
      jax.block_until_ready(state.params)
      times.append(time.monotonic() - began)
      if form == "host":
        lines.append(dict(program.timeline))
    local = [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(state[:3])]
    return local, times[1:], lines[1:]

  one, one_times, _ = measure("barrier")
  host, host_times, lines = measure("host")
  if args.process == 0:
    order = lambda line: [event for event, _ in sorted(line.items(), key=lambda item: item[1])]
    inner = np.median([line["inner_done"] - line["begin"] for line in lines])
    print(json.dumps({
        "delay_seconds": args.delay, "inner_seconds": float(inner), "one_program_seconds": float(np.median(one_times)),
        "host_seconds": float(np.median(host_times)), "events": order(lines[-1]),
        "same_order_every_round": all(order(line) == order(lines[-1]) for line in lines),
        "bitwise_equal": all(np.array_equal(a, b) for a, b in zip(one, host))}))
  jax.distributed.shutdown()


if __name__ == "__main__":
  main()
