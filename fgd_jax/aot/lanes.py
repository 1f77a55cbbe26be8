"""A picture of a compiled round: compute, overlapped and blocking transfers, in the order of the schedule."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402  (after the backend)
from matplotlib.patches import Patch  # noqa: E402

from fgd_jax.aot import Report  # noqa: E402
from fgd_jax.aot.schedule import BLOCKING, EXPOSED, IN_SCAN, OVERLAPPED, Collective  # noqa: E402
from fgd_jax.aot.table import amount  # noqa: E402

_SCAN_WIDTH = 0.45  # of the picture; inner steps are most of a round, but one instruction of the schedule
_COMPUTE, _SCAN, _INK = "#9aa7b4", "#48617a", "#22303c"
_COLOURS = {OVERLAPPED: "#2a9d6f", EXPOSED: "#e08a1e", BLOCKING: "#c8483f", IN_SCAN: "#7a5aa6"}
_LABELS = {OVERLAPPED: "beside the inner steps", EXPOSED: "Mix1, exposed", BLOCKING: "blocking",
           IN_SCAN: "in every inner step"}
_MOST_ROWS = 14  # rows of a lane; more transfers share them


def draw(report: Report, path: str) -> None:
  """Writes the schedule of a report as a PNG.

  Three lanes: what the devices compute, what crosses workers beside the inner steps, what crosses them in the way. The
  horizontal axis is the position in the compiler's schedule, with the loop of inner steps drawn wide; it is not time.
  """
  schedule = report.schedule
  at = _axis(schedule.scans, max(schedule.length, 1))
  lanes = [[c for c in report.collectives if (c.placed == OVERLAPPED) == beside] for beside in (True, False)]
  rows = [max(min(sum(not c.in_scan for c in lane), _MOST_ROWS) + any(c.in_scan for c in lane), 1) for lane in lanes]
  figure, axes = plt.subplots(3, 1, figsize=(11, 2.9 + 0.16 * sum(rows)), sharex=True, layout="constrained",
                              gridspec_kw={"height_ratios": [2.4, 1.2 + rows[0] * 0.5, 1.2 + rows[1] * 0.5], "hspace": 0.04})
  for axis, name in zip(axes, ("compute", "overlapped", "blocking")):
    axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=11, color=_INK)
    axis.set_yticks([])
    axis.set_xlim(0, 1)
    for side in ("top", "right", "left"):
      axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("#c9d1d8")
    for s in schedule.scans:
      axis.axvspan(at(s), at(s + 1), color="#e9eef3", zorder=0)

  axes[0].set_ylim(0, 1)
  axes[0].bar([at(i) for i in schedule.busy if i not in schedule.scans], 0.5, bottom=0.25, width=0.0018, color=_COMPUTE,
              align="edge")
  for s in schedule.scans:
    axes[0].barh(0.5, at(s + 1) - at(s), left=at(s), height=0.62, color=_SCAN)
    axes[0].text((at(s) + at(s + 1)) / 2, 0.5, "inner steps" if len(schedule.scans) == 1 else "inner", color="white",
                 ha="center", va="center", fontsize=12 if len(schedule.scans) == 1 else 8)
  for axis, lane, count in zip(axes[1:], lanes, rows):
    axis.set_ylim(count, 0)
    _bars(axis, [c for c in lane if not c.in_scan], at)
    if hops := [c for c in lane if c.in_scan]:
      _hops(axis, hops, at, schedule.scans[0], count)
    if not lane:
      axis.text(0.01, 0.5, "nothing", color="#8a949e", va="center", fontsize=9)

  axes[2].set_xlabel("position in the compiler's schedule (the loop of inner steps drawn wide; not a time axis)", color=_INK)
  axes[2].set_xticks([])
  kinds = [k for k in _COLOURS if any(c.placed == k for c in report.collectives)]
  figure.legend(handles=[Patch(color=_COLOURS[k], label=f"{_LABELS[k]}: {amount(schedule.total(k))}") for k in kinds],
                loc="outside lower center", ncols=4, frameon=False, fontsize=10)
  mesh = " x ".join(f"{k} {n}" for k, n in report.mesh.items() if n > 1) or "1 device"
  where = report.topology + (f" x {report.slices} slices" if report.slices > 1 else "")
  figure.suptitle(f"{report.method} on {where}: {report.workers} workers, mesh ({mesh}), form {report.form}", fontsize=13,
                  color=_INK, x=0.01, ha="left")
  figure.savefig(path, dpi=150)
  plt.close(figure)


def _axis(scans: Sequence[int], length: int):
  """Position in the schedule -> [0, 1], the scans wide."""
  wide = _SCAN_WIDTH / len(scans) if scans else 0.0
  narrow = (1 - wide * len(scans)) / max(length - len(scans), 1)
  starts = [0.0]
  for i in range(length):
    starts.append(starts[-1] + (wide if i in scans else narrow))
  return lambda i: starts[min(i, length)]


def _bars(axis, collectives: Sequence[Collective], at) -> None:
  """Bars from start to done, the largest on top, each with its size where it fits."""
  ordered = sorted(collectives, key=lambda c: -c.total)
  rows = max(min(len(ordered), _MOST_ROWS), 1)
  for number, c in enumerate(ordered):
    row = min(number, rows - 1)
    left, right = at(c.start_index), at(c.done_index + 1)
    width = max(right - left, 0.004)
    axis.barh(row + 0.5, width, left=left, height=0.72, color=_COLOURS[c.placed])
    label = f"{c.kind}, {amount(c.total)}"
    if number < rows - 1 or len(ordered) <= rows:
      inside = width > 0.0075 * len(label)
      flip = not inside and left > 0.6
      axis.text(left + 0.006 if inside else left - 0.006 if flip else left + width + 0.006, row + 0.5, label, va="center",
                ha="right" if flip else "left", fontsize=7.5, color="white" if inside else _INK)
    elif number == len(ordered) - 1:
      rest = ordered[rows - 1:]
      axis.text(at(max(x.done_index for x in rest) + 1) + 0.006, row + 0.5,
                f"{len(rest)} smaller ones, {amount(sum(x.total for x in rest))}", va="center", fontsize=7.5, color=_INK)


def _hops(axis, hops: Sequence[Collective], at, scan: int, rows: int) -> None:
  """Transfers in the body of the loop: one dash for each step, in the last row of the lane."""
  left, right = at(scan), at(scan + 1)
  steps = min(max(c.times for c in hops), 24)
  width = (right - left) / steps
  for step in range(steps):
    axis.barh(rows - 0.5, width * 0.7, left=left + (step + 0.15) * width, height=0.5, color=_COLOURS[hops[0].placed])
  axis.text(left - 0.006, rows - 0.5, f"in every inner step: {amount(sum(c.bytes for c in hops))}", ha="right", va="center",
            fontsize=7.5, color=_INK)
