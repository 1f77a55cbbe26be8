"""A config file for --config: the config of the run in a folder, `saved_config.py:WORKDIR`. --join and --replay use it."""

import os

from fgd_jax.config import unflat
from fgd_jax.folder import read_json


def get_config(workdir: str):
  path = os.path.join(workdir, "config.json")
  if not os.path.exists(path):
    raise ValueError(f"--workdir={workdir} holds no config.json; give the folder of a run, or its --config")
  return unflat(read_json(path))
