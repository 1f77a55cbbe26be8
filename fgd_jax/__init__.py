"""Low-communication pre-training in JAX: Factored Gossip DiLoCo and the systems around it."""

from fgd_jax import measure, methods, mixing
from fgd_jax.round import Round, build_round
from fgd_jax.state import State, mean_params
from fgd_jax.workers import Workers

__version__ = "0.1.0"

__all__ = ["Round", "State", "Workers", "build_round", "mean_params", "measure", "methods", "mixing"]
