"""In which Ray cluster a run goes on, noted in its folder: by that `--join` finds it. Without Ray: see `authenticate`."""

from __future__ import annotations

import json
import os
from typing import Any

FILE = os.path.join("syncer", "cluster.json")
AUTH = "RAY_AUTH_MODE"


def record(workdir: str, address: str) -> None:
  """The run in this folder goes on in the cluster at that address."""
  with open(os.path.join(workdir, FILE), "w", encoding="utf-8") as f:
    json.dump({"address": address, "auth": os.environ.get(AUTH)}, f)  # where Ray found a token by itself it has set this


def forget(workdir: str) -> None:
  """The run in this folder has ended."""
  if os.path.exists(path := os.path.join(workdir, FILE)):
    os.remove(path)


def recall(workdir: str) -> str | None:
  """The address, None where the run in this folder has ended or is not on this machine."""
  return _read(workdir).get("address")


def authenticate(workdir: str) -> None:
  """Makes this process use a token, or none, as the run in this folder does; before `import ray`, which reads it."""
  if mode := _read(workdir).get("auth"):
    os.environ.setdefault(AUTH, mode)


def _read(workdir: str) -> dict[str, Any]:
  try:
    with open(os.path.join(workdir, FILE), encoding="utf-8") as f:
      return dict(json.load(f))
  except (OSError, ValueError, TypeError):
    return {}
