"""The order in which workers read, and the fixed held-out batches."""

from __future__ import annotations

from typing import Any

import grain
import numpy as np

from fgd_jax.data.sources import gather


def worker_seed(seed: int, worker: int) -> int:
  """The 32-bit shuffle seed of one worker: hashed, since grain shuffles epoch e with seed + e."""
  return int(np.random.SeedSequence([seed % 2**64, worker]).generate_state(1)[0])


def round_batches(train: Any, workers: int, inner_steps: int, batch_size: int, seed: int) -> grain.MapDataset:
  """The batches of every round, by random access: element r depends on r and the arguments alone.

  Worker m owns the sequences m, m + M, m + 2M, ... and reads each once an epoch, in an order that is a function of
  (seed, m, epoch). Its batch of inner step s = r * H + h does not depend on how steps are grouped into rounds.
  `rounds.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))` iterates (an element is a whole
  round, so keep the buffer small: the default is 500); the state of its iterator is one `next_index`, and threads do
  not change the order.

  Args:
    train: a source of int32 [seq_len + 1] (see sources.TokenSource; any object with len() and [i] will do).
    workers, inner_steps, batch_size: M, H and B.
    seed: any integer.

  Returns:
    A practically endless MapDataset of {"tokens": int32 [M, H, B, seq_len + 1]}.

  Raises:
    ValueError: a size below 1, or a worker's share smaller than one batch.
  """
  for name, value in (("workers", workers), ("inner_steps", inner_steps), ("batch_size", batch_size)):
    if value < 1:
      raise ValueError(f"{name}={value} must be at least 1")
  sequences = len(train)
  if sequences // workers < batch_size:
    raise ValueError(
      f"workers={workers} leaves a worker {sequences // workers} of {sequences} training sequences, fewer than "
      f"batch_size={batch_size}; use fewer workers, a smaller batch_size or seq_len, or more text"
    )
  orders = [
    grain.MapDataset.range(worker, sequences, workers)
    .shuffle(seed=worker_seed(seed, worker))
    .repeat()
    .batch(inner_steps * batch_size)
    for worker in range(workers)
  ]

  def assemble(ids_M: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    tokens = gather(train, np.concatenate(ids_M))
    return {"tokens": tokens.reshape(workers, inner_steps, batch_size, -1)}

  return grain.experimental.ZipMapDataset(orders).map(assemble)


def heldout_batches(heldout: Any, batch_size: int, batches: int) -> dict[str, np.ndarray]:
  """N fixed batches whose sequences are spread evenly over the held-out part, none twice.

  Returns:
    {"tokens": int32 [N, B, seq_len + 1]}.

  Raises:
    ValueError: the held-out part has fewer than N * B sequences, or a size is below 1.
  """
  wanted, there = batches * batch_size, len(heldout)
  if batches < 1 or batch_size < 1:
    raise ValueError(f"eval_batches={batches} and batch_size={batch_size} must be at least 1")
  if wanted > there:
    raise ValueError(
      f"eval_batches={batches} of batch_size={batch_size} need {wanted} held-out sequences, there are {there}; "
      f"lower eval_batches, raise data.heldout_fraction, or add text"
    )
  tokens = gather(heldout, np.arange(wanted) * there // wanted)
  return {"tokens": tokens.reshape(batches, batch_size, -1)}
