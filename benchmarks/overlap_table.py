"""Does Mix1 stand beside the inner steps in the compiled program? One ahead-of-time compilation a row, as a Markdown table.

    python benchmarks/overlap_table.py [--only=v5e] [--commands]

docs/overlap.md keeps the result. Needs libtpu (pip install '.[aot]') and, for the h100 rows, the wheels jax-cuda12-plugin
and jax-cuda12-pjrt; rows whose compiler is missing say so. About half a minute a row on two cores; --only takes rows whose
target contains a word.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

METHODS = {
    "GlobalM1": "method=GlobalM1",
    "GlobalM1LocalM2": "method=GlobalM1LocalM2",
    "GlobalM1LocalM2-subset": "method=GlobalM1LocalM2-subset",
    "LocalM1M2": "method=LocalM1M2",
    "striped Mix1": "method=fgd,method.mix1=striped_pairs,method.mix2=random_pairs",
    "group means": "method=fgd,method.mix1=random_groups:group_size=2,method.mix2=random_pairs",
    "noloco": "method=noloco",
    "eager": "method=eager_diloco",
    "streaming, delay 1": "method=streaming_diloco,method.fragments=8,method.order=flat,method.delay=1",
    "pipelined": "method=pipelined_diloco,method.fragments=8",
}
FGD = tuple(METHODS)[:6]
MEAN, BOTH = ("GlobalM1LocalM2",), ("GlobalM1LocalM2", "LocalM1M2")

# target, slices, workers, fsdp, methods
ROWS = [
    ("v5e:2x4", 1, 8, 1, FGD), ("v5e:2x4", 1, 4, 2, BOTH),
    ("v5p:2x2x2", 1, 8, 1, FGD), ("v5p:2x2x2", 1, 4, 2, BOTH),
    ("v6e:2x4", 1, 8, 1, BOTH), ("v6e:2x4", 1, 4, 2, BOTH),
    ("tpu7x:2x2x1", 1, 8, 1, BOTH), ("tpu7x:2x2x1", 1, 4, 2, BOTH),
    ("v5e:2x2", 2, 2, 4, BOTH), ("v5e:2x2", 2, 4, 2, BOTH), ("v5e:2x2", 2, 8, 1, MEAN),
    ("v5p:2x2x1", 2, 2, 4, BOTH), ("v5p:2x2x1", 2, 4, 2, BOTH),
    ("h100:8", 1, 8, 1, FGD), ("h100:8", 1, 4, 2, BOTH),
    ("v5e:2x4", 1, 8, 1, ("noloco",)), ("v5p:2x2x2", 1, 8, 1, ("eager", "streaming, delay 1", "pipelined")),
    ("v5e:2x2", 2, 2, 4, ("pipelined",)), ("h100:8", 1, 8, 1, ("pipelined",)),
]


def command(target: str, slices: int, workers: int, fsdp: int, method: str) -> list[str]:
  inside = f",mesh.fsdp={fsdp}" if fsdp > 1 else ""
  out = [f"--config=configs/overlap.py:workers={workers}{inside},{METHODS[method]}", f"--topology={target}"]
  return out + ([f"--slices={slices}"] if slices > 1 else [])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--only", default="", help="rows whose target or method contains this word")
  parser.add_argument("--commands", action="store_true", help="print the command of each row and compile nothing")
  args = parser.parse_args()
  if not args.commands:
    print("| target | slices | workers x fsdp | method | form | Mix1 overlapped, MB | Mix1 exposed, MB | blocking, MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
  for target, slices, workers, fsdp, methods in ROWS:
    for method in methods:
      if args.only not in f"{target} {method}":
        continue
      words = command(target, slices, workers, fsdp, method)
      if args.commands:
        print("python -m fgd_jax.aot", " ".join(words))
        continue
      done = subprocess.run([sys.executable, "-m", "fgd_jax.aot", *words, "--json"], capture_output=True, text=True)
      cells = [target, slices, f"{workers} x {fsdp}", method]
      if done.returncode:
        cells += [(done.stderr.strip().splitlines() or ["failed"])[-1], "", "", ""]
      else:
        r = json.loads(done.stdout)
        cells += [r["form"], *(f"{r[key] / 1e6:.2f}" for key in ("overlapped_bytes", "exposed_mix1_bytes",
                                                                 "blocking_mix2_bytes"))]
      print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
  main()
