"""What the processes of learners and syncers have in common."""

from __future__ import annotations

import os
import traceback

import jax
from absl import logging


def use_compilation_cache(workdir: str) -> None:
  """Lets processes that start again find what was compiled, where the run's folder is within reach."""
  if os.path.isdir(workdir):
    jax.config.update("jax_compilation_cache_dir", os.path.join(workdir, "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def end_process() -> None:
  """Ends this process after an error that a new start may mend; Ray starts the actor again, and the run notes it."""
  logging.error("%s", traceback.format_exc())
  logging.flush()
  os._exit(1)
