"""Tables, a timeline in characters, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fgd_jax.netsim.links import write_bandwidth

WIDTH = 64
MARKS = {"compute": "#", "wait": ".", "down": "x"}


def table(rows: Sequence[Sequence[Any]], head: Sequence[str]) -> str:
  """Columns: the first one to the left, the others to the right."""
  text = [[f"{x:.4g}" if isinstance(x, float) else "" if x is None else str(x) for x in row] for row in rows]
  widths = [max(len(line[i]) for line in [list(head), *text]) for i in range(len(head))]
  line = lambda words: "  ".join([words[0].ljust(widths[0]), *(w.rjust(n) for w, n in zip(words[1:], widths[1:]))])
  return "\n".join(map(str.rstrip, [line(list(head)), "  ".join("-" * n for n in widths), *map(line, text)]))


def timeline(spans: Sequence[Any], most: int = 8) -> str:
  """The first round: # inner steps, . waiting, x down, = a transfer in flight."""
  if not spans:
    return ""
  end = max(s.end for s in spans)
  lanes: dict[str, list[str]] = {}
  order = sorted(spans, key=lambda s: (not s.lane.startswith("worker"), s.start))
  for s in order:
    name = s.lane if s.lane.startswith("worker") else s.what
    row = lanes.setdefault(name, [" "] * WIDTH)
    first, last = round(s.start / end * WIDTH), max(round(s.end / end * WIDTH), round(s.start / end * WIDTH) + 1)
    for i in range(min(first, WIDTH - 1), min(last, WIDTH)):
      row[i] = MARKS.get(s.what, "=") if name == s.lane else "="
  workers = sorted((n for n in lanes if n.startswith("worker")), key=lambda n: int(n.split()[1]))
  others = [n for n in lanes if n not in workers]
  shown = workers[:most] + others[:most]
  pad = max(len(n) for n in shown)
  lines = [f"{n.ljust(pad)} |{''.join(lanes[n])}|" for n in shown]
  hidden = len(workers) + len(others) - len(shown)
  if hidden:
    lines.append(f"{' ' * pad}  ({hidden} more)")
  return "\n".join([*lines, f"{' ' * pad}  0{f'{end:.4g} s'.rjust(WIDTH - 1)}",
                    f"{' ' * pad}  # inner steps   . waiting   x down   = in flight"])


def plot(path: str, results: Sequence[dict[str, Any]]) -> None:
  """Utilisation against bandwidth, one line for each method; bars where there is one bandwidth."""
  import matplotlib
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
  methods = list(dict.fromkeys(r["method"] for r in results))
  rates = list(dict.fromkeys(r["bandwidth"] for r in results))
  if len(rates) == 1:
    bars = axis.bar(methods, [100 * r["compute_utilization"] for r in results])
    axis.bar_label(bars, fmt="%.0f")
    axis.tick_params(axis="x", rotation=20)
    axis.set_title(f"{rates[0]} for each worker")
  else:
    for method in methods:
      mine = [r for r in results if r["method"] == method]
      known = all(r["bits_per_second"] for r in mine)
      axis.plot([r["bits_per_second"] if known else r["bandwidth"] for r in mine],
                [100 * r["compute_utilization"] for r in mine], marker="o", label=method)
    if all(r["bits_per_second"] for r in results):
      ticks = sorted({r["bits_per_second"] for r in results})
      axis.set_xscale("log")
      axis.set_xticks(ticks, [write_bandwidth(t) for t in ticks])
      axis.minorticks_off()
    axis.set_xlabel("bandwidth of each worker")
    axis.legend()
  axis.set_ylabel("compute utilisation (%)")
  axis.set_ylim(0, 105)
  axis.grid(alpha=0.3)
  figure.savefig(path, dpi=120)
  plt.close(figure)
