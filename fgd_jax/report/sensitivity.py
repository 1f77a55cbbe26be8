"""Finds the blocks that make workers predict differently, and a subset for FGD's Mix2 within a budget of bytes.

    python -m fgd_jax.report.sensitivity runs/mine
    python -m fgd_jax.report.sensitivity runs/mine --budget=10MB [--at=outer] [--by=copy] [--json]

DIR is a run of fgd_jax.train with a checkpoint, of which nothing is changed. For every block (embedding, each layer, final
norm, head) it measures how far the Jensen-Shannon distance between workers falls when that block alone is shared, and ranks
blocks by that drop per byte. The greedy subset is compared with the paper's: embeddings, head and the first layers.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

import fgd_jax as fgd
from fgd_jax import config as configs
from fgd_jax import data, models
from fgd_jax.checkpoint import Progress, describe, unreadable
from fgd_jax.command import Parser
from fgd_jax.export.trained import restore_parts
from fgd_jax.folder import write_json
from fgd_jax.measure import js_when_shared
from fgd_jax.measure.sensitivity import WAYS, ranked, within_budget
from fgd_jax.mixing import Subset, embeddings_head_early_layers, path_of
from fgd_jax.mixing.subset import EMBEDDING_OR_HEAD, NUMBERED_LAYER, STACKED_LAYERS

PyTree = Any
FIELDS = ("block", "parameters", "bytes", "js_before", "js_after", "drop", "drop_per_mb", "rank", "chosen", "paper")
BUDGET = re.compile(r"^\s*([0-9.]+)\s*(%|kB|MB|GB)\s*$", re.IGNORECASE)
UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9}


class Blocks(NamedTuple):
  """The blocks of one worker's parameters, in the order of the model.

  Attributes:
    names: "embed", "layers_0", ..., "final_norm", "lm_head"; rows of stacked layers are named as numbered layers are.
    labels: the parameters' pytree of int32 arrays: number of the block, [] or [layers, 1, ...].
    parameters, bytes: int [blocks].
  """

  names: tuple[str, ...]
  labels: PyTree
  parameters: np.ndarray
  bytes: np.ndarray

  def covered(self, subset: Subset) -> np.ndarray:
    """bool [blocks]: those that a subset covers.

    Raises:
      ValueError: it covers a part of a block.
    """
    count = lambda labels: np.bincount(np.concatenate([np.ravel(x) for x in labels]), minlength=len(self.names))
    wanted, there = count(subset.take(self.labels).values()), count(jax.tree.leaves(self.labels))
    if (partly := (wanted > 0) & (wanted < there)).any():
      raise ValueError(f"The subset covers a part of the block {self.names[int(np.argmax(partly))]}.")
    return wanted > 0

  def size(self, chosen: np.ndarray) -> int:
    """Bytes of the chosen blocks."""
    return int(self.bytes[np.asarray(chosen, bool)].sum())

  def listed(self, chosen: np.ndarray) -> list[str]:
    return [name for name, c in zip(self.names, chosen) if c]


def find_blocks(shapes: PyTree) -> Blocks:
  """The blocks of one worker's parameters (arrays or ShapeDtypeStructs): first keys of paths, and rows of stacked layers."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
  named = [(_names(path_of(path), x), x) for path, x in leaves]
  names = sorted({name for of_rows, _ in named for name in of_rows}, key=_order)
  parameters, size, labels = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64), []
  for of_rows, x in named:
    ids = np.asarray([names.index(name) for name in of_rows], np.int32)
    np.add.at(parameters, ids, x.size // ids.size)
    np.add.at(size, ids, x.size // ids.size * x.dtype.itemsize)
    labels.append(ids.reshape(-1, *(1,) * (x.ndim - 1)) if x.ndim and ids.size == x.shape[0] else ids.reshape(()))
  return Blocks(tuple(names), jax.tree.unflatten(treedef, labels), parameters, size)


def _names(path: str, x: Any) -> list[str]:
  """Blocks of a leaf: one, or one for each row of stacked layers."""
  first = path.split("/")[0]
  stacked = STACKED_LAYERS.search(path) and not NUMBERED_LAYER.search(path)
  return [f"{first}_{i}" for i in range(x.shape[0])] if stacked else [first]


def _order(name: str) -> tuple[int, int]:
  """Embedding, layers, norm, head."""
  if layer := NUMBERED_LAYER.search(name):
    return 1, int(layer.group(3))
  return (0 if name.startswith("embed") else 3 if EMBEDDING_OR_HEAD.search(name) else 2), 0


# --- from a run's folder to stacked parameters -----------------------------------------------------------------------


class Snapshot(NamedTuple):
  """Workers of a run that disagree.

  Attributes:
    config: of the checkpoint. round: completed rounds at the checkpoint. at: "inner" or "outer".
    stack: pytree of [M, ...]. apply: the model. tokens: int32 [N, B, L], held out. folder: of the run.
  """

  config: ConfigDict
  round: int
  at: str
  stack: PyTree
  apply: Callable
  tokens: np.ndarray
  folder: str


def read(folder: str, step: int | None = None, at: str = "inner", sequences: int | None = None) -> Snapshot:
  """The workers' parameters of a run after an outer step, or at the end of the inner phase that follows it.

  Args:
    folder: a run's folder, or one step in its checkpoints folder. step: completed rounds; None: the newest checkpoint.
    at: "inner": takes the H inner steps of the next round, on the data that come next. "outer": as saved.
    sequences: held-out sequences to measure on; None: two evaluation batches.

  Raises:
    ValueError, FileNotFoundError: no such run or data, or one without disagreement to measure.
  """
  if os.path.isdir(os.path.join(folder, "syncer")):
    raise ValueError(f"{folder} is a run of fgd_jax.decoupled, whose learners have no common end of an inner phase; give a "
                     "run of fgd_jax.train.")
  found = describe(folder, step)
  config = configs.unflat(found["config"])
  configs.validate(config)
  if config.workers < 2:
    raise ValueError(f"{folder} has workers={config.workers}, and nobody to disagree with; give a run of two or more.")
  if configs.make_method(config).inner_grad is not None:
    raise ValueError(f"{folder} is a run of method {config.method.name}, which averages gradients in every step, so that "
                     "its workers are equal and there is nothing to compare; give another run.")
  corpus = data.load(config.data, config.seq_len, config.seed)
  shape = configs.make_model_config(config, corpus.vocab_size)
  if jax.default_backend() == "cpu":
    shape = dataclasses.replace(shape, attention="einsum")
  model = models.make(shape)
  tokens = _heldout(config, corpus, sequences)
  stack = _saved(config, model, found, corpus if at == "inner" else None)
  where = os.path.dirname(found["folder"])
  return Snapshot(config, found["round"], at, stack, model.apply, tokens,
                  os.path.dirname(where) if os.path.basename(where) == "checkpoints" else where)


def _heldout(config: ConfigDict, corpus: data.Corpus, sequences: int | None) -> np.ndarray:
  """int32 [N, B, L]: the first sequences of the run's evaluation."""
  there, batch = config.eval_batches * config.eval_batch_size, config.eval_batch_size
  sequences = min(2 * batch, there) if sequences is None else sequences
  if not 1 <= sequences <= there:
    raise ValueError(f"--sequences={sequences} must be from 1 to the {there} of the run's evaluation (eval_batches x "
                     "eval_batch_size).")
  tokens = data.heldout_batches(corpus.heldout, batch, config.eval_batches)["tokens"].reshape(there, -1)[:sequences, :-1]
  return tokens.reshape(-1, batch if sequences % batch == 0 else 1, tokens.shape[-1])


def _saved(config: ConfigDict, model: models.Model, found: dict[str, Any], corpus: data.Corpus | None) -> PyTree:
  """Parameters [M, ...] as saved; with a corpus, after the inner steps of the next round."""
  folder, step = os.path.split(found["folder"])
  keep = lambda w, z: {"w": w}
  _, round_fn = configs.build_round(config, model.loss, fgd.Workers(config.workers), (keep,), overlap="auto")
  wanted = round_fn.abstract_state(jax.eval_shape(model.init, jax.random.key(0)))._asdict()
  parts = {key: wanted[key] for key in ("params", *(("inner_opt_state", "method_state") if corpus else ()))}
  try:
    saved = restore_parts(epath.Path(found["folder"]) / "state", parts)
  except Exception as e:  # orbax and tensorstore raise what they please for damaged files
    raise ValueError(unreadable(folder, int(step), e, "Choose another with --round.")) from e
  if corpus is None:
    return saved["params"]
  progress = Progress(**found["progress"])
  batches = data.round_batches(corpus.train, config.workers, config.inner_steps, config.batch_size, config.seed,
                               progress.earlier)[found["round"] - progress.since]
  state = fgd.State(saved["params"], saved["inner_opt_state"], saved["method_state"], np.int32(found["round"]))
  return round_fn(state, batches)[1]["w"]


# --- drops, the greedy subset and the paper's ------------------------------------------------------------------------


def measure(snapshot: Snapshot, by: str = "average", budget: str | None = None) -> dict[str, Any]:
  """The drop of every block, and what the greedy subset and the paper's give within the budget.

  Args:
    by: see `fgd_jax.measure.js_when_shared`.
    budget: "43%" of the parameters' bytes, or "10MB"; None: what the paper's subset takes.

  Returns:
    A dict for JSON: run, method, workers, round, at, by, positions, js_before, budget_bytes, total_bytes, blocks (a dict of
    `FIELDS` each), greedy and paper (None where it does not fit): {"blocks", "bytes", "share", "js_after", "drop"}, the
    former with "regex" and "words" (of a config), the latter with "layers".

  Raises:
    ValueError: workers that predict alike, numbers that are not finite, or a budget below every block.
  """
  blocks = find_blocks(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), snapshot.stack))
  total = int(blocks.bytes.sum())
  paper = [blocks.covered(Subset(embeddings_head_early_layers(n))) for n in range(snapshot.config.model.layers + 1)]
  limit = blocks.size(paper[min(2, len(paper) - 1)]) if budget is None else parse_budget(budget, total)
  smallest = int(np.argmin(blocks.bytes))
  if limit < blocks.bytes[smallest]:
    raise ValueError(f"--budget={budget} is {limit:,.0f} bytes, and the smallest block, {blocks.names[smallest]}, has "
                     f"{blocks.bytes[smallest]:,}; raise it.")
  after = js_when_shared(snapshot.apply, snapshot.stack, snapshot.tokens, blocks.labels, by)
  before = after(np.zeros(len(blocks.names), bool))
  _refuse_nothing(before, snapshot)
  left = [after(row) for row in np.eye(len(blocks.names), dtype=bool)]
  drops = [before - x for x in left]
  order = ranked(drops, blocks.bytes.tolist())
  greedy = np.isin(np.arange(len(drops)), within_budget(drops, blocks.bytes.tolist(), limit))
  joint = lambda chosen: {"blocks": blocks.listed(chosen), "bytes": (size := blocks.size(chosen)), "share": size / total,
                          "js_after": (js := after(chosen)), "drop": before - js}
  fitting = [n for n, chosen in enumerate(paper) if blocks.size(chosen) <= limit]
  theirs = paper[fitting[-1]] if fitting else np.zeros(len(drops), bool)
  rows = [dict(zip(FIELDS, (name, int(blocks.parameters[i]), int(blocks.bytes[i]), before, left[i], drops[i],
                            drops[i] / blocks.bytes[i] * 1e6, order.index(i) + 1, bool(greedy[i]), bool(theirs[i]))))
          for i, name in enumerate(blocks.names)]
  config = snapshot.config
  return {"run": snapshot.folder, "method": config.method.name, "workers": config.workers, "round": snapshot.round,
          "at": snapshot.at, "by": by, "positions": int(snapshot.tokens.size), "tied": bool(config.model.tied),
          "js_before": before, "budget_bytes": limit, "total_bytes": total, "blocks": rows,
          "greedy": _for_training(config, blocks, greedy) | joint(greedy) if greedy.any() else None,
          "paper": {"layers": fitting[-1], **joint(theirs)} if fitting else None}


