"""python -m fgd_jax.decoupled: Decoupled DiLoCo on Ray, from a config to a finished run.

    python -m fgd_jax.decoupled --config=configs/decoupled_quickstart.py --workdir=runs/decoupled [--config.steps=60]

Started again with the same command, a run that was stopped anywhere goes on from its last checkpoint. --join adds learners
to a run that goes on; --replay computes a finished or stopped run once more from its tape and compares every merge.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import sys
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

# The driver computes little and must leave accelerators to the learners; this is before jax looks for them.
PLATFORMS = os.environ.get("JAX_PLATFORMS", "")
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402  (after the environment)

from fgd_jax import command  # noqa: E402
from fgd_jax.decoupled.address import authenticate  # noqa: E402
from fgd_jax.decoupled.options import POLICIES, environment  # noqa: E402
from fgd_jax.quarantine import NonFiniteError  # noqa: E402
from fgd_jax.runlog import show_own_logs  # noqa: E402

USAGE = ("python -m fgd_jax.decoupled --config=FILE[:key=value,...] --workdir=DIR [--ray-address=HOST:PORT] "
         "[--join=N | --replay] (with --join and --replay the run's own config is the default)")
NO_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)


def _words(argv: list[str]) -> list[str]:
  """The command line, with the config of the run in --workdir where --join or --replay have none."""
  argv = [word.replace("--ray_address", "--ray-address") for word in argv]
  has = lambda name: any(re.match(f"--?{name}(=|$)", word) for word in argv)
  if has("config") or not (has("join") or has("replay")):
    return argv
  text = " ".join(argv)
  folder = re.search(r" --?workdir[= ](\S+)", text)
  path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "saved_config.py")
  return argv if folder is None else [argv[0], f"--config={path}:{folder[1]}", *argv[1:]]


def _sentence(e: Exception, workdir: str) -> str:
  """One line of what went wrong; a folder that cannot be written is named."""
  name, folder = os.path.abspath(getattr(e, "filename", None) or workdir), os.path.abspath(workdir)
  if isinstance(e, OSError) and e.errno in NO_WRITING and os.path.commonpath([name, folder]) in (name, folder):
    return (f"--workdir={workdir} cannot be written ({e.strerror}{f': {e.filename}' if e.filename else ''}); make room or "
            "choose another folder. The same command continues from the last checkpoint, where there is one.")
  return " ".join(str(e).split())


def _need_ray() -> None:
  try:
    import ray  # noqa: F401
  except ImportError as e:
    raise ValueError("Decoupled learners run on Ray, which is not installed; pip install '.[decoupled]'.") from e


def _show(summary: dict[str, Any]) -> None:
  if flags.FLAGS.json:
    print(json.dumps(summary))


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    command.refuse(f"Unexpected argument {argv[1]!r}; all options start with --.")
  if not flags.FLAGS.workdir:
    command.refuse("--workdir is missing; give the folder for checkpoints, metrics and events, such as --workdir=runs/a.")
  show_own_logs()
  config, workdir, count = flags.FLAGS.config, flags.FLAGS.workdir, flags.FLAGS.join
  try:
    if count is not None and flags.FLAGS.replay:
      raise ValueError("--join adds to a run that goes on, --replay computes one again; give one of them.")
    if count is not None and count < 1:
      raise ValueError(f"--join={count} must be the number of learners to add, at least 1.")
    if flags.FLAGS.replay:
      os.environ.update(environment(config, PLATFORMS))  # as the learners had it; jax has not looked yet
      jax.config.update("jax_platforms", PLATFORMS or None)
      from fgd_jax.decoupled.replay import replay
      _show(replay(config, workdir))
      return
    if count is not None and flags.FLAGS["ray-address"].value is None:
      authenticate(workdir)
    _need_ray()
    from fgd_jax.decoupled import joining, run
    if count is not None:
      joining.join(config, workdir, flags.FLAGS["ray-address"].value, count, PLATFORMS)
      return
    summary = run.decoupled(config, workdir, flags.FLAGS["ray-address"].value, PLATFORMS)
    logging.info("Done: held-out loss %.4f after %d syncer steps. Figures in %s.", summary["eval_loss"], summary["steps"],
                 os.path.join(workdir, "summary.json"))
    _show(summary)
  except (ValueError, OSError, NonFiniteError) as e:
    if os.environ.get("FGD_JAX_TRACEBACK"):
      raise
    logging.error("%s", _sentence(e, workdir))
    if isinstance(e, OSError) and os.path.isdir(workdir) and shutil.disk_usage(workdir).free < 2**20:
      logging.flush()
      os._exit(2)  # else writers of other libraries print a traceback each, since they cannot flush
    raise SystemExit(2) from e
  except KeyboardInterrupt as e:
    from fgd_jax.decoupled.store import checkpoints
    if count is not None or flags.FLAGS.replay:
      logging.error("Interrupted.")
    elif checkpoints(workdir):
      logging.error("Interrupted; the same command continues from the last checkpoint in %s.", workdir)
    else:
      logging.error("Interrupted before the first checkpoint; the same command starts the run in %s anew.", workdir)
    raise SystemExit(130) from e


if __name__ == "__main__":
  sys.argv = _words(sys.argv)
  config_flags.DEFINE_config_file("config", help_string=(
      "Config file with optional settings, e.g. configs/decoupled_quickstart.py:learners=8 (required). Every key of "
      "configs/default.py can also be set by --config.KEY=VALUE; policies: " + ", ".join(POLICIES) + "."))
  flags.DEFINE_string("workdir", None, "Folder of the run (required); the same command resumes it.")
  flags.DEFINE_string("ray-address", None, "HOST:PORT of a Ray cluster, or auto; without it a local one is started, and "
                      "--join finds the run's.")
  flags.DEFINE_integer("join", None, "Add so many learners to the run with this --workdir that goes on in a Ray cluster."
                       " They belong to it from then on.")
  flags.DEFINE_boolean("replay", False, "Compute the run in --workdir once more from its tape, and compare.")
  flags.DEFINE_boolean("json", False, "Print the summary as JSON.")
  flags.mark_flag_as_required("config")
  app.run(main, flags_parser=functools.partial(command.parse_flags, usage=USAGE))
