"""Folders of tokenised text: ArrayRecord shards and a meta.json, written once and read by random access.

    train-00000-of-00003.array_record ...  heldout-00000-of-00001.array_record  meta.json  tokenizer.json (unless bytes)

A record is the little-endian bytes of seq_len + 1 tokens, of the type that meta.json names. The same input gives the
same records.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from fgd_jax.data import sources, text, tokenizer

FORMAT = 1
SIDES = ("train", "heldout")
_SUFFIX = ".array_record"


class RecordTokens(sources.GatheredSource):
  """The sequences of one part of a folder: int32 [seq_len + 1] each."""

  def __init__(self, paths: list[str], meta: dict[str, Any]):
    import grain

    self._records = grain.sources.ArrayRecordDataSource(paths)
    self._length, self._meta, self._where = len(self._records), meta, os.path.dirname(paths[0])

  def gather(self, ids: np.ndarray) -> np.ndarray:
    joined = b"".join(self._records.__getitems__(ids.tolist()))
    tokens = np.frombuffer(joined, self._meta["dtype"]).reshape(len(ids), self._meta["seq_len"] + 1)
    return sources.checked(tokens, self._meta["vocab_size"], self._where)


def open_folder(path: str, seq_len: int) -> tuple[dict[str, Any], RecordTokens, RecordTokens]:
  """meta.json and both parts of a folder that `write_folder` made.

  Raises:
    FileNotFoundError: no such folder, or no meta.json or shard in it.
    ValueError: another seq_len or format, lost records.
  """
  remedy = "write it with python -m fgd_jax.data.tokenize"
  if not os.path.isdir(path):
    raise FileNotFoundError(f"data.path={path!r} is not a folder (seen from {os.getcwd()!r}); {remedy}")
  if not os.path.isfile(os.path.join(path, "meta.json")):
    raise FileNotFoundError(f"data.path={path!r} holds no meta.json; {remedy}")
  with open(os.path.join(path, "meta.json"), encoding="utf-8") as file:
    meta = json.load(file)
  if meta.get("format") != FORMAT:
    raise ValueError(f"data.path={path!r} has format {meta.get('format')!r}, this version reads {FORMAT}; {remedy}")
  if meta["seq_len"] != seq_len:
    raise ValueError(
      f"data.path={path!r} was written with seq_len={meta['seq_len']} and the config has seq_len={seq_len}; "
      f"set seq_len={meta['seq_len']} or tokenise again with --seq_len={seq_len}"
    )
  return meta, *(_open_side(path, side, meta) for side in SIDES)  # type: ignore[return-value]


def _open_side(path: str, side: str, meta: dict[str, Any]) -> RecordTokens:
  paths = _shards(path, side, meta[side]["shards"])
  for shard in paths:
    if not os.path.isfile(shard):
      raise FileNotFoundError(f"{shard} is missing; copy the whole folder again or tokenise anew")
  source = RecordTokens(paths, meta)
  if len(source) != meta[side]["sequences"]:
    raise ValueError(
      f"data.path={path!r} holds {len(source)} {side} sequences and meta.json counts {meta[side]['sequences']}; "
      f"copy the whole folder again or tokenise anew"
    )
  return source


def _shards(folder: str, side: str, count: int) -> list[str]:
  return [os.path.join(folder, f"{side}-{i:05d}-of-{count:05d}{_SUFFIX}") for i in range(count)]


class ShardWriter:
  """Cuts one part's stream of tokens into sequences and writes them; counts the predicted tokens as it goes."""

  def __init__(self, folder: str, side: str, seq_len: int, vocab_size: int, shard_bytes: int):
    self._folder, self._side, self._seq_len = folder, side, seq_len
    self._dtype = sources.token_dtype(vocab_size)
    self._per_shard = max(1, shard_bytes // ((seq_len + 1) * self._dtype.itemsize))
    self._pending: list[np.ndarray] = []
    self._pending_tokens = 0
    self._writer: Any = None
    self.tokens = self.sequences = self.shards = 0
    self.counts = np.zeros(vocab_size, np.int64)

  def add(self, tokens: np.ndarray) -> None:
    self._pending.append(tokens.astype(self._dtype))
    self._pending_tokens += len(tokens)
    self.tokens += len(tokens)
    if self._pending_tokens > max(1 << 20, self._seq_len):
      self._write_pending()

  def _write_pending(self) -> None:
    stream = np.concatenate(self._pending)
    ready = sources.PackedTokens(stream, self._seq_len)
    if len(ready):
      self.counts += ready.target_counts(len(self.counts))
    for i in range(len(ready)):
      if self.sequences == self.shards * self._per_shard:
        self._next_shard()
      start = i * self._seq_len
      self._writer.write(stream[start : start + self._seq_len + 1].tobytes())
      self.sequences += 1
    rest = stream[len(ready) * self._seq_len :]  # from the last token written on: it is the next sequence's first input
    self._pending, self._pending_tokens = [rest.copy()], len(rest)

  def _next_shard(self) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    if self._writer is not None:
      self._writer.close()
    # One record a group: grain reads single records at random. Compressing so little data at a time gains nothing.
    path = os.path.join(self._folder, f"{self._side}-{self.shards:05d}.part")
    self._writer = ArrayRecordWriter(path, "group_size:1,uncompressed")
    self.shards += 1

  def finish(self) -> None:
    """Writes what is left and gives the shards their final names, which contain their number."""
    if self._pending:
      self._write_pending()
    if self._writer is not None:
      self._writer.close()
    for i, path in enumerate(_shards(self._folder, self._side, self.shards)):
      os.rename(os.path.join(self._folder, f"{self._side}-{i:05d}.part"), path)


def write_folder(
  input_path: str,
  output: str,
  *,
  seq_len: int,
  tokenizer_name: str = "bytes",
  train_tokenizer: int | None = None,
  pattern: str | None = None,
  text_field: str = "text",
  heldout_fraction: float = 0.05,
  shard_size_mb: float = 256,
  progress: Callable[[Iterable[text.Document], str, int | None], Iterable[text.Document]] = lambda docs, what, total: docs,
) -> dict[str, Any]:
  """Tokenises the documents of a folder into `output`, which appears only when all of it is written.

  Documents are streamed (three times when a tokenizer is trained, else twice). Memory does not grow with the input, but
  for about 100 bytes a document, by which duplicates are found, and the index of the shard being written.

  Args:
    input_path, pattern, text_field: see text.find_files and text.read_documents.
    train_tokenizer: vocabulary of a BPE to train on the training part, instead of using `tokenizer_name`.
    progress: wraps the documents of a pass: (documents, name of the pass, its bytes if known) -> documents.

  Returns:
    What meta.json holds.

  Raises:
    ValueError, FileNotFoundError: bad arguments or input; a non-empty output is never touched.
  """
  if seq_len < 1 or shard_size_mb <= 0 or not 0 < heldout_fraction < 1:
    raise ValueError(
      f"seq_len={seq_len} and shard_size_mb={shard_size_mb} must be positive, "
      f"and heldout_fraction={heldout_fraction} between 0 and 1; correct the flag"
    )
  output = os.path.abspath(output)
  if os.path.exists(output) and (not os.path.isdir(output) or os.listdir(output)):
    raise ValueError(f"--output={output!r} exists and is not an empty folder; choose another or empty it")
  encoder = None if train_tokenizer else tokenizer.load(tokenizer_name)  # a bad name fails before the first pass
  files = text.find_files(input_path, pattern)
  least = (encoder.bytes_per_token if encoder else tokenizer.JsonTokenizer.bytes_per_token) * (seq_len + 1)
  plan = text.survey(progress(text.read_documents(files, text_field), "survey", None), heldout_fraction, least)

  def events(what: str) -> Iterator[text.Event]:
    return text.split(progress(text.read_documents(files, text_field), what, plan.text_bytes), plan)

  os.makedirs(os.path.dirname(output), exist_ok=True)
  folder = tempfile.mkdtemp(prefix=f".{os.path.basename(output)}-", dir=os.path.dirname(output))
  try:
    kept = os.path.join(folder, "tokenizer.json")
    if train_tokenizer:
      pieces = (piece for side, piece in events("train tokenizer") if side == text.TRAIN and piece is not None)
      tokenizer.train(pieces, train_tokenizer, kept)
      encoder = tokenizer.load(kept)
    elif tokenizer_name != "bytes":
      shutil.copyfile(tokenizer_name, kept)
    assert encoder is not None
    meta = _write_shards(folder, events("tokenise"), encoder, plan, input_path, seq_len, int(shard_size_mb * 2**20))
    with open(os.path.join(folder, "meta.json"), "w", encoding="utf-8") as file:
      json.dump(meta, file, indent=1)
      file.write("\n")
    os.chmod(folder, 0o755)  # mkdtemp lets nobody else in
    os.rename(folder, output)
  except BaseException:
    shutil.rmtree(folder, ignore_errors=True)
    raise
  return meta


def _write_shards(
  folder: str,
  events: Iterator[text.Event],
  encoder: tokenizer.Tokenizer,
  plan: text.Plan,
  where: str,
  seq_len: int,
  shard_bytes: int,
) -> dict[str, Any]:
  train, heldout = writers = [ShardWriter(folder, side, seq_len, encoder.vocab_size, shard_bytes) for side in SIDES]
  for side, tokens in tokenizer.encode_stream(events, encoder):
    writers[side].add(tokens)
  for writer in writers:
    writer.finish()
  sources.require_sequences({"training": train.tokens, "held-out": heldout.tokens}, seq_len, f"--input={where!r}")
  return {
    "format": FORMAT,
    "seq_len": seq_len,
    "vocab_size": encoder.vocab_size,
    "tokenizer": "bytes" if encoder.name == "bytes" else "tokenizer.json",
    "separator": encoder.separator.tolist(),
    "dtype": sources.token_dtype(encoder.vocab_size).str,
    "documents": plan.documents,
    "duplicates_dropped": plan.duplicates,
    "text_bytes": plan.text_bytes,
    "train": {"shards": train.shards, "sequences": train.sequences, "tokens": train.sequences * seq_len},
    "heldout": {"shards": heldout.shards, "sequences": heldout.sequences, "tokens": heldout.sequences * seq_len},
    "unigram_loss": sources.unigram_loss(train.counts, heldout.counts),
  }