def parse_budget(text: str, total: int) -> float:
  """Bytes of "43%" of `total`, or of "10MB" (kB, MB, GB: powers of 1000).

  Raises:
    ValueError: one sentence.
  """
  match = BUDGET.match(text)
  try:
    value = float(match[1]) if match else -1.0
  except ValueError:
    value = -1.0
  if not match or value <= 0 or (match[2] == "%" and value > 100):
    raise ValueError(f"--budget={text!r} must be a share of the parameters such as 43%, up to 100%, or bytes such as 10MB.")
  return value / 100 * total if match[2] == "%" else value * UNITS[match[2].lower()]


def _refuse_nothing(before: float, snapshot: Snapshot) -> None:
  where = {"inner": "at the end of the inner phase", "outer": "after the outer step"}[snapshot.at]
  if not np.isfinite(before):
    raise ValueError(f"The JS distance {where} is {before}: a worker's parameters are not finite.")
  if before == 0:
    remedy = "use --at=inner" if snapshot.at == "outer" else "give another run"
    raise ValueError(f"All workers predict the same {where} (method {snapshot.config.method.name}, round "
                     f"{snapshot.round}), so there is nothing to compare; {remedy}.")


def regex_of(names: Iterable[str]) -> str:
  """A pattern for `subset` that matches the paths of these blocks and no others."""
  return f"^({'|'.join(re.escape(name) for name in names)})/"


