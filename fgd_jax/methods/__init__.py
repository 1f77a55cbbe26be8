"""All methods by name: `fgd_jax.methods.make("fgd", mix1="global", mix2="random_pairs", outer_lr=0.7)`."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from fgd_jax.methods.base import Method
from fgd_jax.methods.data_parallel import DataParallel
from fgd_jax.methods.diloco import DiLoCo, IsoLoCo
from fgd_jax.methods.eager import EagerDiLoCo
from fgd_jax.methods.fgd import FactoredGossip
from fgd_jax.methods.fragmented import Fragmented
from fgd_jax.methods.gasloc import GASLoC
from fgd_jax.methods.local import Local
from fgd_jax.methods.noloco import NoLoCo
from fgd_jax.methods.pipelined import PipelinedDiLoCo
from fgd_jax.methods.streaming import StreamingDiLoCo
from fgd_jax.mixing import embeddings_head_early_layers

METHODS: dict[str, type[Method]] = {
    "data_parallel": DataParallel, "local": Local, "diloco": DiLoCo, "fgd": FactoredGossip, "isoloco": IsoLoCo,
    "streaming_diloco": StreamingDiLoCo, "eager_diloco": EagerDiLoCo, "noloco": NoLoCo, "gasloc": GASLoC,
    "pipelined_diloco": PipelinedDiLoCo,
}

# The variants of the FGD paper: (method, options).
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "GlobalM1": ("fgd", {"mix1": "global", "mix2": "identity"}),
    "GlobalM1LocalM2": ("fgd", {"mix1": "global", "mix2": "random_pairs"}),
    "GlobalM1LocalM2-subset": ("fgd", {"mix1": "global", "mix2": "random_pairs",
                                       "subset": embeddings_head_early_layers(2)}),
    "LocalM1M2": ("fgd", {"mix1": "random_pairs", "mix2": "random_pairs"}),
}


def make(name: str, **options: Any) -> Method:
  """The method or FGD preset called `name`, with its options.

  Raises:
    ValueError: unknown name or option, or an impossible value; the sentence says which.
  """
  if name not in METHODS and name not in PRESETS:
    near = difflib.get_close_matches(name, [*METHODS, *PRESETS], n=1, cutoff=0.5)
    raise ValueError(f"Unknown method {name!r}{f' (did you mean {near[0]!r}?)' if near else ''}; "
                     f"choose one of {', '.join([*METHODS, *PRESETS])}.")
  base, preset = PRESETS.get(name, (name, {}))
  known = option_names(name)
  for option in options:
    if option not in known:
      raise ValueError(f"Method {name!r} has no option {option!r}; it takes {', '.join(known) or 'none'}.")
  return METHODS[base](**{**preset, **options})


def option_names(name: str) -> list[str]:
  """The options that `make(name, ...)` takes."""
  base = PRESETS.get(name, (name, {}))[0]
  hidden = set(METHODS[base].mixers) - ({"mix1", "mix2"} if base == "fgd" else set())  # elsewhere the method says what mixes
  return [f.name for f in dataclasses.fields(METHODS[base]) if f.name not in hidden]


__all__ = ["Fragmented", "METHODS", "Method", "PRESETS", "make", "option_names"]
