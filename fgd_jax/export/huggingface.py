"""Hugging Face Llama folders (config.json, model.safetensors, tokenizer.json), written and read.

The layouts agree but for names and transposition: rotary positions turn the pairs (i, i + H/2) in both, and a kernel
[inputs, outputs] is a weight [outputs, inputs].
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from fgd_jax.data import tokenizer
from fgd_jax.export.trained import Trained
from fgd_jax.mixing import path_of
from fgd_jax.models import LlamaConfig
from fgd_jax.models.llama import stack_layers, unstack_layers

PyTree = Any
_ENDS = {"embed/embedding": "model.embed_tokens.weight", "final_norm/scale": "model.norm.weight",
         "lm_head/kernel": "lm_head.weight"}
_LAYER = {**{f"attn/{x}/kernel": f"self_attn.{x}_proj.weight" for x in "qkvo"},
          **{f"mlp/{x}/kernel": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
          "attn_norm/scale": "input_layernorm.weight", "mlp_norm/scale": "post_attention_layernorm.weight"}


def _names(layers: int) -> dict[str, str]:
  """Our path -> the name of the weight."""
  names = {f"layers_{i}/{ours}": f"model.layers.{i}.{theirs}" for i in range(layers) for ours, theirs in _LAYER.items()}
  return {**_ENDS, **names}


def write_folder(trained: Trained, out: str) -> list[str]:
  """Writes a model as a new folder that transformers' AutoModelForCausalLM and AutoTokenizer load; returns its files.

  Raises:
    ValueError: `out` exists and is not empty.
  """
  out = os.path.abspath(out)
  if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
    raise ValueError(f"--out={out} exists and is not an empty folder; choose another.")
  params = unstack_layers(trained.params) if trained.model.scan_layers else trained.params
  names, weights = _names(trained.model.layers), {}
  for keys, x in jax.tree_util.tree_flatten_with_path(params)[0]:
    path, x = path_of(keys), np.asarray(x)
    weights[names[path]] = np.ascontiguousarray(x.T) if path.endswith("/kernel") else x
  os.makedirs(os.path.dirname(out), exist_ok=True)
  folder = tempfile.mkdtemp(prefix=f".{os.path.basename(out)}-", dir=os.path.dirname(out))
  try:
    safetensors.numpy.save_file(weights, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    _write_json(os.path.join(folder, "config.json"), llama_config(trained))
    if trained.tokenizer is not None:
      _write_tokenizer(trained.tokenizer, folder)
    os.chmod(folder, 0o755)  # mkdtemp lets nobody else in
    if os.path.isdir(out):
      os.rmdir(out)
    os.rename(folder, out)
  except BaseException:
    shutil.rmtree(folder, ignore_errors=True)
    raise
  return sorted(os.listdir(out))


def llama_config(trained: Trained) -> dict[str, Any]:
  """transformers' LlamaConfig, and from whom the weights are."""
  c = trained.model
  separator = [] if trained.tokenizer is None else trained.tokenizer.separator.tolist()
  end = separator[0] if len(separator) == 1 else None
  return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": c.vocab_size, "hidden_size": c.dim,
          "intermediate_size": c.ffn_dim, "num_hidden_layers": c.layers, "num_attention_heads": c.heads,
          "num_key_value_heads": c.kv_heads, "head_dim": c.dim // c.heads, "hidden_act": "silu", "rms_norm_eps": c.norm_eps,
          "rope_theta": c.rope_theta, "max_position_embeddings": trained.seq_len, "tie_word_embeddings": c.tied,
          "attention_bias": False, "mlp_bias": False, "bos_token_id": end, "eos_token_id": end,
          "torch_dtype": c.param_dtype, "fgd_jax": trained.source}


def _write_json(path: str, content: dict[str, Any]) -> None:
  with open(path, "w", encoding="utf-8") as f:
    json.dump(content, f, indent=2)
    f.write("\n")