def _for_training(config: ConfigDict, blocks: Blocks, chosen: np.ndarray) -> dict[str, str]:
  """The pattern of the chosen blocks, and words that give a config like the run's a Mix2 with this subset."""
  regex = regex_of(blocks.listed(chosen))
  words = f"method.subset={regex}"
  if not takes_subset(config):
    words = f"method=GlobalM1LocalM2,{words}"
  return {"regex": regex, "words": words}


def takes_subset(config: ConfigDict) -> bool:
  """Whether the config's method has a Mix2 of which a subset can be chosen."""
  method = configs.make_method(config)
  return isinstance(method, fgd.methods.FactoredGossip) and not any(
      m.key == "mix2" and m.topology.identity for m in method.bind(config.workers, config.seed).bound_mixers())


# --- table, files and plot -------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
  """`measure` for people."""
  place = "after the inner phase that follows" if found["at"] == "inner" else "after the outer step"
  lines = [f"{found['run']}: {found['method']}, {found['workers']} workers, round {found['round']}, {place}, blocks shared "
           f"by {found['by']}, {found['positions']:,} held-out positions.",
           f"JS distance between workers: {found['js_before']:.5f}"]
  if found["tied"]:
    lines.append("Embedding and head are one matrix here (model.tied): the block embed is both.")
  lines.append(f"  {'block':12s} {'parameters':>13s} {'MB':>10s} {'JS after':>9s} {'drop':>9s} {'drop %':>7s} "
               f"{'drop per MB':>12s} {'rank':>5s}  chosen  paper")
  for row in found["blocks"]:
    lines.append(f"  {row['block']:12s} {row['parameters']:13,d} {row['bytes'] / 1e6:10.4f} {row['js_after']:9.5f} "
                 f"{row['drop']:9.5f} {100 * row['drop'] / found['js_before']:7.2f} {row['drop_per_mb']:12.5f} "
                 f"{row['rank']:5d}  {'x' if row['chosen'] else '':6s}  {'x' if row['paper'] else ''}".rstrip())
  lines.append(f"Within {found['budget_bytes'] / 1e6:.4g} MB ({100 * found['budget_bytes'] / found['total_bytes']:.1f} %), "
               "shared together:")
  greedy, paper = found["greedy"], found["paper"]
  lines.append(_joint("greedy by drop per byte", found, greedy) if greedy else
               "  greedy by drop per byte: nothing, since no block that fits lowers the JS distance.")
  head = f"embeddings_head_early_layers({paper['layers']})" if paper else "the paper's subset"
  lines.append(_joint(head, found, paper) if paper else f"  {head}: embedding and head alone do not fit.")
  if greedy:
    lines.append(f"For training, as words of its config (--config='FILE:{greedy['words']}'): {greedy['words']}")
  return "\n".join(lines)


