"""Token sequences by index: packed text in memory, and the synthetic Markov chain."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np


class TokenSource(Protocol):
  """Random access to sequences of seq_len + 1 tokens.

  `source[i]` is int32 [seq_len + 1]; one that also has `gather(ids [k]) -> int32 [k, seq_len + 1]` is read in bulk.
  """

  def __len__(self) -> int: ...
  def __getitem__(self, index: int, /) -> np.ndarray: ...


def gather(source: Any, ids: np.ndarray) -> np.ndarray:
  """The sequences `ids` [k] of `source` as int32 [k, seq_len + 1]."""
  if hasattr(source, "gather"):
    return source.gather(ids)
  return np.stack([np.asarray(source[int(i)], np.int32) for i in ids])


class GatheredSource(abc.ABC):
  """A source whose `[i]` comes from its `gather`; subclasses set `_length` and write `gather`."""

  _length: int

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, index: int) -> np.ndarray:
    index = index.__index__()
    if not -self._length <= index < self._length:
      raise IndexError(f"sequence {index} of {self._length}")
    return self.gather(np.array([index % self._length]))[0]

  @abc.abstractmethod
  def gather(self, ids: np.ndarray) -> np.ndarray:
    """The sequences `ids` [k]: int32 [k, seq_len + 1]."""


class PackedTokens(GatheredSource):
  """One stream of tokens cut into windows of seq_len + 1, stride seq_len, so that each token is predicted once."""

  def __init__(self, tokens: np.ndarray, seq_len: int):
    self._length = max(0, (len(tokens) - 1) // seq_len)
    self._tokens = tokens[: self._length * seq_len + 1]
    self._seq_len = seq_len

  def gather(self, ids: np.ndarray) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(self._tokens, self._seq_len + 1)[:: self._seq_len]
    return windows[ids].astype(np.int32)

  def target_counts(self, vocab_size: int) -> np.ndarray:
    """How often each token is predicted in one pass: int64 [vocab_size]."""
    return counts(self._tokens[1:], vocab_size)


def token_dtype(vocab_size: int) -> np.dtype:
  """The smallest unsigned type for tokens below `vocab_size`: one, two or four little-endian bytes."""
  return np.dtype("<u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
  """Occurrences of each token, int64 [vocab_size], in blocks so that no 8-byte copy of all of them is made."""
  total = np.zeros(vocab_size, np.int64)
  flat = tokens.reshape(-1)
  for start in range(0, len(flat), 1 << 22):
    total += np.bincount(flat[start : start + (1 << 22)], minlength=vocab_size)
  return total


def unigram_loss(train_counts: np.ndarray, heldout_counts: np.ndarray) -> float:
  """Nats per held-out token under the add-one smoothed unigram distribution of the training part."""
  log_probability = np.log((train_counts + 1.0) / (train_counts.sum() + len(train_counts)))
  return float(-(heldout_counts * log_probability).sum() / heldout_counts.sum())


def checked(tokens: np.ndarray, vocab_size: int, where: str) -> np.ndarray:
  """`tokens` as int32, after a look at their range.

  Raises:
    ValueError: a token outside [0, vocab_size).
  """
  low, high = int(tokens.min()), int(tokens.max())
  if low < 0 or high >= vocab_size:
    raise ValueError(
      f"token {low if low < 0 else high} in {where} lies outside the vocabulary [0, {vocab_size}); "
      f"set data.tokenizer to the one the tokens were made with"
    )
  return tokens.astype(np.int32)


def require_sequences(tokens_of: dict[str, int], seq_len: int, where: str) -> None:
  """Raises ValueError if a part of the corpus, given by its number of tokens, cannot fill one sequence."""
  for part, tokens in tokens_of.items():
    if tokens < seq_len + 1:
      raise ValueError(
        f"seq_len={seq_len} is longer than the {part} text of {where}: {tokens} tokens, and one sequence takes "
        f"{seq_len + 1}; lower seq_len, raise data.max_bytes or add text"
      )


def packed_sides(
  stream: Iterable[tuple[int, np.ndarray]], vocab_size: int, seq_len: int, where: str
) -> tuple[PackedTokens, PackedTokens]:
  """Collects a token stream (tokenizer.encode_stream) into its training and its held-out source."""
  sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
  dtype = token_dtype(vocab_size)
  for side, tokens in stream:
    sides[side].append(tokens.astype(dtype))
  train, heldout = (np.concatenate(side) if side else np.zeros(0, dtype) for side in sides)
  require_sequences({"training": len(train), "held-out": len(heldout)}, seq_len, where)
  return PackedTokens(train, seq_len), PackedTokens(heldout, seq_len)


class MarkovTokens(GatheredSource):
  """Sequences of a seeded Markov chain, made on demand: sequence i is a function of (seed, first + i) alone.

  After token v come three likely successors (probabilities .55, .25, .10), drawn once per chain from a Zipf
  distribution, or, with probability .10, any token: at most 1.14 + 0.1 ln(vocab_size) nats a token, while the unigram
  distribution needs far more.
  """

  _THRESHOLDS = (0.55, 0.80, 0.90)

  def __init__(self, length: int, first: int, seq_len: int, vocab_size: int, seed: int):
    # RandomState, since NumPy promises its stream for ever; Generator's methods may change between versions.
    draw = np.random.RandomState(seed % 2**32)
    zipf = 1.0 / np.arange(1, vocab_size + 1)
    likely = draw.choice(draw.permutation(vocab_size), (vocab_size, 3), p=zipf / zipf.sum())
    self._successors = np.pad(likely, ((0, 0), (0, 1)))  # the fourth column is never used: branch 3 draws any token
    self._length, self._first, self._seq_len, self._vocab_size = length, first, seq_len, vocab_size
    self._key = np.uint64(int(draw.randint(0, 2**31 - 1)) << 31 | int(draw.randint(0, 2**31 - 1)))

  def gather(self, ids: np.ndarray) -> np.ndarray:
    length = self._seq_len + 1
    counter = (np.asarray(ids, np.uint64) + np.uint64(self._first))[:, None] * np.uint64(length)
    bits = _splitmix64(counter + np.arange(length, dtype=np.uint64) + self._key)
    uniform = (bits >> np.uint64(40)).astype(np.float64) / 2**24
    branch = np.searchsorted(self._THRESHOLDS, uniform, side="right")
    anything = ((bits & np.uint64(0xFFFFFFFF)) % np.uint64(self._vocab_size)).astype(np.int64)
    tokens = np.empty((len(ids), length), np.int32)
    tokens[:, 0] = token = self._successors[anything[:, 0], 0]
    for position in range(1, length):
      likely = self._successors[token, branch[:, position]]
      tokens[:, position] = token = np.where(branch[:, position] == 3, anything[:, position], likely)
    return tokens

  def sampled_counts(self, vocab_size: int, tokens: int = 1 << 19) -> np.ndarray:
    """Counts of the predicted tokens of the first sequences, about `tokens` of them (the chain is stationary)."""
    sample = min(self._length, max(1, tokens // self._seq_len))
    blocks = np.array_split(np.arange(sample), max(1, sample * self._seq_len >> 17))
    return sum((counts(self.gather(block)[:, 1:], vocab_size) for block in blocks), np.zeros(vocab_size, np.int64))


def _splitmix64(x: np.ndarray) -> np.ndarray:
  """Sebastiano Vigna's splitmix64 output function: independent-looking 64 bits for every counter."""
  x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def markov_sides(vocab_size: int, seq_len: int, seed: int) -> tuple[MarkovTokens, MarkovTokens]:
  """65,536 training and 4,096 held-out sequences of one chain, no index in common."""
  if vocab_size < 2:
    raise ValueError(f"data.vocab_size={vocab_size} must be at least 2")
  train, heldout = 1 << 16, 1 << 12
  return (
    MarkovTokens(train, 0, seq_len, vocab_size, seed),
    MarkovTokens(heldout, train, seq_len, vocab_size, seed),
  )
