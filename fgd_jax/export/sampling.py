"""Text from a model, token by token. For a look: every token is a whole forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def continue_tokens(apply: Callable[[Any, jax.Array], jax.Array], params: Any, prompt: Sequence[int], count: int,
                    context: int, temperature: float = 1.0, top_k: int = 0, seed: int = 0) -> Iterator[int]:
  """Continues `prompt` by `count` tokens.

  Args:
    apply: (params, tokens int32 [1, L]) -> logits [1, L, V] of a causal model.
    params: its parameters.
    prompt: at least one token.
    count: tokens to come.
    context: L, the tokens that the model sees at once; older ones are forgotten.
    temperature: 0 takes the likeliest token, 1 the model's own probabilities.
    top_k: choose among so many of the likeliest tokens; 0: all.
    seed: of the draws; token i depends on (seed, i) and what came before.

  Raises:
    ValueError: a bad argument.
  """
  if not len(prompt):
    raise ValueError("The prompt has no token; give at least one, such as the token between documents.")
  for name, value in (("tokens", count), ("temperature", temperature), ("top_k", top_k), ("seed", seed)):
    if not 0 <= value < float("inf"):
      raise ValueError(f"{name}={value} must be a number of at least 0.")

  @jax.jit
  def draw(params, window_L, last, key):
    logits_V = apply(params, window_L[None])[0, last].astype(jnp.float32)
    if top_k:
      logits_V = jnp.where(logits_V >= jax.lax.top_k(logits_V, min(top_k, logits_V.size))[0][-1], logits_V, -jnp.inf)
    if not temperature:
      return jnp.argmax(logits_V)
    return jax.random.categorical(key, logits_V / temperature)

  tokens, key = [int(t) for t in prompt], jax.random.key(seed)
  params = jax.tree.map(jnp.asarray, params)
  for i in range(count):
    seen = tokens[-context:]
    window_L = np.zeros(context, np.int32)  # what stands after the last token is not seen
    window_L[: len(seen)] = seen
    tokens.append(int(draw(params, window_L, len(seen) - 1, jax.random.fold_in(key, i))))
    yield tokens[-1]