def _joint(head: str, found: dict[str, Any], subset: dict[str, Any]) -> str:
  return (f"  {head}: {', '.join(subset['blocks'])}: {subset['bytes'] / 1e6:.4g} MB ({100 * subset['share']:.1f} %), JS "
          f"{subset['js_after']:.5f}, drop {subset['drop']:.5f} ({100 * subset['drop'] / found['js_before']:.1f} %).")


def write(found: dict[str, Any], out: str) -> list[str]:
  """Writes round_20_inner_average.csv, .json and .png (round, at, by) in a folder; returns their paths."""
  os.makedirs(out, exist_ok=True)
  name = f"round_{found['round']}_{found['at']}_{found['by']}"
  paths = [os.path.join(out, f"{name}.{kind}") for kind in ("csv", "json", "png")]
  with open(paths[0], "w", newline="", encoding="utf-8") as f:
    writer = csv.DictWriter(f, FIELDS)
    writer.writeheader()
    writer.writerows(found["blocks"])
  write_json(paths[1], found)
  plot(paths[2], found)
  return paths


def plot(path: str, found: dict[str, Any]) -> None:
  """Bars of every block in the order of the model: share of the JS distance, and drop per MB."""
  from matplotlib.figure import Figure
  from matplotlib.patches import Patch

  rows, colours = found["blocks"], {True: "#D55E00", False: "#0072B2"}
  figure = Figure(figsize=(10, 0.3 * len(rows) + 2), layout="constrained")
  left, right = figure.subplots(1, 2, sharey=True)
  figure.suptitle(f"{found['method']}, {found['workers']} workers, round {found['round']}, --at={found['at']} "
                  f"--by={found['by']}: JS distance {found['js_before']:.4f}", fontsize=11)
  for axis, key, scale, label in ((left, "drop", 100 / found["js_before"], "drop of JS when shared alone (%)"),
                                  (right, "drop_per_mb", 1, "drop of JS per MB")):
    values = [scale * row[key] for row in rows]
    axis.barh([row["block"] + (" *" if row["paper"] else "") for row in rows], values,
              color=[colours[row["chosen"]] for row in rows])
    large = [value for row, value in zip(rows, values) if row["bytes"] > 0.01 * found["total_bytes"]]
    axis.set_xlim(1.25 * min(0, *values), 1.25 * max(large) if max(large) > 0 else None)  # a norm's few bytes may go far out
    for y, value in enumerate(values):
      axis.text(min(max(value, 0), axis.get_xlim()[1] / 1.25), y, f" {value:.3g}", va="center", fontsize=8)
    axis.set_xlabel(label)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
  left.invert_yaxis()
  handles = [Patch(color=colours[True], label="greedy subset"), Patch(color=colours[False], label="not in it"),
             Patch(alpha=0, label="* in the paper's subset")]
  figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
  figure.savefig(path, dpi=120)


