"""A run's records: metrics.jsonl, events.jsonl, TensorBoard events and a progress bar."""

from __future__ import annotations

import collections
import json
import logging as std_logging
import os
import sys
import time
from typing import Any

import tensorboardX
from absl import logging
from tqdm import tqdm


class _OwnRecords(std_logging.Filter):
  """Lets our own records pass, and other libraries' from warnings upwards (orbax writes dozens of lines a save)."""

  def filter(self, record: std_logging.LogRecord) -> bool:
    return record.levelno >= std_logging.WARNING or f"{os.sep}fgd_jax{os.sep}" in record.pathname


def show_own_logs() -> None:
  """Shows this package's progress on the terminal, and only warnings of the libraries below it."""
  logging.set_verbosity(logging.INFO)
  logging.get_absl_handler().addFilter(_OwnRecords())


class RunLog:
  """Writes one line a round and shows progress in tokens, or in steps.

  Args:
    workdir: the run's folder.
    resumed: rounds already done; later lines of an earlier attempt are cut.
    tokens: (done, total), over all workers; with counts="step" of the steps that are records here.
    own_events: events.jsonl is written by `events` alone, and later lines are cut there, too.
    counts: "token" or "step", of which there is one a record.
  """

  def __init__(self, workdir: str, resumed: int, tokens: tuple[int, int], own_events: bool = True, counts: str = "token"):
    self._counts, unit = {"token": ("tokens", "tok"), "step": ("round", "step")}[counts]
    path, self._events = os.path.join(workdir, "metrics.jsonl"), os.path.join(workdir, "events.jsonl")
    cut_lines(path, resumed)
    if own_events:
      cut_lines(self._events, resumed)
    self._file = open(path, "a", encoding="utf-8")
    self._board = tensorboardX.SummaryWriter(os.path.join(workdir, "tensorboard"), purge_step=resumed + 1)
    self._times: collections.deque[float] = collections.deque(maxlen=6)
    self._shown_eval: str | None = None
    self._bar = tqdm(total=tokens[1], initial=tokens[0], unit=unit, unit_scale=counts == "token", dynamic_ncols=True,
                     mininterval=0.5 if sys.stderr.isatty() else 10, file=sys.stderr)

  def speed(self, tokens: int) -> float | None:
    """Tokens a second over the last few rounds of `tokens` tokens each; None in the first round, which has no start."""
    self._times.append(time.monotonic())
    passed = self._times[-1] - self._times[0]
    return tokens * (len(self._times) - 1) / passed if passed > 0 else None

  def write(self, record: dict[str, Any]) -> None:
    """Appends one round's record and moves the bar."""
    self._file.write(json.dumps(record) + "\n")
    self._file.flush()
    for key, value in record.items():
      if isinstance(value, (int, float)) and key != "round":
        self._board.add_scalar(key, value, record["round"])
    loss = record["train_loss"]
    shown = {"round": record["round"]} if self._counts == "tokens" else {}
    shown["loss"] = "-" if loss is None else f"{loss:.3f}"
    if "eval_loss" in record:
      self._shown_eval = f"{record['eval_loss']:.3f}"
    if self._shown_eval:
      shown["held-out"] = self._shown_eval
    self._bar.set_postfix(shown, refresh=False)
    self._bar.update(record[self._counts] - self._bar.n)

  def events(self, events: list[dict[str, Any]]) -> None:
    """Appends to events.jsonl, one line an event; each has the `round` in which it happened, counted from 1."""
    if events:
      with open(self._events, "a", encoding="utf-8") as f:
        f.writelines(json.dumps(event) + "\n" for event in events)

  def close(self) -> None:
    self._bar.close()
    self._board.close()
    self._file.close()


class NoLog:
  """In place of RunLog in processes that leave the records to another one."""

  def speed(self, tokens: int) -> None:
    return None

  def write(self, record: dict[str, Any]) -> None:
    pass

  def events(self, events: list[dict[str, Any]]) -> None:
    pass

  def close(self) -> None:
    pass


def read_lines(path: str) -> list[dict[str, Any]]:
  """The records of a metrics.jsonl; a torn last line (the machine went down) is left out.

  Raises:
    ValueError: another line is damaged.
  """
  if not os.path.exists(path):
    return []
  records = []
  with open(path, encoding="utf-8", errors="replace") as f:
    lines = f.read().splitlines()
  for number, line in enumerate(lines, 1):
    try:
      record = json.loads(line)
      record["round"] += 0
      records.append(record)
    except (json.JSONDecodeError, TypeError, KeyError) as e:
      if number < len(lines):
        raise ValueError(f"{path} is damaged in line {number}; mend or delete that line, or move the file away.") from e
  return records


def cut_lines(path: str, rounds: int) -> None:
  """Keeps the lines of the first `rounds` rounds, so that a resumed run has no round twice."""
  if os.path.exists(path):
    kept = [r for r in read_lines(path) if r["round"] <= rounds]
    temporary = path + ".tmp"
    with open(temporary, "w", encoding="utf-8") as f:
      f.writelines(json.dumps(r) + "\n" for r in kept)
    os.replace(temporary, path)
