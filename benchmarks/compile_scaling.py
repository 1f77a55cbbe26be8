"""Do programs grow with the number of workers? Instructions and compile seconds of one round for M = 4 ... 256, as Markdown.

    python benchmarks/compile_scaling.py [--topology=v5e] [--workers=4,16,64,256] [--only=hypercube] [--repeats=3]

One worker a device, on slices 2x2, 4x4, 8x8 and 16x16, compiled ahead of time for devices that are not there; needs libtpu
(pip install '.[aot]'). The model is small (1.4M parameters in 12 leaves, layers scanned), which makes the exchanges
weigh more than they would in a real program. All rows have H = 256 inner steps (the length of a loop, which costs nothing),
so that a Mix1 that is a mean takes the ring form (H >= M - 1) for every M. Ratios are to the first M of a row's topologies.

`executables` is how many such programs a run compiles before its first round: one for each permutation of Mix1, log2 M for
the one-peer and striped hypercube, M - 1 for random_pairs. Mix2 is a switch inside the program with one branch for each
permutation, which holds nothing but a transfer of one buffer (of each leaf, where workers are sharded); that of random_pairs
has M - 1, so its program grows with M, most of all its code. --pairs-up-to leaves its largest cases out.
Compilation is given in seconds of wall time and of CPU time of all its threads. CPU seconds, of which the ratio is, depend
little on what runs beside it; --repeats takes the least of several.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import fgd_jax as fgd

MODEL = ("inner_steps=256,batch_size=1,seq_len=128,model.vocab_size=512,model.dim=256,model.layers=2,model.heads=4,"
         "model.kv_heads=2,model.ffn_dim=512")
SLICES = {4: "2x2", 16: "4x4", 64: "8x8", 256: "16x16"}
PAIRS = "random_pairs"
# Mix1, Mix2
ROWS = [("global", "global"), ("global", "one_peer_hypercube"), ("hypercube", "hypercube"),
        ("hypercube", "one_peer_hypercube"), ("one_peer_hypercube", "one_peer_hypercube"),
        ("striped_hypercube", "one_peer_hypercube"), ("global", PAIRS)]


def compiled(generation: str, workers: int, mix1: str, mix2: str, form: str, repeats: int) -> dict | str:
  """The report of the compilation with the least CPU time, or a sentence."""
  variant = f"workers={workers},{MODEL},method=fgd,method.mix1={mix1},method.mix2={mix2},overlap.form={form}"
  words = [f"--config=configs/overlap.py:{variant}", f"--topology={generation}:{SLICES[workers]}", "--json"]
  reports = []
  for _ in range(repeats):
    done = subprocess.run([sys.executable, "-m", "fgd_jax.aot", *words], capture_output=True, text=True)
    if done.returncode:
      return (done.stderr.strip().splitlines() or ["failed"])[-1]
    reports.append(json.loads(done.stdout))
  return min(reports, key=lambda r: r["compile_cpu_seconds"])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--topology", default="v5e", help="generation with slices of two dimensions: v5e or v6e")
  parser.add_argument("--workers", default="4,16,64,256", help=f"of {', '.join(map(str, SLICES))}")
  parser.add_argument("--only", default="", help="rows whose 'Mix1 x Mix2' contains this word")
  parser.add_argument("--form", default="auto", help="form of overlap, as overlap.form")
  parser.add_argument("--repeats", type=int, default=1, help="compilations of a case; the least CPU time counts")
  parser.add_argument("--pairs-up-to", type=int, default=256, help="largest M for Mix2 = random_pairs")
  args = parser.parse_args()
  counts = [int(n) for n in args.workers.split(",")]
  if unknown := [n for n in counts if n not in SLICES]:
    parser.error(f"--workers={args.workers}: {unknown[0]} is none of {', '.join(map(str, SLICES))}")
  print("| Mix1 x Mix2 | M | form | instructions | ratio | wall, s | CPU, s | ratio | trace, s | code, MB | executables |")
  print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
  for mix1, mix2 in ROWS:
    name = f"{mix1} x {mix2}"
    if args.only not in name:
      continue
    first = None
    for workers in counts:
      cells = [name, workers]
      if mix2 == PAIRS and workers > args.pairs_up_to:
        cells += [f"skipped, {workers - 1} branches (--pairs-up-to)"]
      elif isinstance(r := compiled(args.topology, workers, mix1, mix2, args.form, args.repeats), str):
        cells += [r]
      else:
        first = first or r
        ratio = lambda key: f"{r[key] / first[key]:.2f}"
        cells += [r["form"], r["instructions"], ratio("instructions"), f"{r['compile_seconds']:.1f}",
                  f"{r['compile_cpu_seconds']:.1f}", ratio("compile_cpu_seconds"), f"{r['lower_seconds']:.1f}",
                  f"{r['memory']['generated_code_size'] / 1e6:.1f}",
                  len(fgd.mixing.make(mix1, workers=workers).topology.bank)]
      print("| " + " | ".join(map(str, cells + [""] * (11 - len(cells)))) + " |", flush=True)


if __name__ == "__main__":
  main()
