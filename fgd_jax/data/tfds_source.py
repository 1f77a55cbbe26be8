"""TensorFlow Datasets stored as ArrayRecord, read by random access; TensorFlow is never imported."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from fgd_jax.data import sources, text

_HELDOUT_SPLITS = ("heldout", "validation", "valid", "val")
_REPREPARE = (
  "prepare it again as ArrayRecord: tfds.builder(NAME, data_dir=DIR, file_format='array_record').download_and_prepare()"
)


class Splits(NamedTuple):
  """The two parts of a dataset, as sequences of dicts.

  Attributes:
    where: its folder.     field: the feature to read.
    tokens_shape: None for text, else the shape of one row of tokens.
    train, heldout: rows by index; heldout is None when the dataset has no such split.
  """

  where: str
  field: str
  tokens_shape: tuple[int, ...] | None
  train: Any
  heldout: Any


def open_splits(keys: Any) -> Splits:
  """Opens data.path (a prepared folder), or data.tfds_name in data.tfds_data_dir.

  Raises:
    FileNotFoundError: not there, or not prepared.    ValueError: TFRecord files, an unknown name, split or feature.
  """
  builder = _builder(keys)
  where, splits = str(builder.data_path), builder.info.splits
  base = keys.tfds_split.split("[")[0].split("+")[0]
  if base not in splits:
    raise ValueError(f"data.tfds_split={keys.tfds_split!r} is not in {where}; its splits are {sorted(splits)}")
  heldout = next((name for name in _HELDOUT_SPLITS if name in splits and name != base), None)
  field, shape = _feature(builder.info.features, keys.text_field, where)

  def rows(split: str) -> Any:
    try:
      return builder.as_data_source(split, file_format="array_record")
    except (NotImplementedError, ValueError) as error:
      kind = builder.info.file_format.value if builder.info.file_format else "an unknown format"
      if kind == "array_record":
        raise
      raise ValueError(f"{where} is stored as {kind}, which has no random access here; {_REPREPARE}") from error

  return Splits(where, field, shape, rows(keys.tfds_split), rows(heldout) if heldout else None)


def _builder(keys: Any) -> Any:
  import tensorflow_datasets as tfds

  folder = os.fspath(keys.path) if keys.path else keys.tfds_name
  if not folder:
    raise ValueError('data.source="tfds" needs data.path (a prepared folder) or data.tfds_name')
  if keys.path or os.path.isdir(folder):
    if not os.path.isdir(folder):
      raise FileNotFoundError(f"data.path={folder!r} is not a folder (seen from {os.getcwd()!r}); give a prepared one")
    if not os.path.isfile(os.path.join(folder, "dataset_info.json")):
      raise FileNotFoundError(f"{folder!r} holds no dataset_info.json; give the folder of a version, like NAME/1.0.0")
    return tfds.builder_from_directory(folder)
  data_dir = keys.tfds_data_dir
  try:
    builder = tfds.builder(folder, data_dir=data_dir, try_gcs=False)
  except tfds.core.registered.DatasetNotFoundError:
    raise ValueError(
      f"data.tfds_name={folder!r} is unknown to tfds and not prepared in data.tfds_data_dir={data_dir!r}; "
      f"give data.path=DIR/NAME/VERSION of a prepared copy"
    ) from None
  if not os.path.isdir(str(builder.data_path)):
    raise FileNotFoundError(f"data.tfds_name={folder!r} is not prepared at {builder.data_path}; {_REPREPARE}")
  return builder


def _feature(features: Any, text_field: str, where: str) -> tuple[str, tuple[int, ...] | None]:
  """The feature to read and, where it holds integer tokens, the shape of a row."""
  names = sorted(features.keys())
  field = text_field if text_field in names else "tokens"
  if field not in names:
    raise ValueError(f"{where} has no feature data.text_field={text_field!r}, nor 'tokens'; its features are {names}")
  feature = features[field]
  dtype = np.dtype(feature.np_dtype)
  if dtype.kind in "OSU" and feature.shape == ():
    return field, None
  if dtype.kind in "iu" and len(feature.shape) == 1 and feature.shape[0] is not None:
    return field, tuple(feature.shape)
  raise ValueError(
    f"feature {field!r} of {where} is {dtype} {feature.shape}: neither text nor integer tokens of fixed length; "
    f"set data.text_field to one of {names}"
  )


def _held_out_tail(found: Splits, fraction: float) -> tuple[range, range, Any]:
  """Row numbers of both parts, and the rows that the second part numbers."""
  count = len(found.train)
  if found.heldout is not None:
    return range(count), range(len(found.heldout)), found.heldout
  first = count - max(1, round(count * fraction))
  return range(first), range(first, count), found.train


def text_events(found: Splits, keys: Any) -> Iterator[text.Event]:
  """The text of both parts as events (text.split); a document met before is dropped, so the parts share none."""
  train_rows, heldout_rows, heldout = _held_out_tail(found, keys.heldout_fraction)
  seen: set[bytes] = set()
  dropped = size = 0
  for side, data, numbers in ((text.TRAIN, found.train, train_rows), (text.HELDOUT, heldout, heldout_rows)):
    share = 1 - keys.heldout_fraction if side == text.TRAIN else keys.heldout_fraction
    budget = None if keys.max_bytes is None else max(1, int(keys.max_bytes * share))
    documents = text.capped((text.pieces_of(io.BytesIO(row)) for row in _texts(data, numbers, found.field)), budget)
    for number, pieces in enumerate(map(list, documents), start=1):
      digest = hashlib.blake2b(b"".join(pieces), digest_size=16).digest()
      size += sum(map(len, pieces))
      if digest in seen or not any(pieces):
        dropped += 1
        continue
      seen.add(digest)
      yield from ((side, piece) for piece in pieces)
      yield side, None
      if number % 20_000 == 0:
        logging.info("%s: tokenised %d of %d documents, %.0f MB", found.where, number, len(numbers), size / 1e6)
  logging.info("%s: %d documents, %.1f MB, %d duplicates dropped", found.where, len(seen), size / 1e6, dropped)


def _texts(data: Any, numbers: range, field: str, block: int = 256) -> Iterator[bytes]:
  for start in range(0, len(numbers), block):
    for row in data.__getitems__(list(numbers[start : start + block])):
      value = row[field]
      yield value.encode("utf-8", errors="replace") if isinstance(value, str) else bytes(value)


class TfdsTokens(sources.GatheredSource):
  """Rows of a fixed-length integer feature: int32 [seq_len + 1], checked against the vocabulary as they are read."""

  def __init__(self, data: Any, numbers: range, field: str, vocab_size: int, where: str):
    self._data, self._numbers, self._field, self._vocab_size, self._where = data, numbers, field, vocab_size, where
    self._length = len(numbers)

  def gather(self, ids: np.ndarray) -> np.ndarray:
    rows = self._data.__getitems__([self._numbers[i] for i in ids.tolist()])
    return sources.checked(np.stack([row[self._field] for row in rows]), self._vocab_size, self._where)


def token_sides(found: Splits, keys: Any, vocab_size: int, seq_len: int) -> tuple[TfdsTokens, TfdsTokens]:
  """Both parts of a dataset of tokens; without a held-out split the tail of the rows is held out."""
  if found.tokens_shape != (seq_len + 1,):
    length = found.tokens_shape[0] if found.tokens_shape else 0
    raise ValueError(
      f"seq_len={seq_len} needs rows of {seq_len + 1} tokens and feature {found.field!r} of {found.where} has "
      f"{length}; set seq_len={length - 1} or prepare it with {seq_len + 1}"
    )
  train_rows, heldout_rows, heldout = _held_out_tail(found, keys.heldout_fraction)
  if not train_rows or not heldout_rows:
    raise ValueError(f"{found.where} has {len(found.train)} rows, too few to hold any out; prepare more")
  make = (found.field, vocab_size, found.where)
  return TfdsTokens(found.train, train_rows, *make), TfdsTokens(heldout, heldout_rows, *make)
