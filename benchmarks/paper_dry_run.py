"""Dry run of configs/paper: every variant, M and H, compiled ahead of time for a TPU slice that is not there.

    python benchmarks/paper_dry_run.py --out=docs/claims/paper.csv [--only=LocalM1M2] [--workers=8] [--list]

Needs libtpu (pip install '.[aot]'); a compilation takes one to four minutes of a core and 4 GB. Run again with the
same --out it goes on where it stopped: cases in the file are not repeated. It ends with the file as a Markdown table.

H is the length of a loop. A variant and M are compiled with H = 100, and for the other H lowered: `how` is "same program"
where that gives the lowered text of H = 100 but for H itself, in the same form with the same options. Such a row has the
figures of H = 100, and its memory is that of H = 100 plus HELD times the longer batches, an estimate. Otherwise it is
compiled.

GB on the device that has or sends most (docs/overlap.md): `reserved` is what it must have free, `in use` the most at one
time, `overlapped`, `exposed` (of Mix1) and `blocking` what it sends to other workers in a round, `in scan` what it sends
inside the inner steps of a round. A place that a variant does not fit is followed by the next one, with workers sharded.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import runpy

import jax
import trials

from fgd_jax import aot
from fgd_jax.aot import program, targets

CONFIG = os.path.join(trials.ROOT, "configs", "paper", "fgd_1p5b.py")
STEPS = (100, 500, 1000)
PLACES = {8: (("v5p:2x2x2", 1), ("v5p:2x2x4", 2)), 16: (("v5p:2x2x4", 1), ("v5p:2x4x4", 2))}  # workers: slices, fsdp
# Copies of a round's tokens on a device: 2.21 in a model of 4M parameters with H = 100 and 1000 (DiLoCo on v5p:2x2x2).
HELD = 2.25
HEAD = ("run", "workers", "H", "slice", "fsdp", "how", "form", "compile_s", "reserved_GB", "in_use_GB", "overlapped_GB",
        "exposed_GB", "blocking_GB", "in_scan_GB")


def config_of(run: str, workers: int, steps: int, fsdp: int):
  found = runpy.run_path(CONFIG)
  return found["get_config"](f"{found['RUNS'][run]},workers={workers},inner_steps={steps},mesh.fsdp={fsdp}")


def compiled(run: str, workers: int, steps: int) -> dict[str, str]:
  """The row of a case in the first place that it fits.

  Raises:
    AotError: it fits none of them.
  """
  for target, fsdp in PLACES[workers]:
    try:
      report = aot.compile_round(config_of(run, workers, steps, fsdp), target)
      break
    except aot.AotError as e:
      print(f"{run}, {workers} workers on {target}: {e}", flush=True)
      refusal = e
  else:
    raise refusal
  gb = lambda size: f"{size / 1e9:.3f}"
  sizes = (report.peak_bytes_per_device, report.memory["peak_memory"], report.overlapped_bytes, report.exposed_mix1_bytes,
           report.blocking_mix2_bytes, report.in_scan["bytes"])
  return dict(zip(HEAD, (run, str(workers), str(steps), target, str(fsdp), "compiled", report.form,
                         f"{report.compile_seconds:.0f}", *map(gb, sizes))))


def text_of(run: str, workers: int, steps: int, place: tuple[str, int]) -> tuple[str, ...]:
  """The lowered round with H as a word, its form and options, for a schedule that does not depend on H nor contains it."""
  target, fsdp = place
  config = config_of(run, workers, steps, fsdp)
  config.rounds, config.inner.warmup_steps = 10_000 // steps, 1001
  lowered = program.lower(config, targets.devices(targets.parse(target)))
  return re.sub(rf"(?<=[<x]){steps}(?=[>x])", "H", lowered.program.as_text()), lowered.plan.form, str(lowered.plan.options)


def longer(row: dict[str, str], steps: int) -> dict[str, str]:
  """The row of the same program with more inner steps, whose memory grows by their tokens (int32)."""
  config = config_of(row["run"], int(row["workers"]), steps, int(row["fsdp"]))
  sequences = (steps - int(row["H"])) * config.batch_size // config.mesh.fsdp
  more = HELD * sequences * (config.seq_len + 1) * 4 / 1e9
  grown = {key: f"{float(row[key]) + more:.3f}" for key in ("reserved_GB", "in_use_GB")}
  scan = {"in_scan_GB": f"{float(row['in_scan_GB']) * steps / int(row['H']):.3f}"}
  return {**row, **grown, **scan, "H": str(steps), "how": "same program", "compile_s": ""}


def read(path: str) -> list[dict[str, str]]:
  if not os.path.exists(path):
    return []
  with open(path, newline="") as f:
    return list(csv.DictReader(f))


def add(path: str, row: dict[str, str]) -> None:
  new = not os.path.exists(path)
  with open(path, "a", newline="") as f:
    writer = csv.DictWriter(f, HEAD, lineterminator="\n")
    if new:
      writer.writeheader()
    writer.writerow(row)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", default="docs/claims/paper.csv", help="CSV file, which is continued")
  parser.add_argument("--only", default="", help="this run of configs/paper alone")
  parser.add_argument("--workers", default="8,16", help="M, of 8 and 16")
  parser.add_argument("--list", action="store_true", help="print the cases that are missing, and compile nothing")
  args = parser.parse_args()
  os.environ.update(aot.ENVIRONMENT)
  jax.config.update("jax_platforms", "cpu")
  runs = [run for run in runpy.run_path(CONFIG)["RUNS"] if args.only in ("", run)]
  for workers in map(int, args.workers.split(",")):
    for run in runs:
      for steps in STEPS:
        done = {int(row["H"]): row for row in read(args.out) if (row["run"], row["workers"]) == (run, str(workers))}
        if steps in done:
          continue
        print(f"{run}, {workers} workers, H = {steps}", flush=True)
        if args.list:
          continue
        base = done.get(STEPS[0])
        if base is not None:
          place = base["slice"], int(base["fsdp"])
          if text_of(run, workers, steps, place) == text_of(run, workers, STEPS[0], place):
            add(args.out, longer(base, steps))
            continue
        try:
          add(args.out, compiled(run, workers, steps))
        except (ValueError, aot.AotError) as e:
          print(f"failed: {e}", flush=True)
          break
  rows = sorted(read(args.out), key=lambda row: int(row["workers"]))
  print(trials.markdown(HEAD, [[row[key] for key in HEAD] for row in rows]))


if __name__ == "__main__":
  main()
