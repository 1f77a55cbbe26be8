"""Checkpoints: state, data position, progress and config of a round in one atomic step, with orbax.

    python -m fgd_jax.checkpoint describe DIR [--json] [--leaves]      what a run's checkpoint holds
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from ml_collections import ConfigDict

from fgd_jax.config import FREE_KEYS, WORKER_KEYS, flat, steps_of_workers, unflat
from fgd_jax.default_config import get_config as default
from fgd_jax.mixing import path_of
from fgd_jax.state import State


class ConfigMismatchError(ValueError):
  """A config contradicts the run that it should continue."""


class Progress(NamedTuple):
  """What a run's past means for its future besides the state: counters that outlive a change of the number of workers.

  Attributes:
    workers: M since round `since`.
    since: the round from which the number of workers is M.
    tokens: that all workers had been trained on before it.
    now: the same at the checkpoint.
    examples_per_round: that each worker has read in a round since then.
    earlier: (workers, examples that each of them has read) of the times before; see `fgd_jax.data.deal`.
  """

  workers: int
  since: int
  tokens: int
  now: int
  examples_per_round: int
  earlier: tuple[tuple[int, int], ...] = ()

  @classmethod
  def start(cls, config: ConfigDict) -> Progress:
    """Of a fresh run."""
    return cls(config.workers, 0, 0, 0, config.inner_steps * config.batch_size)

  def changed(self, done: int, config: ConfigDict) -> Progress:
    """From round `done`, that of the checkpoint, on with the workers of `config`."""
    read = (self.workers, (done - self.since) * self.examples_per_round)
    return Progress.start(config)._replace(since=done, tokens=self.now, now=self.now, earlier=(*self.earlier, read))


class Checkpoints:
  """The checkpoints of one run's folder.

  A step is one round's state, the position of the data iterator, the progress and the config, committed together by a
  rename, so a half-written step is never taken for a checkpoint. Saving is asynchronous.

  Args:
    folder: where the steps lie; made if missing.
    keep: how many of the newest steps stay.
    config: of the run.

  Attributes:
    progress: saved with every step; that of a fresh run until `found` or the caller sets another.
  """

  def __init__(self, folder: str, keep: int, config: ConfigDict):
    self._config = config
    self.progress = Progress.start(config)
    self._manager = ocp.CheckpointManager(
        os.path.abspath(folder), options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True,
                                                                      enable_async_checkpointing=True))

  def latest(self) -> int | None:
    """The newest complete round on disk, None without any."""
    return self._manager.latest_step()

  def save(self, state: State, data: Any, tokens: int = 0) -> None:
    """Saves the state at round `state.round` with the iterator's position; call before the iterator advances.

    Args:
      state, data: the state and the iterator of its batches.
      tokens: that all workers have been trained on so far.
    """
    if int(state.round) == self.latest():
      return
    saved = state._replace(round=np.asarray(state.round))
    if jax.devices()[0].platform == "cpu":  # orbax may still read these buffers when the next round donates them
      saved = jax.tree.map(lambda x: x.copy(), saved)
    self._manager.save(int(state.round), args=ocp.args.Composite(
        state=ocp.args.StandardSave(saved), data=grain.checkpoint.CheckpointSave(data),  # type: ignore[attr-defined]
        config=ocp.args.JsonSave(flat(self._config)),
        progress=ocp.args.JsonSave(self.progress._replace(now=int(tokens))._asdict())))

  def found(self) -> tuple[ConfigDict, Progress] | None:
    """Config and progress of the newest step; None without any.

    Raises:
      ConfigMismatchError: a config that contradicts the checkpoint's, naming the key.
      ValueError: a checkpoint that cannot be read.
    """
    step = self.latest()
    if step is None:
      return None
    has_progress = os.path.isdir(os.path.join(self._manager.directory, str(step), "progress"))
    items = ["config", "progress"] if has_progress else ["config"]  # saved by a version that had none
    try:
      read = self._manager.restore(step, args=ocp.args.Composite(**{item: ocp.args.JsonRestore() for item in items}))
      saved = unflat(read["config"])
      progress = _progress(read.get("progress"), saved, step)
    except Exception as e:  # orbax and tensorstore raise what they please for damaged files
      raise ValueError(unreadable(self._manager.directory, step, e)) from e
    refuse_other_config(self._config, read["config"], f"the checkpoint of round {step}")
    return saved, progress

  def restore(self, abstract: State, data: Any = None) -> State:
    """The newest state, sharded as `abstract` says; moves the iterator `data`, where there is one, to its position.

    Raises:
      ConfigMismatchError: a config that contradicts the checkpoint's, naming the key.
      ValueError: a checkpoint that cannot be read.
    """
    step = self.latest()
    if step is None:
      raise ValueError("There is no checkpoint to restore.")
    target = abstract._replace(round=np.zeros((), np.int32))
    self.found()  # refuses another config
    items = {"state": ocp.args.StandardRestore(target)}
    if data is not None:
      items["data"] = grain.checkpoint.CheckpointRestore(data)  # type: ignore[attr-defined]
    try:
      restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
      if data is not None:
        _restore_position(self._manager.directory / str(step) / "data", data)
    except Exception as e:  # orbax and tensorstore raise what they please for damaged files
      raise ValueError(unreadable(self._manager.directory, step, e)) from e
    state = restored["state"]
    return State(state.params, state.inner_opt_state, state.method_state, np.int32(state.round))

  def close(self) -> None:
    """Waits for saves in flight; raises what they raised."""
    self._manager.wait_until_finished()
    self._manager.close()


def _restore_position(folder: Any, data: Any) -> None:
  """Moves the iterator to a saved position, which is the same for all processes: any number of them may go on from it.

  grain's own restore insists on the number of processes that saved.
  """
  files = sorted(path for path in folder.iterdir() if path.name.startswith("process_0-of-"))
  if not files:
    raise ValueError("the position in the data is missing")
  data.set_state(json.loads(files[0].read_text()))
  data.start_prefetch()


def _progress(saved: dict[str, Any] | None, config: ConfigDict, step: int) -> Progress:
  """As saved; where the checkpoint is of a version that saved none, what its config means."""
  if saved is None:
    return Progress.start(config)._replace(now=step * sum(steps_of_workers(config)) * config.batch_size * config.seq_len)
  return Progress(**{**saved, "earlier": tuple(map(tuple, saved["earlier"]))})


def unreadable(folder: Any, step: int, error: Exception,
               remedy: str = "Move it away to resume from the one before, or choose another --workdir.") -> str:
  """The sentence for a checkpoint that raised `error` when it was read."""
  reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
  return f"The checkpoint {folder}/{step} cannot be read ({reason}). {remedy}"


def refuse_other_config(config: ConfigDict, saved: dict[str, Any], where: str) -> None:
  """Raises ConfigMismatchError for the first key in which `config` contradicts the saved keys.

  `rounds` may change where no learning rate depends on it (inner.schedule=constant, no method.outer_schedule), and where
  the number of workers changes, so may the keys that depend on it. A key that is newer than the saved run counts as having
  had its default there.
  """
  now, defaults = flat(config), flat(default())
  was = lambda key: saved.get(key, defaults.get(key))
  steady = config.inner.schedule == "constant" and config.method.outer_schedule in (None, "constant")
  free = FREE_KEYS + (("rounds",) if steady else ())
  free += WORKER_KEYS if now["workers"] != was("workers") else ()
  for key in sorted(set(now) | set(saved)):
    if key not in free and now.get(key) != was(key):
      raise ConfigMismatchError(f"{key}={now.get(key)!r} contradicts {where}, which has {was(key)!r}; restore the "
                                "value or choose another --workdir.")


# --- the command -----------------------------------------------------------------------------------------------------


def find_step(folder: str, step: int | None = None) -> tuple[str, int, list[int]]:
  """The folder with the steps, the wanted one (None: the newest) and all complete ones.

  Args:
    folder: a run's folder, its checkpoints folder or one step's folder.

  Raises:
    ValueError: there is no complete checkpoint, or not that one.
  """
  folder = os.path.abspath(folder)
  if not os.path.isdir(folder):
    raise ValueError(f"{folder} is not a folder; give a run's folder.")
  if os.path.isdir(os.path.join(folder, "checkpoints")):
    folder = os.path.join(folder, "checkpoints")
  if os.path.basename(folder).isdecimal() and os.path.isdir(os.path.join(folder, "state")):
    if step not in (None, int(os.path.basename(folder))):
      raise ValueError(f"{folder} is the checkpoint of round {os.path.basename(folder)}, not of round {step}; leave the "
                       "round out, or give the run's folder.")
    folder, step = os.path.dirname(folder), int(os.path.basename(folder))
  steps = sorted(int(name) for name in os.listdir(folder) if name.isdecimal() and os.path.isdir(
      os.path.join(folder, name, "state")))
  if not steps:
    raise ValueError(f"{folder} holds no complete checkpoint; give the folder of a run that has saved one.")
  if step is not None and step not in steps:
    raise ValueError(f"{folder} holds no checkpoint of round {step}; it has {', '.join(map(str, steps))}.")
  return folder, steps[-1] if step is None else step, steps


def describe(folder: str, step: int | None = None) -> dict[str, Any]:
  """What a checkpoint holds, from its files alone: no array is read and no mesh is built.

  Args:
    folder, step: see `find_step`.

  Returns:
    A dict for JSON: round, rounds_saved, workers, tokens, method, progress, data (the iterator's position), config,
    leaves {path: {"shape", "dtype", "bytes"}} and parts {name: {"leaves", "numbers", "bytes"}}.

  Raises:
    ValueError: no checkpoint, or one that cannot be read.
  """
  folder, step, steps = find_step(folder, step)
  here = os.path.join(folder, str(step))
  read = lambda *names: json.loads(_text(os.path.join(here, *names)))
  try:
    tree = ocp.StandardCheckpointHandler().metadata(epath.Path(here, "state")).tree
    config = read("config", "metadata")
    has_progress = os.path.isdir(os.path.join(here, "progress"))
    progress = _progress(read("progress", "metadata") if has_progress else None, unflat(config), step)
    names = sorted(name for name in os.listdir(os.path.join(here, "data")) if name.startswith("process_"))
    positions = [read("data", name) for name in names]
  except Exception as e:  # orbax and tensorstore raise what they please for damaged files
    raise ValueError(unreadable(folder, step, e, "Choose another step with --round.")) from e
  leaves = {path_of(path): _leaf(x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
  parts: dict[str, dict[str, int]] = {}
  for path, leaf in leaves.items():
    part = parts.setdefault(path.split("/")[0], {"leaves": 0, "numbers": 0, "bytes": 0})
    for key, value in (("leaves", 1), ("numbers", math.prod(leaf["shape"])), ("bytes", leaf["bytes"])):
      part[key] += value
  return {"folder": here, "round": step, "rounds_saved": steps, "workers": progress.workers,
          "tokens": progress.now, "method": config.get("method.name"), "progress": progress._asdict(),
          "data": positions, "parts": parts, "leaves": leaves, "config": config}


def _text(path: str) -> str:
  with open(path, encoding="utf-8") as f:
    return f.read()


def _leaf(x: Any) -> dict[str, Any]:
  return {"shape": list(x.shape), "dtype": str(np.dtype(x.dtype)), "bytes": math.prod(x.shape) * np.dtype(x.dtype).itemsize}


def show(found: dict[str, Any], leaves: bool) -> str:
  """`describe` for people."""
  config, defaults = found["config"], flat(default())
  others = ", ".join(str(r) for r in found["rounds_saved"] if r != found["round"])
  lines = [f"{found['folder']}: round {found['round']} of {config.get('rounds')}, {found['tokens']:,} tokens, method "
           f"{found['method']}, {found['workers']} workers" + (f" (also saved: {others})" if others else "")]
  for workers, examples in found["progress"]["earlier"]:
    lines.append(f"  earlier: {workers} workers, each of which read {examples:,} sequences")
  read, since = sorted({p.get("next_index") for p in found["data"]}), found["progress"]["since"]
  lines.append(f"  data: {' or '.join(map(str, read))} rounds are read"
               + (f" since round {since}, when what was left was dealt to these workers" if since else ""))
  changed = {k: v for k, v in config.items() if v != defaults.get(k)}
  lines.append("  config besides defaults: " + (", ".join(f"{k}={v}" for k, v in sorted(changed.items())) or "none"))
  lines.append(f"  {'part':24s} {'arrays':>7s} {'numbers':>15s} {'MB':>12s}")
  for name, part in sorted(found["parts"].items(), key=lambda item: -item[1]["bytes"]):
    lines.append(f"  {name:24s} {part['leaves']:7d} {part['numbers']:15,d} {part['bytes'] / 1e6:12,.3f}")
  for path, leaf in found["leaves"].items() if leaves else ():
    lines.append(f"    {path:60s} {leaf['dtype']:9s} {leaf['shape']}")
  return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog="python -m fgd_jax.checkpoint", description=__doc__, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  commands = parser.add_subparsers(dest="command", required=True)
  p = commands.add_parser("describe", help="print what a checkpoint holds", allow_abbrev=False)
  p.add_argument("folder", help="a run's folder, or one step in its checkpoints folder")
  p.add_argument("--round", type=int, help="which one (default: the newest)")
  p.add_argument("--leaves", action="store_true", help="list every array")
  p.add_argument("--json", action="store_true", help="everything as JSON")
  args = parser.parse_args(argv)
  jax.config.update("jax_platforms", "cpu")  # a run may be using the accelerators
  try:
    found = describe(args.folder, args.round)
  except (ValueError, OSError) as e:
    sys.exit(f"error: {e}")
  print(json.dumps(found) if args.json else show(found, args.leaves))


if __name__ == "__main__":
  main()