def _write_tokenizer(found: tokenizer.Tokenizer, folder: str) -> None:
  """tokenizer.json; that of bytes is a byte-level BPE without merges, whose ids are the bytes."""
  path = os.path.join(folder, "tokenizer.json")
  if found.name != "bytes":
    shutil.copyfile(found.name, path)
  else:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    model = tokenizers.Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(_byte_characters())},
                                            merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.save(path)
  _write_json(os.path.join(folder, "tokenizer_config.json"), {
      "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False})


def _byte_characters() -> list[str]:
  """Byte-level BPE's character for each byte (GPT-2's table): printable Latin-1 is itself, others count from 256."""
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = iter(range(256, 512))
  return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def read_folder(folder: str, scan_layers: bool = False) -> Trained:
  """A folder of Llama weights, from here or from elsewhere, in our layout.

  Args:
    folder: with config.json and *.safetensors, sharded or not.
    scan_layers: whether the layers are to be stacked.

  Raises:
    ValueError: no such folder, another architecture, or weights that are missing or of another shape.
  """
  try:
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
      config = json.load(f)
  except (OSError, ValueError) as e:
    raise ValueError(f"{folder} holds no readable config.json of a Hugging Face model ({type(e).__name__}).") from e
  shape = _our_config(config, folder)
  weights: dict[str, np.ndarray] = {}
  for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors"))):
    try:
      weights |= safetensors.numpy.load_file(path)
    except Exception as e:  # the package raises a class of its own for files it cannot parse
      raise ValueError(f"{path} cannot be read ({e}); copy it again.") from e
  params: dict[str, Any] = {}
  for path, name in _names(shape.layers).items():
    if shape.tied and path == "lm_head/kernel":
      continue
    if name not in weights:
      raise ValueError(f"{folder} lacks the weight {name}; copy all *.safetensors.")
    x = weights[name].T if path.endswith("/kernel") else weights[name]
    if x.shape != (wanted := _shape_of(path, shape)):
      raise ValueError(f"{name} in {folder} has shape {weights[name].shape}, which does not fit its config.json ({wanted}).")
    *holders, leaf = path.split("/")
    holder = params
    for key in holders:
      holder = holder.setdefault(key, {})
    holder[leaf] = np.ascontiguousarray(x if x.dtype != np.float16 else x.astype(np.float32))
  dtype = str(params["embed"]["embedding"].dtype)
  shape = LlamaConfig(**{**shape.__dict__, "param_dtype": dtype, "scan_layers": scan_layers})
  if scan_layers:
    params = jax.tree.map(np.asarray, stack_layers(params))
  path = os.path.join(folder, "tokenizer.json")
  found = tokenizer.load(path) if os.path.isfile(path) else None
  return Trained(shape, params, found, config.get("max_position_embeddings", 2048), config.get("fgd_jax", folder))


def _our_config(config: dict[str, Any], folder: str) -> LlamaConfig:
  rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
  wanted = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
  for key, value in wanted.items():
    if config.get(key, value) != value:
      raise ValueError(f"{folder}: {key}={config[key]!r} is not what our decoder computes ({value!r}); only plain Llama "
                       "models can be read.")
  if rope.get("rope_type", rope.get("type", "default")) != "default":
    raise ValueError(f"{folder}: rope_scaling={rope!r} is not what our decoder computes; only plain rotary positions are.")
  try:
    heads, dim = config["num_attention_heads"], config["hidden_size"]
    if config.get("head_dim") not in (None, dim // heads):
      raise ValueError(f"{folder}: head_dim={config['head_dim']} is not hidden_size / num_attention_heads = {dim // heads}, "
                       "which our decoder wants.")
    return LlamaConfig(vocab_size=config["vocab_size"], dim=dim, layers=config["num_hidden_layers"], heads=heads,
                       kv_heads=config.get("num_key_value_heads") or heads, ffn_dim=config["intermediate_size"],
                       rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
                       norm_eps=config.get("rms_norm_eps", 1e-6), tied=config.get("tie_word_embeddings", False))
  except KeyError as e:
    raise ValueError(f"{folder}/config.json lacks the key {e.args[0]!r} of a Llama model.") from e


def _shape_of(path: str, c: LlamaConfig) -> tuple[int, ...]:
  """Of a leaf in our layout."""
  if path.endswith("/scale"):
    return (c.dim,)
  narrow = c.dim // c.heads * c.kv_heads
  shapes = {"embed": (c.vocab_size, c.dim), "lm_head": (c.dim, c.vocab_size), "q": (c.dim, c.dim), "k": (c.dim, narrow),
            "v": (c.dim, narrow), "o": (c.dim, c.dim), "gate": (c.dim, c.ffn_dim), "up": (c.dim, c.ffn_dim),
            "down": (c.ffn_dim, c.dim)}
  return shapes[path.split("/")[-2]]
