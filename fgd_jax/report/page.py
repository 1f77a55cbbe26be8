"""The page: tables of methods and runs, and the figures, in one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import collections
import importlib.resources
from collections.abc import Sequence
from typing import Any, NamedTuple

import jinja2

from fgd_jax.report.figures import Figure
from fgd_jax.report.groups import Group, differing, mean_and_deviation
from fgd_jax.report.hours import Pace
from fgd_jax.report.runs import Run

GENERATOR = '<meta name="generator" content="fgd_jax.report">'


class Column(NamedTuple):
  name: str
  text: bool = False


class Cell(NamedTuple):
  text: str
  classes: str = ""
  span: int = 1


class Row(NamedTuple):
  cells: list[Cell]


class Table(NamedTuple):
  columns: list[Column]
  rows: list[Row]


def number(value: Any, digits: int = 4) -> str:
  """A figure for people; a dash where there is none."""
  if value is None:
    return "–"
  if isinstance(value, float):
    return f"{value:,.{digits}f}" if 0.001 <= abs(value) < 1e6 or value == 0 else f"{value:.3g}"
  return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def method_rows(groups: Sequence[Group], paces: Sequence[dict[str, Pace]]) -> list[dict[str, Any]]:
  """The figures of each group, ready for JSON."""
  rows = []
  for group, found in zip(groups, paces):
    over = lambda name, group=group: mean_and_deviation([run.last(name) for run in group.averaged])
    rounds = max(run.last("round") or 0 for run in group.averaged)
    rows.append({
        "method": group.label, "runs": len(group.averaged), "unfinished": len(group.runs) - len(group.averaged),
        "workers": group.averaged[0].workers, "rounds": rounds, "tokens": over("tokens")[0],
        "eval_loss": over("eval_loss")[0], "eval_loss_deviation": over("eval_loss")[1],
        "eval_loss_workers": over("eval_loss_workers")[0], "consensus_l2": over("consensus_l2")[0],
        "js_distance": over("js_distance")[0], "bytes_overlapped": over("bytes_overlapped")[0],
        "bytes_blocking": over("bytes_blocking")[0],
        "simulated": {bandwidth: {"compute_utilization": pace.compute_utilization, "round_seconds": pace.round_seconds,
                                  "hours": pace.round_seconds * rounds / 3600} for bandwidth, pace in found.items()}})
  return rows


def methods_table(rows: Sequence[dict[str, Any]]) -> Table:
  bandwidths = list(dict.fromkeys(b for row in rows for b in row["simulated"]))
  columns = [Column("method", True), Column("runs"), Column("workers"), Column("rounds"), Column("tokens"),
             Column("held-out loss"), Column("loss of workers"), Column("consensus L2"), Column("JS distance"),
             Column("MB a round, overlapped"), Column("MB a round, blocking")]
  columns += [Column(f"utilisation, {b}") for b in bandwidths]
  best = min((row["eval_loss"] for row in rows if row["eval_loss"] is not None), default=None)
  out = []
  for row in rows:
    spread = "" if row["eval_loss_deviation"] is None else f" ± {row['eval_loss_deviation']:.4f}"
    runs = f"{row['runs']}" + (f" + {row['unfinished']} unfinished" if row["unfinished"] else "")
    megabytes = lambda name, row=row: None if row[name] is None else row[name] / 1e6
    tokens = None if row["tokens"] is None else int(row["tokens"])
    cells = [Cell(row["method"], "text"), Cell(runs), Cell(number(row["workers"])), Cell(number(row["rounds"])),
             Cell(number(tokens)),
             Cell(number(row["eval_loss"]) + spread, "best" if row["eval_loss"] == best and best is not None else ""),
             Cell(number(row["eval_loss_workers"])), Cell(number(row["consensus_l2"], 3)),
             Cell(number(row["js_distance"], 3)), Cell(number(megabytes("bytes_overlapped"), 3)),
             Cell(number(megabytes("bytes_blocking"), 3))]
    for b in bandwidths:
      cells.append(Cell(f"{row['simulated'][b]['compute_utilization']:.1%}" if b in row["simulated"] else "–"))
    out.append(Row(cells))
  return Table(columns, out)


def runs_table(runs: Sequence[Run]) -> Table:
  """A row for each folder: status, seed, last figures, and the config keys in which runs differ."""
  keys = [key for key in differing(runs) if key != "method.name"]
  columns = [Column("run", True), Column("status", True), Column("method", True), Column("seed"), Column("tokens"),
             Column("training loss"), Column("held-out loss"), Column("tokens a second"), *[Column(k, True) for k in keys]]
  rows = []
  for run in runs:
    if not run.records or not run.config:
      rows.append(Row([Cell(run.name, "text"), Cell(run.status, "problem", len(columns) - 1)]))
      continue
    speeds = sorted(r["tokens_per_second"] for r in run.records if r.get("tokens_per_second"))
    rows.append(Row([
        Cell(run.name, "text"), Cell(run.status, "text"), Cell(str(run.config.get("method.name")), "text"),
        Cell(str(run.config.get("seed"))), Cell(number(run.last("tokens"))), Cell(number(run.last("train_loss"))),
        Cell(number(run.last("eval_loss"))), Cell(number(speeds[len(speeds) // 2], 0) if speeds else "–"),
        *[Cell("–" if run.config.get(k) is None else str(run.workers if k == "workers" else run.config[k]), "text")
          for k in keys]]))
  return Table(columns, rows)


def events_table(runs: Sequence[Run]) -> Table:
  """How often each kind of event happened in each run that has any."""
  counts = {run.name: collections.Counter(str(e.get("event")) for e in run.events) for run in runs if run.events}
  kinds = sorted({kind for counter in counts.values() for kind in counter})
  return Table([Column("run", True), *map(Column, kinds)],
               [Row([Cell(name, "text"), *[Cell(number(counter[kind])) for kind in kinds]])
                for name, counter in counts.items()])


def render(runs: Sequence[Run], rows: Sequence[dict[str, Any]], figures: Sequence[Figure], notes: Sequence[str]) -> str:
  """The whole page; everything that comes from a run is escaped."""
  source = importlib.resources.files("fgd_jax.report").joinpath("page.html").read_text(encoding="utf-8")
  environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
  finished = sum(run.finished for run in runs)
  return environment.from_string(source).render(
      title=f"{len(runs)} run{'s' * (len(runs) != 1)} compared" if len(runs) > 1 else f"Run {runs[0].name}",
      subtitle=f"{len(rows)} config{'s' * (len(rows) != 1)}, {finished} finished run{'s' * (finished != 1)}",
      notes=notes, methods=methods_table(rows), runs=runs_table(runs), events=events_table(runs),
      has_events=any(run.events for run in runs),
      figures=[{**f._asdict(), "data": base64.b64encode(f.png).decode("ascii")} for f in figures])
