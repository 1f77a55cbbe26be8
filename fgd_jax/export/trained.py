"""The model that a run has trained, from its checkpoint: without its mesh, its data and its optimizer states."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

import fgd_jax as fgd
from fgd_jax import config as configs
from fgd_jax import models
from fgd_jax.checkpoint import find_step, unreadable
from fgd_jax.data import tokenizer
from fgd_jax.methods import Method
from fgd_jax.models import LlamaConfig

PyTree = Any


class Trained(NamedTuple):
  """A model and where it comes from.

  Attributes:
    model: its shape.
    params: its parameters, NumPy arrays.
    tokenizer: of its data; None where there is none (synthetic data, token data sets).
    seq_len: tokens of the sequences that it was trained on.
    source: in words.
  """

  model: LlamaConfig
  params: PyTree
  tokenizer: tokenizer.Tokenizer | None
  seq_len: int
  source: str


def read_run(folder: str, step: int | None = None, which: str = "evaluated") -> Trained:
  """The model of a run.

  Args:
    folder: a run's folder, or one step in its checkpoints folder.
    step: the round; None: the newest.
    which: "evaluated": what eval_loss is of (the outer parameters of fragmented methods, else the workers' mean), or "mean".

  Raises:
    ValueError: no checkpoint, or one that cannot be read.
  """
  if which not in ("evaluated", "mean"):
    raise ValueError(f"which={which!r} must be 'evaluated' or 'mean'.")
  where, step, _ = find_step(folder, step)
  path = epath.Path(where, str(step))
  try:
    config = configs.unflat(json.loads((path / "config" / "metadata").read_text()))
    shapes = on_one_device(ocp.StandardCheckpointHandler().metadata(path / "state").tree["params"])
    vocabulary = shapes["embed"]["embedding"].shape[1]
    shape = dataclasses.replace(configs.make_model_config(config, vocabulary), attention="einsum", remat=False)
    method = configs.make_method(config)
    if which == "mean" or type(method).eval_params is Method.eval_params:
      params = _mean_by_leaf(path / "state", shapes)
    else:
      params = _evaluated(path / "state", shapes, config, method, shape)
  except ValueError:
    raise
  except Exception as e:  # orbax and tensorstore raise what they please for damaged files
    raise ValueError(unreadable(where, step, e, "Choose another round.")) from e
  return Trained(shape, params, read_tokenizer(config), config.seq_len,
                 f"{which} model of {config.workers} workers, method {config.method.name}, round {step}")


def on_one_device(shapes: PyTree) -> PyTree:
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)


def restore_parts(path: epath.Path, wanted: PyTree) -> PyTree:
  """The parts `wanted` of the state saved at `path`, laid out as its ShapeDtypeStructs say."""
  with ocp.PyTreeCheckpointer() as reader:
    return reader.restore(path, args=ocp.args.PyTreeRestore(
        item=wanted, partial_restore=True, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted)))


def _mean_by_leaf(path: epath.Path, shapes: PyTree) -> PyTree:
  """The workers' mean, with one leaf of all workers in memory at a time."""
  leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
  means = []
  for keys, shape in leaves:
    part: Any = shape
    for key in reversed(keys):
      part = {key.key: part}
    restored = jax.tree.leaves(restore_parts(path, {"params": part}))[0]
    means.append(np.asarray(jnp.mean(restored, axis=0).astype(shape.dtype)))
  return jax.tree.unflatten(structure, means)


def _evaluated(path: epath.Path, shapes: PyTree, config: Any, method: Method, shape: LlamaConfig) -> PyTree:
  """What the method's paper evaluates, from parameters and method state."""
  model = models.make(shape)
  _, round_fn = configs.build_round(config, model.loss, fgd.Workers(config.workers), overlap="auto")
  state = round_fn.abstract_state(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes))
  saved = restore_parts(path, {"params": state.params, "method_state": state.method_state})
  whole = fgd.State(saved["params"], (), saved["method_state"], np.int32(0))
  return jax.tree.map(np.asarray, round_fn.eval_params(whole))


def read_tokenizer(config: Any) -> tokenizer.Tokenizer | None:
  """The tokenizer of a run's data; None where there is none, or its file is gone."""
  name = config.data.tokenizer
  if config.data.source == "synthetic":
    return None
  if config.data.source == "array_record":
    try:
      with open(os.path.join(config.data.path, "meta.json"), encoding="utf-8") as f:
        name = json.load(f)["tokenizer"]
    except OSError:
      return None
    name = name if name == "bytes" else os.path.join(config.data.path, name)
  try:
    return tokenizer.load(name)
  except FileNotFoundError:
    return None
