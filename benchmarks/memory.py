"""What one worker holds on a device: copies of the parameters by algebra against the compiler's figures, as Markdown.

    python benchmarks/memory.py [--only=v5e] [--part=methods]      every method and form of overlap, 109M parameters
    python benchmarks/memory.py --part=llama                       configs/llama_1p5b.py on v5e (16 GB) and v5p (95 GB)

Compiled ahead of time for TPUs that are not there (pip install '.[aot]'); half a minute a row, minutes for llama.

Unit of the first columns: one copy of the parameters, a device's shard of them in float32.

    z          parameters at the start of the round            moments   of AdamW, two
    w          inner parameters, where z is needed after the   momentum  of the outer optimizer
               inner steps (methods with an outer step)        raw       what Mix1 has in flight, one for each message
    grads      one, two with accumulation                      send      packed forms: the buffer that is sent

The baseline, plain AdamW, is the method `local`: z, moments and grads, with w in z's place. The ring form works in its one
buffer. The compiler: arguments + outputs + temporaries - donated + code = reserved, what the device must have free; `peak`
is the most that is in use at one time, by the compiler's own account, and the rest of the reservation is lost between
buffers of different sizes and lifetimes. `donated` must cover the state, that is z + moments + momentum. `activations` is
the peak without all copies; `over AdamW` is the peak less the peak of `local`, in copies, to be at most 3 (w, momentum,
raw), and one more where a buffer is packed; `reserved over` is the same of the reservation.
"""

from __future__ import annotations

import argparse
import math
import runpy
from typing import NamedTuple

import jax

from fgd_jax import aot, models, sharding
from fgd_jax import config as configs
from fgd_jax.mixing import path_of
from fgd_jax.mixing.pack import local_shape

SMALL = ("workers=4,mesh.fsdp=2,inner_steps=16,batch_size=2,seq_len=256,model.vocab_size=8192,model.dim=1024,model.layers=8,"
         "model.heads=16,model.kv_heads=8,model.ffn_dim=2816")
TARGETS = ("v5p:2x2x2", "v5e:2x4")
METHODS = {"local": ("auto",), "diloco": ("auto",), "GlobalM1": ("packed", "barrier", "ring"),
           "GlobalM1LocalM2": ("packed", "barrier", "ring"), "LocalM1M2": ("packed", "barrier")}
# target, workers, fsdp, methods
LLAMA = [("v5e:4x4", 2, 8, ("local", "GlobalM1LocalM2-subset", "LocalM1M2")),
         ("v5p:2x2x2", 4, 2, ("local", "GlobalM1LocalM2-subset", "LocalM1M2"))]
HEAD = ("target", "workers x fsdp", "method", "form", "copy, MB", "z", "w", "moments", "momentum", "grads", "raw", "send",
        "sum, MB", "arguments", "outputs", "temporaries", "donated", "code", "reserved, MB", "peak, MB", "activations",
        "over AdamW", "reserved over", "state donated")


class Copies(NamedTuple):
  """Copies of the parameters by algebra."""

  z: int
  w: int
  moments: int
  momentum: int
  grads: int
  raw: int
  send: int

  @property
  def state(self) -> int:
    return self.z + self.moments + self.momentum


def algebra(config, form: str) -> Copies:
  method = configs.make_method(config).bind(config.workers)
  mix1, outer = method.overlapped, int(config.method.name != "local")
  messages = 0 if mix1 is None else 1 if mix1.topology.bank[0].mean else mix1.topology.bank[0].messages()
  return Copies(z=1, w=outer, moments=2, momentum=outer, grads=2 if config.accumulate > 1 else 1, raw=messages,
                send=int(form == "packed" and messages > 0))


def shard_bytes(config) -> int:
  """One copy: a device's shard of the float32 parameters."""
  model = models.make(configs.make_model_config(config, config.model.vocab_size))
  params = jax.eval_shape(model.init, jax.random.key(0))
  specs, total = sharding.param_specs(params, sharding.LLAMA_RULES), 0
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    total += math.prod(local_shape(leaf.shape, specs[path_of(path)], {"fsdp": config.mesh.fsdp})) * leaf.dtype.itemsize
  return total


class Held(NamedTuple):
  """Bytes of a device: in use at the peak, and reserved, both without code."""

  peak: float
  reserved: float


def row(target: str, config, base: Held | None) -> Held | None:
  """Prints a row; returns what a device holds. `base`: of plain AdamW."""
  copy = shard_bytes(config)
  cells = [target, f"{config.workers} x {config.mesh.fsdp}", config.method.name]
  try:
    report = aot.compile_round(config, target)
  except (ValueError, aot.AotError) as e:
    print("| " + " | ".join([*cells, config.overlap.form, " ".join(str(e).split())[:300]]) + " |", flush=True)
    return None
  copies, m = algebra(config, report.form), report.memory
  held = Held(m["peak_memory"], report.peak_bytes_per_device - m["generated_code_size"])
  over = ["", ""] if base is None else [f"{(now - then) / copy:.2f}" for now, then in zip(held, base)]
  mb = lambda size: f"{size / 1e6:.0f}"
  cells += [report.form, mb(copy), *map(str, copies), mb(sum(copies) * copy),
            *(mb(m[f"{key}_size"]) for key in ("argument", "output", "temp", "alias", "generated_code")),
            mb(report.peak_bytes_per_device), mb(held.peak), mb(held.peak - sum(copies) * copy), *over,
            "yes" if m["alias_size"] >= copies.state * copy else "NO"]
  print("| " + " | ".join(cells) + " |", flush=True)
  return held


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--part", choices=("methods", "llama", "all"), default="all")
  parser.add_argument("--only", default="", help="rows whose target or method contains this word; `local` always runs")
  parser.add_argument("--set", default="", help="settings for all rows, e.g. model.layers=4,batch_size=4")
  args = parser.parse_args()
  runs = []
  if args.part != "llama":
    runs += [(target, "configs/overlap.py", SMALL, METHODS) for target in TARGETS]
  if args.part != "methods":
    runs += [(target, "configs/llama_1p5b.py", f"workers={workers},mesh.fsdp={fsdp}", dict.fromkeys(methods, ("auto",)))
             for target, workers, fsdp, methods in LLAMA]
  print("| " + " | ".join(HEAD) + " |")
  print("| --- " * len(HEAD) + "|", flush=True)
  for target, path, settings, methods in runs:
    get_config, base = runpy.run_path(path)["get_config"], None
    for method, forms in methods.items():
      if args.only not in f"{target} {method}" and (method != "local" or not any(args.only in m for m in methods)):
        continue
      for form in forms:
        words = filter(None, (settings, args.set, f"method={method},overlap.form={form}"))
        held = row(target, get_config(",".join(words)), base)
        base = held if method == "local" else base


if __name__ == "__main__":
  main()