# --- command ---------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
  p = Parser(prog="python -m fgd_jax.report.sensitivity", description=__doc__)
  p.add_argument("folder", metavar="DIR", help="a run's folder, or one step in its checkpoints folder")
  p.add_argument("--budget", help="bytes that the subset may take: 43%% of the parameters, or 10MB (default: what "
                 "embeddings, head and the first two layers take)")
  p.add_argument("--at", choices=("inner", "outer"), default="inner", help="measure at the end of the next inner phase, "
                 "which is run in memory (default), or after the outer step, as saved")
  p.add_argument("--by", choices=WAYS, default="average", help="share a block by averaging it over the workers (default), "
                 "or by copying it from one to the other in every pair")
  p.add_argument("--round", type=int, help="of the checkpoint (default: the newest)")
  p.add_argument("--sequences", type=int, help="held-out sequences (default: two evaluation batches)")
  p.add_argument("--out", help="folder of the CSV, JSON and PNG (default DIR/sensitivity)")
  p.add_argument("--platform", default="cpu", help="of jax: cpu (default, as a run may be using the accelerators), gpu or "
                 "tpu; all workers are held on one device")
  p.add_argument("--json", action="store_true", help="print everything as JSON")
  return p


def main(argv: list[str] | None = None) -> None:
  args = parser().parse_args(argv)
  jax.config.update("jax_platforms", args.platform)
  try:
    jax.devices()
  except RuntimeError as e:
    sys.exit(f"error: --platform={args.platform}: jax cannot use it ({str(e).splitlines()[0][:200]}).")
  try:
    if args.budget is not None:
      parse_budget(args.budget, 1)  # refuses what it cannot read before anything is computed
    if args.out is not None:
      os.makedirs(args.out, exist_ok=True)
    snapshot = read(args.folder, args.round, args.at, args.sequences)
    found = measure(snapshot, args.by, args.budget)
    if not args.json:
      print(table(found), flush=True)  # before the files, which may not be written
    files = write(found, args.out or os.path.join(snapshot.folder, "sensitivity"))
  except (ValueError, OSError) as e:
    sys.exit(f"error: {e}")
  print(json.dumps({**found, "files": files}) if args.json else ", ".join(files))


if __name__ == "__main__":
  main()
