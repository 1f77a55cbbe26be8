"""Which worker reads which sequence when, also after the number of workers has changed in the middle of a pass."""

from __future__ import annotations

from collections.abc import Sequence

import grain
import numpy as np

_ENDLESS = 1 << 40  # examples of a worker; grain's own endless datasets cannot be concatenated, or put in batches of one


def worker_seed(seed: int, worker: int, deal: int = 0) -> int:
  """The 32-bit shuffle seed of one worker: hashed, since grain shuffles epoch e with seed + e."""
  key = [seed % 2**64, worker] + ([deal] if deal else [])
  return int(np.random.SeedSequence(key).generate_state(1)[0])


def worker_orders(sequences: int, workers: int, seed: int, earlier: Sequence[tuple[int, int]] = ()
                  ) -> list[grain.MapDataset]:
  """For each worker the endless order of the sequences it reads, by random access; a function of the arguments alone.

  A pass reads every sequence once. Worker m owns the sequences m, m + M, ... of each pass, shuffled. When the number of
  workers changes, what nobody has read of a pass that has begun is shuffled and dealt to the new workers, who read it
  before the next pass; so no sequence is read twice in a pass. (Shares differ by up to one sequence, so some workers
  begin the next pass before others; what they have read of it is left out of it, too.)

  Args:
    sequences: N.     workers: M, now.     seed: of the shuffles.
    earlier: (workers, examples that each of them has read) of the deals before, oldest first.

  Returns:
    M datasets of sequence numbers.
  """
  deal = _Deal(sequences, (earlier[0][0] if earlier else workers), seed, 0, 0, [])
  counts = [count for count, _ in earlier[1:]] + [workers]
  for number, ((_, examples), count) in enumerate(zip(earlier, counts), 1):
    deal = deal.after(examples, count, number)
  return [deal.order(m) for m in range(workers)]


class _Deal:
  """The shares of M workers in every pass.

  Args:
    number: how often the data were dealt before.
    first: the number of the first pass that this deal takes part in.
    begun: what is left of the passes first, first + 1, ... that had begun; later passes have everything.
  """

  def __init__(self, sequences: int, workers: int, seed: int, number: int, first: int, begun: list[grain.MapDataset]):
    self._sequences, self._workers, self._seed = sequences, workers, seed
    self._first, self._begun = first, []
    for k, pool in enumerate(begun, first):
      order = np.random.SeedSequence([seed % 2**64, k, number, 1]).generate_state(1)[0]
      self._begun.append(pool.shuffle(seed=int(order)))
    self._whole = [grain.MapDataset.range(m, sequences, workers).shuffle(seed=worker_seed(seed, m, number))
                   for m in range(workers)]

  def order(self, m: int) -> grain.MapDataset:
    """Everything that worker m reads."""
    rests = [rest for rest in (pool[m :: self._workers] for pool in self._begun) if len(rest)]
    passes = self._whole[m].repeat(2 * _ENDLESS // len(self._whole[m]))
    return (grain.MapDataset.concatenate([*rests, passes]) if rests else passes)[:_ENDLESS]

  def after(self, examples: int, workers: int, number: int) -> _Deal:
    """The deal to `workers` when every worker has read `examples`."""
    places = [self._place(m, examples) for m in range(self._workers)]
    first = min(k for k, _ in places)
    last = max(*(k for k, _ in places), self._first + len(self._begun) - 1)  # also begun passes that nobody has reached
    begun = []
    for k in range(first, last + 1):
      rests = [self._share(m, k, offset if at == k else 0) for m, (at, offset) in enumerate(places) if at <= k]
      begun.append(grain.MapDataset.concatenate([rest for rest in rests if len(rest)]))
    return _Deal(self._sequences, workers, self._seed, number, first, begun)

  def _place(self, m: int, examples: int) -> tuple[int, int]:
    """The pass in which worker m is, and how much of its share it has read."""
    for k, pool in enumerate(self._begun, self._first):
      share = len(pool[m :: self._workers])
      if examples < share:
        return k, examples
      examples -= share
    passes, offset = divmod(examples, len(self._whole[m]))
    return self._first + len(self._begun) + passes, offset

  def _share(self, m: int, k: int, start: int) -> grain.MapDataset:
    """What worker m reads of pass k, from position `start`."""
    if k < self._first + len(self._begun):
      return self._begun[k - self._first][m :: self._workers][start:]
    share = len(self._whole[m])
    before = (k - self._first - len(self._begun)) * share
    return self._whole[m].repeat(_ENDLESS // share)[before + start : before + share]
