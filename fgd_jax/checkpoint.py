"""Checkpoints: state, data position, progress and config of a round in one atomic step, with orbax.

    python -m fgd_jax.checkpoint describe DIR [--json] [--leaves]      what a run's checkpoint holds
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from fgd_jax.config import FREE_KEYS, WORKER_KEYS, flat, steps_of_workers, unflat
from fgd_jax.default_config import get_config as default
from fgd_jax.round import State


class ConfigMismatchError(ValueError):
  """A config contradicts the run that it should continue."""


class Progress(NamedTuple):
  """What a run's past means for its future besides the state: counters that outlive a change of the number of workers.

  Attributes:
    workers: M since round `since`.
    since: the round from which the number of workers is M.
    tokens: that all workers had been trained on before it.
    tokens_per_round, examples_per_round: since then, of all workers and of each worker.
    earlier: (workers, examples that each of them has read) of the times before; see `fgd_jax.data.deal`.
  """

  workers: int
  since: int
  tokens: int
  tokens_per_round: int
  examples_per_round: int
  earlier: tuple[tuple[int, int], ...] = ()

  @classmethod
  def start(cls, config: ConfigDict) -> Progress:
    """Of a fresh run."""
    examples = config.inner_steps * config.batch_size
    return cls(config.workers, 0, 0, sum(steps_of_workers(config)) * config.batch_size * config.seq_len, examples)

  def tokens_at(self, done: int) -> int:
    """Tokens of all workers after `done` rounds of the run."""
    return self.tokens + (done - self.since) * self.tokens_per_round

  def changed(self, done: int, config: ConfigDict) -> Progress:
    """From round `done` on with the workers of `config`."""
    read = (self.workers, (done - self.since) * self.examples_per_round)
    return Progress.start(config)._replace(since=done, tokens=self.tokens_at(done), earlier=(*self.earlier, read))


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

  def save(self, state: State, data: Any) -> None:
    """Saves the state at round `state.round` with the iterator's position; call before the iterator advances."""
    if int(state.round) == self.latest():
      return
    saved = state._replace(round=np.asarray(state.round))
    if jax.devices()[0].platform == "cpu":  # orbax may still read these buffers when the next round donates them
      saved = jax.tree.map(lambda x: x.copy(), saved)
    self._manager.save(int(state.round), args=ocp.args.Composite(
        state=ocp.args.StandardSave(saved), data=grain.checkpoint.CheckpointSave(data),  # type: ignore[attr-defined]
        config=ocp.args.JsonSave(flat(self._config)),
        progress=ocp.args.JsonSave(self.progress._asdict())))

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
      progress = Progress.start(saved)
      if has_progress:
        progress = Progress(**{**read["progress"], "earlier": tuple(map(tuple, read["progress"]["earlier"]))})
    except Exception as e:  # orbax and tensorstore raise what they please for damaged files
      raise ValueError(_unreadable(self._manager.directory, step, e)) from e
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
      restored = self._manager.restore(step, args=ocp.args.Composite(**items))
    except Exception as e:  # orbax and tensorstore raise what they please for damaged files
      raise ValueError(_unreadable(self._manager.directory, step, e)) from e
    state = restored["state"]
    return State(state.params, state.inner_opt_state, state.method_state, np.int32(state.round))

  def close(self) -> None:
    """Waits for saves in flight; raises what they raised."""
    self._manager.wait_until_finished()
    self._manager.close()


def _unreadable(folder: Any, step: int, error: Exception) -> str:
  reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
  return (f"The checkpoint {folder}/{step} cannot be read ({reason}). Move it away to resume from the one before, or choose "
          "another --workdir.")


def refuse_other_config(config: ConfigDict, saved: dict[str, Any], where: str) -> None:
  """Raises ConfigMismatchError for the first key in which `config` contradicts the saved keys.

  `rounds` may change where the learning rate does not depend on it (inner.schedule=constant), and where the number of
  workers changes, so may the keys that depend on it. A key that is newer than the saved run counts as having had its
  default there.
  """
  now, defaults = flat(config), flat(default())
  was = lambda key: saved.get(key, defaults.get(key))
  free = FREE_KEYS + (("rounds",) if config.inner.schedule == "constant" else ())
  free += WORKER_KEYS if now["workers"] != was("workers") else ()
  for key in sorted(set(now) | set(saved)):
    if key not in free and now.get(key) != was(key):
      raise ConfigMismatchError(f"{key}={now.get(key)!r} contradicts {where}, which has {was(key)!r}; restore the "
                                "value or choose another --workdir.")
