"""A report as text for people."""

from __future__ import annotations

import collections

from fgd_jax.aot import Report
from fgd_jax.aot.schedule import BLOCKING, EXPOSED, IN_SCAN, OVERLAPPED, Collective

_MEANING = {OVERLAPPED: "beside the inner steps", EXPOSED: "Mix1, not beside the inner steps",
            BLOCKING: "waited for after the inner steps", IN_SCAN: "inside every inner step"}


def amount(bytes_: float) -> str:
  """1536 -> "1.5 kB" (powers of 1000)."""
  for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if bytes_ >= size:
      return f"{bytes_ / size:.4g} {unit}"
  return f"{bytes_:.4g} B"


def describe(report: Report) -> str:
  """Several lines: target, transfers, totals, memory, program."""
  mesh = ", ".join(f"{k} {n}" for k, n in report.mesh.items())
  slices = f" x {report.slices} slices" if report.slices > 1 else ""
  options = " ".join(f"{k}={v}" for k, v in report.xla_options.items()) or "none"
  lines = [
      f"{report.method}, {report.workers} workers, {report.parameters:,} parameters each, on {report.topology}{slices}",
      f"mesh: {mesh}   form of overlap: {report.form}   XLA options: {options}", ""]
  rows = [("cross-worker transfers", "mixer", "number", "bytes a round", "start", "done", "place")]
  grouped: dict[tuple, list[Collective]] = collections.defaultdict(list)
  for c in report.collectives:
    grouped[c.placed, c.in_scan, c.scope, c.kind].append(c)
  for (placed, in_scan, scope, kind), members in grouped.items():
    span = lambda values: f"{min(values)}" if min(values) == max(values) else f"{min(values)}-{max(values)}"
    rows.append((kind, scope, str(len(members)), amount(sum(c.total for c in members)),
                 span([c.start_index for c in members]), span([c.done_index for c in members]),
                 _MEANING[placed] + (", hops in the scan" if in_scan and placed != IN_SCAN else "")))
  if not report.collectives:
    rows.append(("none", "", "", "", "", "", ""))
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  number = (2, 3, 4, 5)
  pad = lambda i, cell: cell.rjust(widths[i]) if i in number else cell.ljust(widths[i])
  lines += ["  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows]
  scans = ", ".join(str(s) for s in report.schedule.scans) or "none"
  lines += [f"(positions in a schedule of {report.schedule.length} instructions; loop of inner steps: {scans}; bytes are "
            "the operands on one device)", ""]
  share = report.share_mix1_overlapped
  expected = "" if report.expected_mix1_bytes is None else f" (by algebra Mix1 sends {amount(report.expected_mix1_bytes)})"
  lines += [
      f"overlapped   {amount(report.overlapped_bytes):>10}   {report.share_overlapped:.1%} of all cross-worker bytes"
      + ("" if share is None else f", {share:.1%} of Mix1's") + expected,
      f"exposed Mix1 {amount(report.exposed_mix1_bytes):>10}",
      f"blocking     {amount(report.blocking_mix2_bytes):>10}"]
  if report.in_scan["collectives"]:
    lines.append(f"in the scan  {amount(report.in_scan['bytes']):>10}   {report.in_scan['collectives']:.0f} collective(s) "
                 "over workers in every inner step")
  parts = ", ".join(f"{label} {amount(report.memory[key])}" for label, key in (
      ("arguments", "argument_size"), ("outputs", "output_size"), ("temporaries", "temp_size"), ("donated", "alias_size"),
      ("code", "generated_code_size")) if key in report.memory)
  lines += ["", f"peak memory  {amount(report.peak_bytes_per_device):>10} a device ({parts})",
            f"program      {report.instructions:>10,} instructions, compiled in {report.compile_seconds:.1f} s "
            f"(traced and lowered in {report.lower_seconds:.1f} s), jax {report.jax}"]
  return "\n".join([*lines, *(f"Note: {n}" for n in report.notes)])
