"""Compiles a config's round for a TPU or GPU that is not there and reports what overlaps.

    python -m fgd_jax.aot --config=configs/llama_1p5b.py --topology=v5p:2x2x4 --config.mesh.fsdp=2
    python -m fgd_jax.aot --config=configs/llama_1p5b.py:method=LocalM1M2 --topology=v5e:4x4 --slices=2 --config.mesh.fsdp=4
    python -m fgd_jax.aot --config=configs/default.py --topology=h100:8 --config.workers=8 --json
"""

from __future__ import annotations

import functools
import json
import os
import sys

from absl import app, flags
from ml_collections import config_flags

from fgd_jax import aot, command, methods
from fgd_jax.aot import table, targets

_TOPOLOGY = flags.DEFINE_string("topology", None, (
    f"Target (required): {targets.EXAMPLES}. TPU: generation ({', '.join(targets.TPUS)}) and chips along each axis of a "
    "slice; GPU: devices of one host, or hosts x devices. TPUs need libtpu (pip install '.[aot]'), GPUs the wheels "
    "jax-cuda12-plugin and jax-cuda12-pjrt; no device is needed."))
_SLICES = flags.DEFINE_integer("slices", 1, "TPU slices of that shape, joined by the data-centre network.")
_ROUND = flags.DEFINE_integer("round", 0, (
    "Which round: programs differ where Mix1's permutation changes from round to round."), lower_bound=0)
_JSON = flags.DEFINE_bool("json", False, "Print the report as one JSON object.")
_DUMP = flags.DEFINE_string("dump-hlo", None, "Write the optimized, scheduled HLO to this file.")
_PLOT = flags.DEFINE_string("plot", None, "Write a picture of the schedule to this PNG file.")
_XLA = flags.DEFINE_multi_string("xla", [], "XLA option KEY=VALUE, besides or instead of the platform's; may be repeated.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    command.refuse(f"Unexpected argument {argv[1]!r}; all options start with --.")
  config = flags.FLAGS.config
  options = {}
  for word in _XLA.value:
    key, equals, value = word.partition("=")
    if not equals:
      command.refuse(f"--xla={word} is not of the form KEY=VALUE.")
    options[key] = value
  try:
    topology, slices = str(_TOPOLOGY.value), _SLICES.value
    targets.refuse_missing(targets.parse(topology, slices))
    for path in filter(None, (_DUMP.value, _PLOT.value)):
      if not os.path.isdir(os.path.dirname(path) or "."):
        raise ValueError(f"The folder of {path} does not exist.")
    where = topology + (f" x {slices} slices" if slices != 1 else "")
    print(f"Compiling for {where} (half a minute or more) ...", file=sys.stderr)
    report = aot.compile_round(config, topology, slices, options, _ROUND.value)
    if _DUMP.value:
      with open(_DUMP.value, "w") as f:
        f.write(report.hlo)
    if _PLOT.value:
      from fgd_jax.aot import lanes  # matplotlib, only for the picture
      lanes.draw(report, _PLOT.value)
  except (ValueError, OSError, aot.AotError) as e:
    if os.environ.get("FGD_JAX_TRACEBACK"):
      raise
    print(f"Error: {e}", file=sys.stderr)
    raise SystemExit(2) from e
  print(json.dumps(report.as_dict()) if _JSON.value else table.describe(report))


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", help_string=(
      "Config file with optional settings, e.g. configs/llama_1p5b.py:workers=8,method=LocalM1M2 (required). Every key of "
      "configs/default.py can also be set by --config.KEY=VALUE. Methods: " + ", ".join(
          [*methods.METHODS, *methods.PRESETS]) + "."))
  flags.mark_flags_as_required(["config", "topology"])
  app.run(main, flags_parser=functools.partial(command.parse_flags, usage=(
      "python -m fgd_jax.aot --config=FILE[:key=value,...] --topology=NAME [--slices=N] [--json]; topologies: "
      f"{targets.EXAMPLES}")))
