"""Command lines that say what is wrong in one sentence."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
  """Without the usage text in front of an error; shows the whole docstring that it gets as description."""

  def __init__(self, **kwargs):
    super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs})

  def error(self, message: str) -> NoReturn:
    sys.exit(f"error: {message} (see {self.prog} --help)")
