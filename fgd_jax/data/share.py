"""The batches of one worker alone, by inner step, for a process that trains one worker."""

from __future__ import annotations

from typing import Any

import grain

from fgd_jax.data.deal import worker_seed
from fgd_jax.data.sources import gather


def worker_batches(train: Any, worker: int, workers: int, batch_size: int, seed: int) -> grain.MapDataset:
  """The batches of one worker: element n is what `round_batches` gives it in inner step n.

  A worker beyond the first `workers` (a learner that joined late) reads the share of worker mod workers, in an order of its
  own.

  Args:
    train, workers, batch_size, seed: see `batches.round_batches`.
    worker: its number, from 0.

  Returns:
    A practically endless MapDataset of {"tokens": int32 [B, seq_len + 1]}.

  Raises:
    ValueError: a share smaller than one batch.
  """
  sequences = len(train)
  if sequences // workers < batch_size:
    raise ValueError(f"learners={workers} leaves a learner {sequences // workers} of {sequences} training sequences, fewer "
                     f"than batch_size={batch_size}; use fewer learners, a smaller batch_size or seq_len, or more text.")
  order = grain.MapDataset.range(worker % workers, sequences, workers).shuffle(seed=worker_seed(seed, worker)).repeat()
  return order.batch(batch_size).map(lambda ids: {"tokens": gather(train, ids)})
