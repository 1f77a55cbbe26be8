"""Compares runs on one HTML page: losses, simulated time, disagreement, bytes, utilisation, events.

    python -m fgd_jax.report runs/a runs/b --out=report.html
    python -m fgd_jax.report runs --out=report.html --bandwidth=100Mbps,1Gbps --step-seconds=2.35

A DIR is a run's --workdir or a folder of such. Runs that differ in the seed alone are one line with a band. The page needs
no other file and no network; the figures also lie beside it as PNGs, in NAME_figures/.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from typing import Any

from fgd_jax import netsim
from fgd_jax.command import Parser
from fgd_jax.report import figures, groups, hours, page, runs


def parser() -> argparse.ArgumentParser:
  p = Parser(prog="python -m fgd_jax.report", description=__doc__)
  p.add_argument("folders", nargs="+", metavar="DIR", help="runs, or folders of runs")
  p.add_argument("--out", default="report.html", help="the page (default report.html); an earlier report is replaced")
  p.add_argument("--bandwidth", default="100Mbps,1Gbps", help="links to simulate, comma separated (default 100Mbps,1Gbps)")
  p.add_argument("--step-seconds", type=float, help="of an inner step (default: the median of what the runs measured; "
                 "workers that share a device take turns, so give your hardware's)")
  p.add_argument("--json", action="store_true", help="print the figures of the methods as JSON")
  return p


def make(folders: list[str], out: str, bandwidths: list[str], step_seconds: float | None) -> dict[str, Any]:
  """Writes the page and the PNGs; returns {"out", "figures", "step_seconds", "notes", "methods", "runs"}.

  Raises:
    ValueError: no runs, a bad bandwidth, or an `out` that is something else's file.
  """
  for bandwidth in bandwidths:
    netsim.parse_bandwidth(bandwidth)
  if step_seconds is not None and not 0 < step_seconds < float("inf"):
    raise ValueError(f"--step-seconds={step_seconds} must be a positive number.")
  refuse_foreign(out)
  found = runs.find(folders)
  compared, notes = groups.group(found), []
  usable = [run for group in compared for run in group.runs]
  if step_seconds is None and usable:
    step_seconds = hours.measured_step_seconds(usable)
    if step_seconds is not None:
      notes.append(f"An inner step is taken to last {step_seconds:.3g} s, the median of what the runs measured; workers "
                   "that share a device take turns, so --step-seconds of your hardware may say more.")
  paces: list[dict[str, hours.Pace]] = [{} for _ in compared]
  if step_seconds is None and usable:
    notes.append("No run measured its speed, so nothing is simulated; give --step-seconds.")
  for group, pace in zip(compared, paces):
    if group.label.startswith("decoupled"):
      if (note := "Decoupled runs are not simulated here.") not in notes:
        notes.append(note)
      continue
    try:
      if step_seconds is not None:
        pace.update({bandwidth: hours.pace(group, bandwidth, step_seconds) for bandwidth in bandwidths})
    except (ValueError, TypeError) as e:
      notes.append(f"{group.label} is not simulated: {e}")
  drawn = figures.draw(compared, found, paces, step_seconds) if compared else []
  rows = page.method_rows(compared, paces)
  html = page.render(found, rows, drawn, notes)
  os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
  pictures = os.path.splitext(out)[0] + "_figures"
  if drawn:
    os.makedirs(pictures, exist_ok=True)
  for figure in drawn:
    pathlib.Path(pictures, figure.name + ".png").write_bytes(figure.png)
  with open(out + ".tmp", "w", encoding="utf-8") as f:
    f.write(html)
  os.replace(out + ".tmp", out)
  return {"out": out, "figures": [os.path.join(pictures, f.name + ".png") for f in drawn], "step_seconds": step_seconds,
          "notes": notes, "methods": rows,
          "runs": [{"name": r.name, "folder": r.folder, "status": r.status, "finished": r.finished} for r in found]}


def refuse_foreign(out: str) -> None:
  """Refuses to replace a file that is not an earlier report."""
  if os.path.isdir(out):
    raise ValueError(f"--out={out} is a folder; give a file such as {os.path.join(out, 'report.html')}.")
  if os.path.exists(out):
    with open(out, encoding="utf-8", errors="replace") as f:
      if page.GENERATOR not in f.read(4096):
        raise ValueError(f"--out={out} exists and is no report of this command; choose another name.")


def main(argv: list[str] | None = None) -> None:
  args = parser().parse_args(argv)
  try:
    made = make(args.folders, args.out, [b for b in args.bandwidth.split(",") if b], args.step_seconds)
  except (ValueError, OSError) as e:
    sys.exit(f"error: {e}")
  if args.json:
    print(json.dumps(made))
    return
  for note in made["notes"]:
    print(note)
  for run in made["runs"]:
    if not run["finished"]:
      print(f"{run['name']}: {run['status']}")
  print(f"{made['out']}: {len(made['runs'])} runs, {len(made['methods'])} configs, {len(made['figures'])} figures")


if __name__ == "__main__":
  main()
