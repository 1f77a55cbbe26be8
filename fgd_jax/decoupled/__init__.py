"""Decoupled DiLoCo (arXiv 2604.21428): learners that never wait, and a syncer that merges what they send, on Ray.

The algorithm knows nothing of Ray, clocks or threads: `syncer.SyncerCore` and `learner.LearnerCore` are deterministic given
the order of their messages, which the syncer writes down as a tape (`store`) that can be replayed (`replay`). `actors` are
their thin shells on Ray, `run` is a run from start to end, `python -m fgd_jax.decoupled` the command. docs/decoupled.md has
the whole story.
"""
