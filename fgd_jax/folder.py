"""A run's folder: who may use it, what an earlier start left in it, and files that are either whole or not there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from fgd_jax import config as configs
from fgd_jax.checkpoint import find_step, refuse_other_config
from fgd_jax.report import curves
from fgd_jax.runlog import read_lines

LOCK_FILE = ".lock"


@contextlib.contextmanager
def claimed(workdir: str) -> Iterator[None]:
  """Makes the folder and holds its lock, which ends with the process however that ends.

  Raises:
    ValueError: a folder that holds something else, or that another process holds.
    OSError: the folder cannot be made or written.
  """
  path = pathlib.Path(workdir).absolute()
  made = [folder for folder in (path, *path.parents) if not folder.exists()]
  os.makedirs(workdir, exist_ok=True)
  if not os.path.exists(os.path.join(workdir, "config.json")):
    ours = {"checkpoints", "tensorboard", "profile", "logs", "metrics.jsonl", "events.jsonl", "summary.json",
            curves.FILE_NAME, LOCK_FILE}
    if strangers := sorted(set(os.listdir(workdir)) - ours):
      raise ValueError(f"--workdir={workdir} holds {strangers[0]!r} and no config.json; choose an empty or new folder.")
  with open(os.path.join(workdir, LOCK_FILE), "w") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      raise ValueError(f"Another process is running in --workdir={workdir}; stop it or choose another folder.") from e
    except OSError:  # a file system without locks
      pass
    try:
      yield
    except BaseException:
      with contextlib.suppress(OSError):
        if os.listdir(workdir) == [LOCK_FILE]:  # refused before it began
          os.remove(lock.name)
          for folder in made:
            folder.rmdir()
      raise


def recognise_run(config: ConfigDict, workdir: str) -> dict[str, Any] | None:
  """Looks at what an earlier start left in the folder; returns the summary of a run that is finished.

  Raises:
    ValueError: a damaged run, or one whose config contradicts this one.
  """
  path, checkpoints = os.path.join(workdir, "config.json"), os.path.join(workdir, "checkpoints")
  if os.path.exists(checkpoints) and not os.path.isdir(checkpoints):
    raise ValueError(f"{checkpoints} is not a folder; choose another --workdir.")
  if not os.path.exists(path):
    return None
  saved = read_json(path)
  summary = read_summary(workdir)
  trained = summary or newest(workdir) is not None or read_lines(os.path.join(workdir, "metrics.jsonl"))
  if not trained and "inner_steps" in saved:  # a run, not an exported model
    return None
  refuse_other_config(config, saved, f"the run in {workdir}")
  if summary is None or summary.get("rounds", 0) >= config.rounds:
    return summary
  if not os.path.isdir(checkpoints):
    raise ValueError(f"The run in {workdir} ended at round {summary.get('rounds')} and its checkpoints are gone, so it "
                     "cannot be continued; choose another --workdir.")
  return None


def newest(workdir: str) -> int | None:
  """The round of the newest complete checkpoint on disk; None without any."""
  try:
    return find_step(workdir)[1]
  except ValueError:
    return None


def what_next(workdir: str) -> str:
  """What the same command will do, in one sentence."""
  step = newest(workdir)
  if step is None:
    return "There is no checkpoint, so the same command starts from the beginning."
  return f"The same command goes on from the checkpoint of round {step}."


def read_summary(workdir: str) -> dict[str, Any] | None:
  """summary.json, None where the run has none; refuses damaged records before they are rewritten."""
  read_lines(os.path.join(workdir, "metrics.jsonl"))
  path = os.path.join(workdir, "summary.json")
  return read_json(path) if os.path.exists(path) else None


def read_json(path: str) -> dict[str, Any]:
  """The object in a JSON file of a run."""
  try:
    with open(path, encoding="utf-8") as f:
      content = json.load(f)
    if isinstance(content, dict) and content:
      return content
  except ValueError:
    pass
  raise ValueError(f"{path} is damaged; restore it, move it away or choose another --workdir.")


def write_config(config: ConfigDict, workdir: str) -> None:
  write_json(os.path.join(workdir, "config.json"), configs.flat(config))


def write_json(path: str, content: dict[str, Any]) -> None:
  """Writes a file that is either whole or not there."""
  with open(path + ".tmp", "w", encoding="utf-8") as f:
    json.dump(content, f, indent=2)
    f.write("\n")
  os.replace(path + ".tmp", path)
