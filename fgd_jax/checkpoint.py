"""Checkpoints: state, data position and config as one atomic item each, with orbax."""

from __future__ import annotations

import os
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from fgd_jax.config import FREE_KEYS, flat
from fgd_jax.default_config import get_config as default
from fgd_jax.round import State


class ConfigMismatchError(ValueError):
  """A config contradicts the run that it should continue."""


class Checkpoints:
  """The checkpoints of one run's folder.

  A step is one round's state, the position of the data iterator and the config, committed together by a rename, so a
  half-written step is never taken for a checkpoint. Saving is asynchronous.

  Args:
    folder: where the steps lie; made if missing.
    keep: how many of the newest steps stay.
    config: of the run.
  """

  def __init__(self, folder: str, keep: int, config: ConfigDict):
    self._config = config
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
        config=ocp.args.JsonSave(flat(self._config))))

  def restore(self, abstract: State, data: Any) -> State:
    """The newest state, sharded as `abstract` says; moves the iterator `data` to its position.

    Raises:
      ConfigMismatchError: a config that contradicts the checkpoint's, naming the key.
      ValueError: a checkpoint that cannot be read.
    """
    step = self.latest()
    if step is None:
      raise ValueError("There is no checkpoint to restore.")
    target = abstract._replace(round=np.zeros((), np.int32))
    try:
      saved = self._manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore()))["config"]
      refuse_other_config(self._config, saved, f"the checkpoint of round {step}")
      restored = self._manager.restore(step, args=ocp.args.Composite(
          state=ocp.args.StandardRestore(target),
          data=grain.checkpoint.CheckpointRestore(data)))  # type: ignore[attr-defined]
    except ConfigMismatchError:
      raise
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

  `rounds` may change where the learning rate does not depend on it (inner.schedule=constant). A key that is newer than
  the saved run counts as having had its default there.
  """
  free = FREE_KEYS + (("rounds",) if config.inner.schedule == "constant" else ())
  now, defaults = flat(config), flat(default())
  for key in sorted(set(now) | set(saved)):
    if key not in free and now.get(key) != saved.get(key, defaults.get(key)):
      raise ConfigMismatchError(f"{key}={now.get(key)!r} contradicts {where}, which has {saved.get(key)!r}; restore the "
                                "value or choose another --workdir.")
