"""Documents of a folder: find the files, read them piece by piece, drop duplicates, choose the held-out ones.

A document is a file, or a row of a .jsonl or .parquet file. It is read as pieces of at most PIECE bytes, so a corpus of
any size passes through a few MB of memory; it is read twice, once to decide (`survey`) and once to use (`split`).
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

PIECE = 1 << 18  # bytes
PATTERN = "*.txt,*.md,*.py,*.rst,*.jsonl,*.parquet"
TRAIN, HELDOUT, DROPPED = 0, 1, 2
# Folders of the standard library that hold other people's packages, or tests (much of it generated data).
_STDLIB_SKIPPED = frozenset(["site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"])

Document = Iterable[bytes]
Event = tuple[int, bytes | None]  # (side, a piece of text), or (side, None) where a document ends


def find_files(path: str | os.PathLike[str] | None, pattern: str | None = None) -> list[str]:
  """Files under `path` that match, in the order of their relative paths.

  Hidden files and folders, broken links and folders already visited through a link are left out.

  Args:
    path: a folder, or one file; None is Python's standard library without its tests.
    pattern: comma-separated globs on the file name, or on the relative path where a glob has a "/". None: PATTERN,
      and "*.py" for the standard library.

  Raises:
    FileNotFoundError: no such folder, or nothing in it matches.
  """
  root = os.fspath(path) if path else sysconfig.get_path("stdlib") or os.path.dirname(os.__file__)
  globs = [glob.strip() for glob in (pattern or (PATTERN if path else "*.py")).split(",") if glob.strip()]
  if os.path.isfile(root):
    return [root]
  if not os.path.isdir(root):
    raise FileNotFoundError(f"data.path={root!r} does not exist (seen from {os.getcwd()!r}); give a folder with text")
  found: dict[str, str] = {}
  visited: set[str] = set()
  for folder, subfolders, names in os.walk(root, followlinks=True):
    real = os.path.realpath(folder)
    if real in visited:
      subfolders.clear()
      continue
    visited.add(real)
    skipped = frozenset() if path else _STDLIB_SKIPPED
    subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in skipped)
    for name in names:
      full = os.path.join(folder, name)
      relative = os.path.relpath(full, root).replace(os.sep, "/")
      matches = any(fnmatch.fnmatchcase(relative if "/" in glob else name, glob) for glob in globs)
      if matches and not name.startswith(".") and os.path.isfile(full):
        found[relative] = full
  if not found:
    raise FileNotFoundError(
      f"data.path={root!r} has no file that matches {','.join(globs)!r}; set data.pattern to globs that do"
    )
  return [found[relative] for relative in sorted(found)]


def read_documents(files: Iterable[str], text_field: str = "text") -> Iterator[Document]:
  """The documents of `files`, as raw bytes (UTF-8 where they come from .jsonl or .parquet).

  Raises:
    ValueError: a row without `text_field`, or a file that cannot be parsed; the sentence names file, line and fields.
  """
  for path in files:
    if path.endswith(".jsonl"):
      yield from (pieces_of(io.BytesIO(row)) for row in _jsonl_rows(path, text_field))
    elif path.endswith(".parquet"):
      yield from (pieces_of(io.BytesIO(row)) for row in _parquet_rows(path, text_field))
    else:
      with open(path, "rb") as file:
        yield pieces_of(file)


def capped(documents: Iterable[Document], max_bytes: int | None) -> Iterator[Document]:
  """The first `max_bytes` bytes of `documents` (None: all); the last one is cut between two characters."""
  if max_bytes is None:
    yield from documents
    return
  if max_bytes < 1:
    raise ValueError(f"data.max_bytes={max_bytes} must be at least 1; None reads everything")
  left = max_bytes

  def first(document: Document) -> Iterator[bytes]:
    nonlocal left
    for piece in document:
      if len(piece) > left:
        piece, left = piece[: _boundary(piece, left)], 0
      else:
        left -= len(piece)
      yield piece
      if left == 0:
        return

  for document in documents:
    yield first(document)
    if left == 0:
      return


class Plan(NamedTuple):
  """Where each document goes.

  Attributes:
    sides: one of TRAIN, HELDOUT, DROPPED (a duplicate, or empty) for each document, in order.
    tail_at: None; or bytes of kept text before the held-out tail, where the split is by position instead.
    documents: documents kept.      duplicates: documents dropped as exact copies.      text_bytes: bytes kept.
  """

  sides: bytearray
  tail_at: int | None
  documents: int
  duplicates: int
  text_bytes: int


def survey(documents: Iterable[Document], heldout_fraction: float, least: int = 1) -> Plan:
  """Decides the side of each document by a hash of its content, so that adding files moves no other document.

  Where that leaves a side with fewer than `least` bytes (one document, say), the tail of the text is held out
  instead: the larger of `heldout_fraction` of it and `least` bytes.
  """
  sides, seen, kept = bytearray(), set(), [0, 0]
  duplicates = 0
  for document in documents:
    digest, size = hashlib.blake2b(digest_size=16), 0
    for piece in document:
      digest.update(piece)
      size += len(piece)
    key = digest.digest()
    if size == 0 or key in seen:
      duplicates += size > 0
      sides.append(DROPPED)
      continue
    seen.add(key)
    side = HELDOUT if int.from_bytes(key[:8], "little") < heldout_fraction * 2**64 else TRAIN
    kept[side] += size
    sides.append(side)
  total = sum(kept)
  tail_at = None if min(kept) >= least else max(0, total - max(int(total * heldout_fraction), least))
  return Plan(sides, tail_at, len(seen), duplicates, total)


def split(documents: Iterable[Document], plan: Plan) -> Iterator[Event]:
  """The same documents again, as events (side, piece) and (side, None) at the end of each document."""
  position = 0
  for document, side in zip(documents, plan.sides, strict=True):
    for piece in document:  # read even when dropped: `capped` counts what was read
      if side == DROPPED:
        continue
      if plan.tail_at is None:
        yield side, piece
        continue
      cut = _boundary(piece, min(max(plan.tail_at - position, 0), len(piece)))
      position += len(piece)
      if cut:
        yield TRAIN, piece[:cut]
      if cut < len(piece):
        yield HELDOUT, piece[cut:]
    if side != DROPPED:
      yield (side if plan.tail_at is None else int(position > plan.tail_at)), None


def pieces_of(file: BinaryIO, size: int | None = None) -> Iterator[bytes]:
  """Cuts a file after line ends (or between two characters) into pieces of at most `size` bytes (None: PIECE)."""
  size = size or PIECE
  rest = b""
  while block := file.read(size - len(rest)):
    data = rest + block
    if len(data) < size:
      rest = data
      continue
    cut = data.rfind(b"\n") + 1 or _boundary(data, size - 4)
    yield data[:cut]
    rest = data[cut:]
  if rest:
    yield rest


def _boundary(data: bytes, end: int) -> int:
  """The largest index <= end that is not inside a UTF-8 character (or `end`, where the bytes are no UTF-8)."""
  for back in range(min(end, 3) + 1):
    if end - back >= len(data) or data[end - back] & 0xC0 != 0x80:
      return end - back
  return end


def _jsonl_rows(path: str, text_field: str) -> Iterator[bytes]:
  with open(path, "rb") as file:
    for number, line in enumerate(file, start=1):
      if not line.strip():
        continue
      try:
        row = json.loads(line.decode("utf-8", errors="replace"))
      except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not a JSON object ({error}); repair or remove the line") from None
      fields = sorted(row) if isinstance(row, dict) else []
      if text_field not in fields:
        raise ValueError(f"{path}, line {number}: no field data.text_field={text_field!r}; its fields are {fields}")
      if row[text_field] is None:
        continue
      if not isinstance(row[text_field], str):
        kind = type(row[text_field]).__name__
        raise ValueError(  # noqa: TRY004 (what the file holds, not how we were called)
          f"{path}, line {number}: field {text_field!r} is a {kind}, not a string; its fields are {fields}"
        )
      yield row[text_field].encode("utf-8", errors="replace")


def _parquet_rows(path: str, text_field: str) -> Iterator[bytes]:
  import pyarrow as pa
  import pyarrow.parquet as pq

  try:
    table = pq.ParquetFile(path)
  except pa.ArrowInvalid as error:
    raise ValueError(f"{path} cannot be read as parquet ({error}); write it again or leave it out") from None
  with table:
    fields = table.schema_arrow.names
    if text_field not in fields:
      raise ValueError(f"{path} has no column data.text_field={text_field!r}; its columns are {fields}")
    for batch in table.iter_batches(batch_size=256, columns=[text_field]):
      for value in batch.column(0).to_pylist():
        if value is None:
          continue
        if not isinstance(value, str | bytes):
          raise ValueError(  # noqa: TRY004
            f"{path}: column {text_field!r} is {batch.schema.types[0]}, not text; its columns are {fields}"
          )
        yield value if isinstance(value, bytes) else value.encode("utf-8", errors="replace")
