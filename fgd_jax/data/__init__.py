"""Data: a corpus of token sequences, and the order in which M workers read it.

    corpus = data.load(config, seq_len=128, seed=0)
    rounds = data.round_batches(corpus.train, workers=4, inner_steps=20, batch_size=4, seed=0)
    rounds[r]["tokens"]                      # int32 [M, H, B, seq_len + 1], whatever was read before
    data.heldout_batches(corpus.heldout, batch_size=4, batches=8)["tokens"]     # int32 [N, B, seq_len + 1]

Files: text.py (documents of a folder, their split), tokenizer.py, sources.py (sequences by index), batches.py (the
order), records.py (array_record folders), tfds_source.py (TFDS without TensorFlow), tokenize.py (the command).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from fgd_jax.data import sources, text, tokenizer
from fgd_jax.data.batches import heldout_batches, round_batches
from fgd_jax.data.share import worker_batches
from fgd_jax.data.sources import TokenSource

__all__ = ["Corpus", "TokenSource", "heldout_batches", "load", "round_batches", "worker_batches"]


class Corpus(NamedTuple):
  """A training part and a held-out part that share no document.

  Attributes:
    train: random access by index to int32 arrays [seq_len + 1]; `len(train)` sequences, stride seq_len over the text.
    heldout: the same for the held-out part.
    vocab_size: every token is in [0, vocab_size).
    train_tokens: predicted tokens of one pass over `train`, which is len(train) * seq_len.
    unigram_loss: nats per token on `heldout` of the add-one smoothed unigram distribution counted on `train`: what a
      model reaches that has learned the frequencies and nothing else. nan where the source is too large to count.
  """

  train: TokenSource
  heldout: TokenSource
  vocab_size: int
  train_tokens: int
  unigram_loss: float


_DEFAULTS = {
  "source": "text",
  "path": None,
  "pattern": None,
  "tokenizer": "bytes",
  "text_field": "text",
  "heldout_fraction": 0.05,
  "max_bytes": None,
  "tfds_name": None,
  "tfds_split": "train",
  "tfds_data_dir": None,
  "vocab_size": 256,
}


class _Keys:
  """The data.* keys of a config, with defaults for those it lacks (a full config or its `data` part)."""

  def __init__(self, config: Any):
    data = getattr(config, "data", config)
    for key, default in _DEFAULTS.items():
      setattr(self, key, getattr(data, key, default))
    fraction = self.heldout_fraction  # type: ignore[attr-defined]
    if not 0.0 < fraction < 1.0:
      raise ValueError(f"data.heldout_fraction={fraction} must lie between 0 and 1; 0.05 holds out a twentieth")


def _load_text(keys: Any, seq_len: int, seed: int) -> Corpus:
  del seed  # the split depends on the content of the documents alone
  encoder = tokenizer.load(keys.tokenizer)
  files = text.find_files(keys.path, keys.pattern)
  where = f"data.path={keys.path!r}" if keys.path else "the standard library (data.path=None)"

  def documents():
    return text.capped(text.read_documents(files, keys.text_field), keys.max_bytes)

  plan = text.survey(documents(), keys.heldout_fraction, least=encoder.bytes_per_token * (seq_len + 1))
  return pack(text.split(documents(), plan), encoder, seq_len, where)


def pack(events, encoder: tokenizer.Tokenizer, seq_len: int, where: str) -> Corpus:
  """Tokenises `events` (see text.split) and keeps both sides in memory, 1 to 4 bytes a token."""
  train, heldout = sources.packed_sides(tokenizer.encode_stream(events, encoder), encoder.vocab_size, seq_len, where)
  unigram_loss = sources.unigram_loss(train.target_counts(encoder.vocab_size), heldout.target_counts(encoder.vocab_size))
  return Corpus(train, heldout, encoder.vocab_size, len(train) * seq_len, unigram_loss)


def _load_synthetic(keys: Any, seq_len: int, seed: int) -> Corpus:
  train, heldout = sources.markov_sides(keys.vocab_size, seq_len, seed)
  counts = [side.sampled_counts(keys.vocab_size) for side in (train, heldout)]
  return Corpus(train, heldout, keys.vocab_size, len(train) * seq_len, sources.unigram_loss(*counts))


def _load_array_record(keys: Any, seq_len: int, seed: int) -> Corpus:
  del seed
  from fgd_jax.data import records

  if not keys.path:
    raise ValueError('data.source="array_record" needs data.path, the output folder of python -m fgd_jax.data.tokenize')
  meta, train, heldout = records.open_folder(os.fspath(keys.path), seq_len)
  return Corpus(train, heldout, meta["vocab_size"], len(train) * seq_len, meta["unigram_loss"])


def _load_tfds(keys: Any, seq_len: int, seed: int) -> Corpus:
  del seed
  from fgd_jax.data import tfds_source

  encoder = tokenizer.load(keys.tokenizer)
  found = tfds_source.open_splits(keys)
  if found.tokens_shape is None:
    return pack(tfds_source.text_events(found, keys), encoder, seq_len, f"the TFDS folder {found.where}")
  train, heldout = tfds_source.token_sides(found, keys, encoder.vocab_size, seq_len)
  return Corpus(train, heldout, encoder.vocab_size, len(train) * seq_len, math.nan)


_LOADERS: dict[str, Callable[[Any, int, int], Corpus]] = {
  "text": _load_text,
  "array_record": _load_array_record,
  "tfds": _load_tfds,
  "synthetic": _load_synthetic,
}


def load(config: Any, seq_len: int, seed: int) -> Corpus:
  """Opens the corpus that the data.* keys of `config` describe.

  Args:
    config: a config with a `data` part (configs/default.py explains each key), or that part alone.
    seq_len: predicted tokens a sequence; arrays have seq_len + 1 tokens.
    seed: chooses the synthetic text; no other source depends on it.

  Raises:
    FileNotFoundError: a folder or file that is not there.
    ValueError: anything else the keys ask for and cannot have; the sentence names the key and the remedy.
  """
  keys: Any = _Keys(config)
  if seq_len < 1:
    raise ValueError(f"seq_len={seq_len} must be at least 1")
  if keys.source not in _LOADERS:
    raise ValueError(f"data.source={keys.source!r} is unknown; choose one of {', '.join(map(repr, _LOADERS))}")
  return _LOADERS[keys.source](keys, seq_len, seed)
