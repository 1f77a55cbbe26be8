"""Mixing matrices and the exchanges that carry them out."""

from fgd_jax.mixing.context import Context
from fgd_jax.mixing.exchange import Placement
from fgd_jax.mixing.mixer import Mixer, make
from fgd_jax.mixing.subset import Rule, Subset, embeddings_head_early_layers, path_of
from fgd_jax.mixing.topology import TOPOLOGIES, Topology

__all__ = ["Context", "Mixer", "Placement", "Rule", "Subset", "TOPOLOGIES", "Topology",
           "embeddings_head_early_layers", "make", "path_of"]
