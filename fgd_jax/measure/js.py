"""How far the workers are apart in what they predict: the Jensen-Shannon distance of their token distributions.

Reconstructed: FGD (arXiv 2606.22768) reports a JS distance between workers' per-token output distributions; its exact
formula is unknown (SUM: known from summaries), this one is ours (INF: inferred).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def js_divergence(logits_a: jax.Array, logits_b: jax.Array) -> jax.Array:
  """JSD of the distributions of two logits, over the last axis, in nats.

  Args:
    logits_a, logits_b: [..., V].

  Returns:
    [...], 0 for equal distributions, at most ln 2; exactly symmetric.
  """
  log_a, log_b = jax.nn.log_softmax(logits_a), jax.nn.log_softmax(logits_b)

  def log_mid_over(ratio):  # log(mid / p) from log(q / p); exactly 0 where p = q, and no overflow
    return jnp.maximum(ratio, 0) + jnp.log1p(jnp.expm1(-jnp.abs(ratio)) / 2)

  def kl_to_mid(log_p, log_q):
    return jnp.sum(jnp.where(log_p > -jnp.inf, -jnp.exp(log_p) * log_mid_over(log_q - log_p), 0), axis=-1)

  return jnp.clip(0.5 * (kl_to_mid(log_a, log_b) + kl_to_mid(log_b, log_a)), 0, math.log(2))


def js_distance(logits_a: jax.Array, logits_b: jax.Array) -> jax.Array:
  """Mean over positions of sqrt(JSD / ln 2): a metric, in [0, 1].

  Args:
    logits_a, logits_b: [..., V] of the same tokens.
  """
  return jnp.mean(jnp.sqrt(js_divergence(logits_a, logits_b) / math.log(2)))


def pairwise_js(logits: jax.Array) -> dict[str, jax.Array]:
  """JS distance and divergence averaged over all pairs of different workers, and the M-way divergence.

  Args:
    logits: [M, ..., V], the workers' logits of the same tokens.

  Returns:
    `js_distance` (mean over pairs and positions of sqrt(JSD / ln 2)), `js_divergence` (mean JSD, nats) and
    `js_generalised` (H(mean distribution) - mean entropy, nats, at most ln M); all 0 for M = 1.
  """
  workers = logits.shape[0]
  if workers == 1:
    return {name: jnp.zeros(()) for name in ("js_distance", "js_divergence", "js_generalised")}
  a, b = jnp.triu_indices(workers, 1)

  def pair(ab):
    divergence = js_divergence(logits[ab[0]], logits[ab[1]])
    return jnp.mean(jnp.sqrt(divergence / math.log(2))), jnp.mean(divergence)

  distance, divergence = jax.lax.map(pair, (a, b))  # one pair at a time: [positions, V] in memory, not [pairs, ...]
  log_p = jax.nn.log_softmax(logits)
  log_mean = jax.nn.logsumexp(log_p, axis=0) - math.log(workers)
  entropy = lambda log_q: -jnp.sum(jnp.where(log_q > -jnp.inf, jnp.exp(log_q) * log_q, 0), axis=-1)
  generalised = jnp.mean(entropy(log_mean) - jnp.mean(entropy(log_p), axis=0))
  return {"js_distance": jnp.mean(distance), "js_divergence": jnp.mean(divergence), "js_generalised": generalised}
