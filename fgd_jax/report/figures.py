"""The figures of the report, each a PNG with a title and a caption."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (after the choice of backend)
from matplotlib import ticker  # noqa: E402

from fgd_jax.report.groups import Curve, Group, curve, key, mean_and_deviation  # noqa: E402
from fgd_jax.report.hours import Pace  # noqa: E402
from fgd_jax.report.runs import Run  # noqa: E402

# Okabe and Ito's colours, which people with colour blindness can tell apart; line styles go on where they end.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":", "-.")
_STYLE: Any = {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
               "axes.axisbelow": True, "legend.frameon": False, "figure.dpi": 100, "text.parse_math": False}


class Figure(NamedTuple):
  """Attributes: name (of the PNG file), title, caption (one or two sentences), png (its bytes)."""

  name: str
  title: str
  caption: str
  png: bytes


def draw(groups: Sequence[Group], runs: Sequence[Run], paces: Sequence[dict[str, Pace]], step_seconds: float | None
         ) -> list[Figure]:
  """All figures that the runs have data for.

  Args:
    groups: runs of one config each.
    runs: all of them, for the events.
    paces: of each group, by bandwidth.
    step_seconds: of an inner step, for the caption.
  """
  bandwidths = list(dict.fromkeys(b for pace in paces for b in pace))
  with plt.rc_context(_STYLE):
    figures = [_loss_by_tokens(groups), *_loss_by_hours(groups, paces, bandwidths, step_seconds), *_simulated(groups),
               _disagreement(groups), *_blocks(groups), _bytes(groups), *_utilization(groups, paces, bandwidths),
               *_events(runs)]
  return [figure for figure in figures if figure is not None]


def _look(i: int) -> dict[str, Any]:
  return {"color": _COLOURS[i % len(_COLOURS)], "ls": _STYLES[i // len(_COLOURS) % len(_STYLES)]}


def _finish(figure: Any, name: str, title: str, caption: str, groups: Sequence[Group] = (), columns: int = 3) -> Figure:
  """Adds one legend below for all axes, and renders."""
  if groups:
    handles: dict[str, Any] = {}
    for axis in figure.axes:
      for handle, label in zip(*axis.get_legend_handles_labels()):
        handles.setdefault(label, handle)
    widest = max((len(label) for label in handles), default=0)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=1 if widest > 60 else min(
        columns, len(handles) or 1))
  buffer = io.BytesIO()
  figure.savefig(buffer, dpi=140, metadata={"Software": None})
  plt.close(figure)
  return Figure(name, title, caption, buffer.getvalue())


def _panels(count: int, width: float = 5.2, height: float = 3.9) -> tuple[Any, list[Any]]:
  columns = min(count, 2)
  rows = -(-count // columns)
  figure, axes = plt.subplots(rows, columns, figsize=(10.4 if columns == 2 else 1.6 * width, height * rows),
                              layout="constrained", squeeze=False)
  flat = list(axes.flat)
  for axis in flat[count:]:
    axis.set_visible(False)
  return figure, flat[:count]


def _band(axis: Any, found: Curve | None, label: str, scale: float = 1.0, **look: Any) -> None:
  if found is None:
    return
  x = found.x * scale
  marker = "." if len(x) < 30 else None
  axis.plot(x, found.mean, label=label, marker=marker, lw=1.8, **look)
  if found.runs > 1:
    axis.fill_between(x, found.mean - found.deviation, found.mean + found.deviation, alpha=0.18, lw=0, color=look["color"])


def _unfinished(axis: Any, group: Group, x: Any, y: Any, **look: Any) -> None:
  """Runs that the mean leaves out, thin."""
  for run in group.runs:
    if run not in group.averaged and (found := curve([run], x, y)) is not None:
      axis.plot(found.x, found.mean, lw=0.8, alpha=0.6, **look)


def _by_round(axis: Any) -> None:
  axis.set_xlabel("round")
  axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))


_MEAN = "Lines are means over seeds, bands one standard deviation; unfinished runs are thin lines."


def _loss_by_tokens(groups: Sequence[Group]) -> Figure:
  figure, (held, train) = _panels(2)
  for i, group in enumerate(groups):
    for axis, name in ((held, "eval_loss"), (train, "train_loss")):
      _band(axis, curve(group.averaged, key("tokens"), key(name)), group.label, **_look(i))
      _unfinished(axis, group, key("tokens"), key(name), **_look(i))
  held.set_title("held out, mean model")
  train.set_title("training, mean of workers")
  held.set_ylabel("loss (nats per token)")
  for axis in (held, train):
    axis.set_xlabel("tokens, all workers")
    axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
  if not held.lines:
    held.text(0.5, 0.5, "no evaluation is recorded", ha="center", transform=held.transAxes)
  return _finish(figure, "loss_tokens", "Loss against tokens", _MEAN, groups)


def _loss_by_hours(groups, paces, bandwidths, step_seconds) -> list[Figure]:
  if not bandwidths or not any(curve(group.averaged, key("tokens"), key("eval_loss")) for group in groups):
    return []
  figure, axes = _panels(len(bandwidths))
  longest = max(pace.round_seconds * (group.runs[0].last("round") or 0) for group, found in zip(groups, paces)
                for pace in found.values())
  unit, seconds = next(((u, s) for u, s in (("hours", 3600.0), ("minutes", 60.0)) if longest > 2 * s), ("seconds", 1.0))
  for axis, bandwidth in zip(axes, bandwidths):
    for i, (group, found) in enumerate(zip(groups, paces)):
      if bandwidth in found:
        found_curve = curve(group.averaged, key("round"), key("eval_loss"))
        _band(axis, found_curve, group.label, scale=found[bandwidth].round_seconds / seconds, **_look(i))
    axis.set_title(f"{bandwidth} a worker")
    axis.set_xlabel(f"simulated {unit}")
    axis.set_xlim(left=0)
    axis.set_ylabel("held-out loss (nats per token)")
  return [_finish(figure, "loss_hours", "Loss against simulated time",
                  f"Rounds take what the network simulator says for {step_seconds:.3g} s an inner step. " + _MEAN, groups)]


def _simulated(groups: Sequence[Group]) -> list[Figure]:
  """What runs recorded of the network and the faults that they were configured for."""
  recorded = {name for group in groups for run in group.runs for r in run.records for name in r}
  if "simulated_seconds" not in recorded:
    return []
  shown = [(name, label) for name, label in (("compute_utilization", "compute utilisation so far"),
                                             ("failed_exchanges", "failed exchanges in the round"),
                                             ("workers_alive", "workers that take part"),
                                             ("quarantined", "workers in quarantine")) if name in recorded]
  figure, (loss, *others) = _panels(1 + len(shown))
  hours = lambda r: None if r.get("simulated_seconds") is None else r["simulated_seconds"] / 3600
  for i, group in enumerate(groups):
    _band(loss, curve(group.averaged, hours, key("eval_loss")), group.label, **_look(i))
    for axis, (name, _) in zip(others, shown):
      _band(axis, curve(group.averaged, key("round"), key(name)), group.label, **_look(i))
  loss.set_xlabel("simulated hours")
  loss.set_ylabel("held-out loss (nats per token)")
  for axis, (name, label) in zip(others, shown):
    _by_round(axis)
    axis.set_ylabel(label)
    axis.set_ylim(bottom=0, top=1.02 if name == "compute_utilization" else None)
  return [_finish(figure, "recorded_time", "On the network and with the faults that the runs were configured for",
                  "As the runs recorded it. " + _MEAN, groups)]


def _disagreement(groups: Sequence[Group]) -> Figure:
  figure, axes = _panels(2)
  for axis, name, label in zip(axes, ("consensus_l2", "js_distance"), ("consensus L2 of parameters",
                                                                       "JS distance of predictions")):
    for i, group in enumerate(groups):
      _band(axis, curve(group.averaged, key("round"), key(name)), group.label, **_look(i))
    axis.set_ylabel(label)
    _by_round(axis)
    axis.set_ylim(bottom=0)
    if not axis.lines:
      axis.text(0.5, 0.5, "not measured (measure_every=0)", ha="center", transform=axis.transAxes)
  return _finish(figure, "disagreement", "How far workers disagree",
                 "Both between the workers' parameters at the end of the inner phase: the root of the mean squared pairwise "
                 "distance, and the Jensen-Shannon distance (0 to 1) of their predictions. " + _MEAN, groups)


def _blocks(groups: Sequence[Group]) -> list[Figure]:
  measured = [g for g in groups if any("consensus_blocks" in r for run in g.averaged for r in run.records)]
  if not measured:
    return []
  blocks = list(dict.fromkeys(b for g in measured for run in g.averaged for r in run.records
                              for b in r.get("consensus_blocks", {})))
  figure, axes = _panels(len(measured), height=3.2)
  colours = plt.get_cmap("viridis")
  for axis, group in zip(axes, measured):
    for i, block in enumerate(blocks):
      of_block = lambda r, block=block: None if block not in r.get("consensus_blocks", {}) else (
          max(r["consensus_blocks"][block], 0.0) ** 0.5)
      _band(axis, curve(group.averaged, key("round"), of_block), block, color=colours(0.88 * i / max(len(blocks) - 1, 1)))
    axis.set_title(group.label, fontsize=9)
    _by_round(axis)
    axis.set_ylabel("consensus L2")
    axis.set_ylim(bottom=0)
  return [_finish(figure, "consensus_blocks", "Disagreement by block of the model",
                  "Squares of the blocks add up to the square of the whole.", measured, columns=6)]


def _bytes(groups: Sequence[Group]) -> Figure:
  figure, axis = plt.subplots(figsize=(10.4, 1.1 + 0.42 * len(groups)), layout="constrained")
  overlapped = [(mean_and_deviation([run.last("bytes_overlapped") for run in g.averaged])[0] or 0) / 1e6 for g in groups]
  blocking = [(mean_and_deviation([run.last("bytes_blocking") for run in g.averaged])[0] or 0) / 1e6 for g in groups]
  names = [g.label for g in groups]
  axis.barh(names, overlapped, color=_COLOURS[0], label="beside the inner steps", height=0.6)
  axis.barh(names, blocking, left=overlapped, color=_COLOURS[1], label="while workers wait", height=0.6)
  for i, total in enumerate(o + b for o, b in zip(overlapped, blocking)):
    axis.text(total, i, f" {total:.3g}", va="center")
  axis.invert_yaxis()
  axis.margins(x=0.1)
  axis.grid(axis="y", visible=False)
  axis.set_xlabel("MB sent by a worker in a round")
  return _finish(figure, "bytes", "Bytes", "As counted by the round: what one worker sends.", groups)


def _utilization(groups, paces, bandwidths) -> list[Figure]:
  if not bandwidths:
    return []
  figure, axis = plt.subplots(figsize=(10.4, 1.2 + 0.2 * (len(bandwidths) + 1) * len(groups)), layout="constrained")
  height = 0.8 / len(bandwidths)
  shades = plt.get_cmap("Blues")
  for j, bandwidth in enumerate(bandwidths):
    shares = [found[bandwidth].compute_utilization if bandwidth in found else 0.0 for found in paces]
    places = [i + (j - (len(bandwidths) - 1) / 2) * height for i in range(len(groups))]
    colour = shades(0.35 + 0.6 * j / max(len(bandwidths) - 1, 1))
    axis.barh(places, shares, height=height * 0.9, label=bandwidth, color=colour)
    for place, share, found in zip(places, shares, paces):
      axis.text(share + 0.005, place, f"{share:.1%}" if bandwidth in found else "not simulated", va="center", fontsize=8)
  axis.set_yticks(range(len(groups)), [g.label for g in groups])
  axis.invert_yaxis()
  axis.set_xlim(0, 1.1)
  axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
  axis.xaxis.set_major_formatter(ticker.PercentFormatter(1.0))
  axis.grid(axis="y", visible=False)
  axis.set_xlabel("share of the time in which workers compute")
  return [_finish(figure, "utilization", "Compute utilisation on chosen links",
                  "From the network simulator, without failures.", groups, columns=6)]


def _events(runs: Sequence[Run]) -> list[Figure]:
  eventful = [run for run in runs if run.events]
  if not eventful:
    return []
  kinds = sorted({str(e.get("event")) for run in eventful for e in run.events})
  figure, axis = plt.subplots(figsize=(10.4, 1.6 + 0.42 * len(eventful)), layout="constrained")
  for j, kind in enumerate(kinds):
    points = [(e["round"], i) for i, run in enumerate(eventful) for e in run.events if str(e.get("event")) == kind]
    offset = (j - (len(kinds) - 1) / 2) * 0.5 / len(kinds)
    axis.scatter([x for x, _ in points], [y + offset for _, y in points], s=16, label=kind, marker="os^Dvx*P"[j % 8],
                 color=_COLOURS[j % len(_COLOURS)])
  axis.set_yticks(range(len(eventful)), [run.name for run in eventful])
  axis.set_ylim(len(eventful) - 0.5, -0.5)
  _by_round(axis)
  figure.legend(loc="outside lower center", ncols=4)
  return [_finish(figure, "events", "Events", "What the runs wrote into events.jsonl.")]
