"""Tokenizers: raw bytes, or a Hugging Face tokenizer.json (package `tokenizers`, imported only for it)."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from fgd_jax.data.text import Event, pieces_of

END_OF_TEXT = "<|endoftext|>"
# What a tokenizer.json may call the token between two documents, first match; without any a blank line is encoded.
_SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
_BATCH = 1 << 20  # bytes of text encoded at once: Encoding objects take a hundred bytes a token


class Tokenizer(Protocol):
  """Text to tokens and back.

  Attributes:
    name: "bytes", or the path it was read from.     vocab_size: tokens are in [0, vocab_size).
    separator: tokens put after each document.       bytes_per_token: a generous average, to judge if text suffices.
  """

  name: str
  vocab_size: int
  separator: np.ndarray
  bytes_per_token: int

  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]: ...
  def decode(self, tokens: Any) -> bytes: ...


class ByteTokenizer:
  """A token is a byte: vocabulary 256, exact round trip. Byte 0, which text does not use, ends each document."""

  name, vocab_size, bytes_per_token = "bytes", 256, 1
  separator = np.zeros(1, np.uint8)

  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    return [np.frombuffer(text, np.uint8) for text in texts]

  def decode(self, tokens: Any) -> bytes:
    return np.asarray(tokens).astype(np.uint8).tobytes()


class JsonTokenizer:
  """A tokenizer.json. Bytes that are not UTF-8 become U+FFFD; no special tokens, truncation or padding are added."""

  bytes_per_token = 8

  def __init__(self, path: str):
    if not os.path.isfile(path):
      raise FileNotFoundError(f'data.tokenizer={path!r} is not a file; give "bytes" or the path of a tokenizer.json')
    import tokenizers

    try:
      self._model = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001 (the package raises a bare Exception for whatever it cannot parse)
      raise ValueError(
        f"data.tokenizer={path!r} cannot be read as a Hugging Face tokenizer.json ({error}); export it again"
      ) from None
    self._model.no_truncation()
    self._model.no_padding()
    vocab = self._model.get_vocab(with_added_tokens=True)
    if not vocab:
      raise ValueError(f"data.tokenizer={path!r} has an empty vocabulary; train it first (--train_tokenizer=VOCAB)")
    self.name = path
    self.vocab_size = max(vocab.values()) + 1  # ids may have gaps
    mark = next((vocab[name] for name in _SEPARATORS if name in vocab), None)
    self.separator = self.encode_batch([b"\n\n"])[0] if mark is None else np.array([mark], np.uint32)

  def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    decoded = [text.decode("utf-8", errors="replace") for text in texts]
    return [np.array(x.ids, np.uint32) for x in self._model.encode_batch_fast(decoded, add_special_tokens=False)]

  def decode(self, tokens: Any) -> bytes:
    return self._model.decode(np.asarray(tokens).tolist(), skip_special_tokens=False).encode("utf-8")


def load(name: str) -> Tokenizer:
  """The tokenizer of data.tokenizer: "bytes", or the path of a tokenizer.json.

  Raises:
    FileNotFoundError: no such file.     ValueError: a file that is not a tokenizer.
  """
  return ByteTokenizer() if name == "bytes" else JsonTokenizer(os.fspath(name))


def train(texts: Iterable[bytes], vocab_size: int, path: str) -> None:
  """Trains a byte-level BPE (exact round trip, END_OF_TEXT is token 0) and writes it to `path`."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers

  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  if vocab_size <= len(alphabet):
    raise ValueError(f"--train_tokenizer={vocab_size} must be above {len(alphabet)}: 256 bytes and {END_OF_TEXT}")
  model = tokenizers.Tokenizer(models.BPE())
  model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
  )
  # The trainer takes 256 texts at once from its iterator, so they are kept short.
  short = (piece for text in texts for piece in pieces_of(io.BytesIO(text), 1 << 14))
  model.train_from_iterator((piece.decode("utf-8", errors="replace") for piece in short), trainer)
  model.save(path)


def encode_stream(events: Iterable[Event], encoder: Tokenizer) -> Iterator[tuple[int, np.ndarray]]:
  """Tokens of `events` (text.split) in order: (side, unsigned [n]); the separator stands after each document."""

  def flush(pending: list[Event]) -> Iterator[tuple[int, np.ndarray]]:
    encoded = iter(encoder.encode_batch([text for _, text in pending if text is not None]))
    for side, text in pending:
      yield side, encoder.separator if text is None else next(encoded)

  pending: list[Event] = []
  size = 0
  for side, text in events:
    pending.append((side, text))
    size += len(text or b"") + 1
    if size >= _BATCH:
      yield from flush(pending)
      pending, size = [], 0
  yield from flush(pending)
