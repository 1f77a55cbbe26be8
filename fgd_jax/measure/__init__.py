"""Measures of disagreement between workers: pure functions of stacked arrays [M, ...]."""

from fgd_jax.measure.consensus import by_block, consensus_distances, pairwise_squared_distance
from fgd_jax.measure.js import js_distance, js_divergence, pairwise_js
from fgd_jax.measure.sensitivity import js_when_shared

__all__ = ["by_block", "consensus_distances", "js_distance", "js_divergence", "js_when_shared", "pairwise_js",
           "pairwise_squared_distance"]
