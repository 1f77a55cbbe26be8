"""What a round costs over bare training, as ratios of CPU time measured in one process, interleaved.

    python benchmarks/round_overhead.py [--pairs=9] [--steps=100]

1. One worker's round (diloco, M = 1) against a bare jitted optax scan over the same steps, about 4M parameters; the
   figure is bare / round (1: no overhead).
2. Cost per token of M = 4 and 8 workers, on one device and on virtual devices, against M = 1.
CPU time of the process is compared, because wall time on a shared machine is not repeatable.
"""

import argparse
import os
import time

os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import fgd_jax as fgd  # noqa: E402
from fgd_jax import models  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--pairs", type=int, default=9, help="interleaved repetitions (at least 7)")
parser.add_argument("--steps", type=int, default=100, help="H of the first table")
parser.add_argument("--skip-overhead", action="store_true", help="only the second table")
args = parser.parse_args()


def model_of(dim: int, layers: int) -> models.Model:
  return models.make(models.LlamaConfig(vocab_size=256, dim=dim, layers=layers, heads=4, kv_heads=4, ffn_dim=3 * dim))


def tokens(workers: int, steps: int, batch: int, length: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  return {"tokens": rng.integers(0, 256, (workers, steps, batch, length + 1), dtype=np.int32)}


def cpu_seconds(f) -> float:
  start = time.process_time()
  jax.block_until_ready(f())
  return time.process_time() - start


def quartiles(values) -> str:
  low, mid, high = np.percentile(values, [25, 50, 75])
  return f"{mid:7.3f}   [{low:.3f}, {high:.3f}]"


optimizer = optax.adamw(1e-3)


def overhead() -> None:
  model = model_of(256, 4)
  params = model.init(jax.random.key(0))
  batches = tokens(1, args.steps, 1, 32)

  def bare(params, opt_state, tokens_HxBxL):
    def step(carry, batch):
      params, opt_state = carry
      loss, grads = jax.value_and_grad(model.loss)(params, {"tokens": batch}, None)
      updates, opt_state = optimizer.update(grads, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), loss

    (params, opt_state), loss = jax.lax.scan(step, (params, opt_state), tokens_HxBxL)
    return params, opt_state, loss

  bare = jax.jit(bare, donate_argnums=(0, 1))
  init, round_fn = fgd.build_round(fgd.methods.make("diloco"), model.loss, optimizer, workers=fgd.Workers(1))
  carried = {"round": init(params), "bare": (jax.tree.map(jnp.copy, params), optimizer.init(params))}

  def run_round():
    carried["round"], metrics = round_fn(carried["round"], batches)
    return metrics["loss"], carried["round"].params

  def run_bare():
    params, opt_state, loss = bare(*carried["bare"], batches["tokens"][0])
    carried["bare"] = (params, opt_state)
    return loss, params

  run_round(), run_bare(), cpu_seconds(run_round), cpu_seconds(run_bare)  # compile, warm up
  pairs = []
  for i in range(args.pairs):  # which goes first alternates
    first, second = (run_round, run_bare) if i % 2 else (run_bare, run_round)
    a, b = cpu_seconds(first), cpu_seconds(second)
    pairs.append((a, b) if i % 2 else (b, a))
  ratio = [b / r for r, b in pairs]
  print(f"{models.count_params(params):,} parameters, H = {args.steps}, batch 1 x 32 tokens, {args.pairs} pairs")
  print(f"CPU time bare scan / round, median [quartiles]: {quartiles(ratio)}    (target: at least 0.97)\n", flush=True)


def per_token() -> None:
  model = model_of(96, 2)
  params = model.init(jax.random.key(0))
  steps = 10
  cases = [("M = 1, one device", 1, None), ("M = 4, one device", 4, None), ("M = 4, 4 virtual devices", 4, 4),
           ("M = 8, one device", 8, None), ("M = 8, 8 virtual devices", 8, 8), ("M = 8, 2 virtual devices", 8, 2)]
  runs = []
  for _, workers, size in cases:
    mesh = None if size is None else jax.make_mesh((size,), ("worker",))
    init, round_fn = fgd.build_round(fgd.methods.make("GlobalM1LocalM2"), model.loss, optimizer,
                                     workers=fgd.Workers(workers, mesh))
    box = [init(params)]
    batches = tokens(workers, steps, 4, 64)

    def run(box=box, round_fn=round_fn, batches=batches):
      box[0], metrics = round_fn(box[0], batches)
      return metrics["loss"], box[0].params

    cpu_seconds(run), cpu_seconds(run)
    runs.append(run)
  times = np.array([[cpu_seconds(run) / workers for run, (_, workers, _) in zip(runs, cases)] for _ in range(args.pairs)])
  print(f"{models.count_params(params):,} parameters, GlobalM1LocalM2, H = {steps}, batch 4 x 64 tokens a worker")
  print(f"{'placement':28} CPU time per token against M = 1, median [quartiles]")
  for i, (name, _, _) in enumerate(cases):
    print(f"{name:28} {quartiles(times[:, i] / times[:, 0])}")


if not args.skip_overhead:
  overhead()
per_token()
