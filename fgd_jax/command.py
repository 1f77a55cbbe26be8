"""Command lines: one sentence for what cannot be read, and --help that is no failure."""

from __future__ import annotations

import argparse
import difflib
import glob
import os
import re
import sys
from typing import NoReturn

from absl import flags

from fgd_jax import config as configs

_HELP = ("help", "helpfull", "helpshort", "helpxml", "h", "?")


class Parser(argparse.ArgumentParser):
  """Without the usage text in front of an error; shows the whole docstring that it gets as description."""

  def __init__(self, **kwargs):
    super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs})

  def error(self, message: str) -> NoReturn:
    sys.exit(f"error: {message} (see {self.prog} --help)")


def refuse(sentence: str) -> NoReturn:
  """Ends a command that cannot start."""
  print(sentence, file=sys.stderr)
  raise SystemExit(2)


def parse_flags(argv: list[str], usage: str) -> list[str]:
  """absl's parser for a command: --help is no failure, and what cannot be read gets one sentence, last on the terminal."""
  asked = [word for word in argv[1:] if word.startswith("-") and word.lstrip("-") in _HELP]
  try:
    if not asked:
      _refuse_config_words(argv)
    return flags.FLAGS([argv[0], *asked] if asked else argv)
  except SystemExit as e:
    raise SystemExit(0 if asked else e.code) from e
  except Exception as e:  # a config file may raise anything
    if os.environ.get("FGD_JAX_TRACEBACK"):
      raise
    lines = [line.strip() for line in str(e).replace("\\n", "\n").splitlines() if line.strip()]
    traced = any("Traceback (most recent call last)" in line for line in lines)  # an error inside the config file
    message = re.sub(r"^(\w+\.)*\w+(Error|Exception): ", "", lines[-1] if traced else " ".join(lines))
    if missing := re.findall(r"Flag --(\S+) must have a value other than None", message):
      are = "is" if len(missing) == 1 else "are"
      refuse(f"{' and '.join(f'--{name}' for name in missing)} {are} missing; usage: {usage}")
    if isinstance(e, (AttributeError, KeyError)) and " " not in message:
      message = f"Unknown config key {message.strip(chr(34) + chr(39))!r}; all keys stand in configs/default.py"
    refuse(f"{message[:500].rstrip('.')} (usage: {usage})")


def _refuse_config_words(argv: list[str]) -> None:
  """Raises ValueError for a --config file that is not there, and for a --config.KEY that does not exist."""
  for word, following in zip(argv[1:], [*argv[2:], ""]):
    name, equals, value = word.lstrip("-").partition("=")
    if word.startswith("-") and name == "config":
      refuse_missing_file(value if equals else following)
    elif word.startswith("-") and name.startswith("config."):
      configs.refuse_unknown([name.removeprefix("config.")])


def refuse_missing_file(text: str) -> None:
  """Raises ValueError where the file of --config=FILE[:settings] does not exist, naming one that is like it."""
  path = text.partition(":")[0]
  if not os.path.exists(path):
    there = glob.glob(os.path.join(glob.escape(os.path.dirname(path)), "*.py"))
    near = [*difflib.get_close_matches(path, there, n=1), "configs/quickstart.py"]
    raise ValueError(f"--config={path} does not exist; give a file such as {near[0]}.")
