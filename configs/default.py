"""Every key of a run, with its default. Other configs start from `get_config()` here and change what they need.

`--config=configs/default.py:workers=8,method=LocalM1M2` sets keys in one word (`method=NAME` is that method with its own
defaults); `--config.inner.lr=1e-3` sets one key. None means: not set, the default is chosen where the key is used.
"""

from ml_collections import config_dict
from ml_collections.config_dict import placeholder


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
  c = config_dict.ConfigDict()

  c.seed = 0                       # of initialisation, data order, mixing matrices and the workers' rng
  c.rounds = 100                   # outer rounds
  c.inner_steps = 20               # H, optimizer steps a worker takes in a round
  c.workers = 4                    # M
  c.batch_size = 4                 # sequences per worker and optimizer step
  c.accumulate = 1                 # micro-batches an optimizer step; divides batch_size, does not change H
  c.seq_len = 128                  # tokens a sequence
  c.worker_weights = placeholder(str)  # of their (outer) gradients, such as the tokens of their shards: "3;1;1;1"
  c.eval_every = 10                # rounds between evaluations on held-out data (0: only at the end)
  c.eval_batches = 8               # held-out batches an evaluation
  c.eval_batch_size = 8            # sequences in each of them
  c.measure_every = 10             # rounds between measurements of consensus and JS distance (0: never)
  c.measure_sequences = 4          # held-out sequences on which the JS distance is measured
  c.checkpoint_every = 20          # rounds between checkpoints (0: only at the end)
  c.checkpoint_keep = 2            # checkpoints that are kept
  c.cpu_devices = placeholder(int)  # virtual devices of a process on CPU; None: what the mesh needs, with as many positions
                                   # as cores, or one for each process where there are several
  c.allow_cpu = True               # False: stop instead of training on CPU when no accelerator is found

  c.limits = config_dict.ConfigDict()  # seconds that several processes wait for each other before they end with a sentence
  c.limits.start = 300.0           # until all are there, agree and have made their first all-reduce
  c.limits.stall = 7200.0          # for data, a compilation, a round, an evaluation or a save (0: for ever)

  c.init_from = placeholder(str)   # start from this folder of Hugging Face Llama weights (fgd_jax.export); None: fresh

  c.resume = config_dict.ConfigDict()
  c.resume.workers = "mean"        # going on with another number of workers: all start at the mean | the first ones go on

  c.mesh = config_dict.ConfigDict()
  c.mesh.worker = placeholder(int)  # device positions of the workers, as many in each slice; None: as many as fit
  c.mesh.fsdp = 1                  # devices over which a worker's parameters and batch are sharded
  c.mesh.tensor = 1                # times devices of tensor parallelism; both stay inside a slice

  c.overlap = config_dict.ConfigDict()
  c.overlap.form = "auto"          # how Mix1 hides behind the inner steps: auto | packed | barrier | ring | host

  c.profile = placeholder(str)     # rounds of which a jax profiler trace is written to WORKDIR/profile: "5" or "5-7"

  c.faults = config_dict.ConfigDict()  # what a run trains through (fgd_jax.netsim decides what and when)
  c.faults.drop = 0.0              # probability that an exchange fails
  c.faults.drop_unit = "message"   # of what: link (of a worker) | message (a collective, or the swap of a pair) | round
  c.faults.drop_at = "end"         # when a failure is noticed: end | uniform (anywhere in the transfer)
  c.faults.late_mix1 = "skip"      # an overlapped mean that failed and is not there when due: skip | wait
  c.faults.crash_every = 0.0       # mean seconds of computing between crashes of a worker (0: never)
  c.faults.crash_seconds = 0.0     # until it is back
  c.faults.crash_shape = 1.0       # Weibull shape of the time between them (1: Poisson)
  c.faults.on_crash = "proceed"    # the others: proceed without it, until it is back with a neighbour's state | wait
  c.faults.pause_every = 0.0       # mean seconds of computing between pauses of a worker (0: never)
  c.faults.pause_seconds = 0.0     # mean length of a pause
  c.faults.seed = placeholder(int)  # of the faults; None: seed
  c.faults.quarantine = False      # leave out a worker whose loss or state is not finite, and restore it; False: stop

  c.network = config_dict.ConfigDict()  # for simulated_seconds and compute_utilization in metrics.jsonl
  c.network.bandwidth = placeholder(str)  # of each worker: 100Mbps, or a;b;c for each, or a file with a matrix [from, to];
                                          # None: no simulation, with faults 1Gbps
  c.network.step_seconds = placeholder(str)  # of an inner step, or a;b;c for each worker; None: 1
  c.network.latency = 0.0          # seconds for each message
  c.network.jitter = "0"           # coefficient of variation of step times: 0.2, gamma:0.2, uniform:0.1
  c.network.transfer = placeholder(str)  # how means travel: ring | tree | pairwise | server; None: ring

  c.data = config_dict.ConfigDict()
  c.data.source = "text"           # text | array_record (made by fgd_jax.data.tokenize) | tfds | synthetic
  c.data.path = placeholder(str)   # folder; None with source text: the sources of Python's standard library
  c.data.pattern = placeholder(str)  # file patterns, comma separated; None: by source
  c.data.tokenizer = "bytes"       # bytes, or the path of a Hugging Face tokenizer.json
  c.data.text_field = "text"       # field of jsonl, parquet and tfds examples
  c.data.heldout_fraction = 0.05   # of the documents, never trained on
  c.data.max_bytes = placeholder(int)  # read at most this much text
  c.data.tfds_name = placeholder(str)  # name of a prepared array_record data set
  c.data.tfds_split = "train"      # its split
  c.data.tfds_data_dir = placeholder(str)  # where it was prepared
  c.data.vocab_size = 64           # of synthetic data

  c.model = config_dict.ConfigDict()
  c.model.dim = 128                # width
  c.model.layers = 2
  c.model.heads = 4
  c.model.kv_heads = 2             # key/value heads of grouped-query attention
  c.model.ffn_dim = 352            # hidden width of SwiGLU
  c.model.vocab_size = placeholder(int)  # None: the tokenizer's
  c.model.rope_theta = 10000.0     # base of the rotary frequencies
  c.model.norm_eps = 1e-5          # of RMSNorm
  c.model.tied = False             # one matrix for embedding and LM head
  c.model.scan_layers = False      # stack layers and scan over them: constant program size
  c.model.remat = False            # recompute activations in the backward pass
  c.model.attention = "einsum"     # einsum | xla | cudnn (the latter two: jax.nn.dot_product_attention)
  c.model.dtype = "float32"        # of activations: float32 | bfloat16 | float64
  c.model.param_dtype = "float32"  # of parameters and optimizer state

  c.inner = config_dict.ConfigDict()  # AdamW, with state per worker that survives rounds
  c.inner.lr = 3e-3                # peak learning rate
  c.inner.warmup_steps = 50        # linear warm-up, in inner steps
  c.inner.schedule = "cosine"      # cosine (to end_lr_fraction at the last step) | constant
  c.inner.end_lr_fraction = 0.1    # of lr
  c.inner.b1 = 0.9
  c.inner.b2 = 0.95
  c.inner.weight_decay = 0.1       # on kernels and embeddings, chosen by path, so stacked layers decay alike
  c.inner.clip = 1.0               # global norm of a worker's gradient (0: no clipping)

  c.method = config_dict.ConfigDict()  # name and options; options that are None keep the method's default
  c.method.name = "GlobalM1LocalM2"  # see README's table of methods
  c.method.outer_lr = placeholder(float)
  c.method.outer_momentum = placeholder(float)
  c.method.outer_schedule = placeholder(str)  # of outer_lr over outer steps: constant | cosine | linear, "cosine:end=0.1";
                                              # a fragment that is in flight at the end of a round has one step fewer
  c.method.outer_warmup_rounds = placeholder(int)  # linear, to outer_lr
  c.method.outer_clip = placeholder(float)  # greatest norm of the outer gradient
  c.method.codec = placeholder(str)  # none | bf16 | int8 | int4 | e3m0 | topk, with options "e3m0:stochastic=true"
  c.method.error_feedback = placeholder(bool)  # add what the codec lost to the next outer gradient; None: for topk
  c.method.nesterov = placeholder(bool)  # diloco: False is heavy-ball momentum
  c.method.aggregator = placeholder(str)  # diloco, isoloco: mean | iso_c | iso_cts | ties | dare | tsv_m | task_arithmetic |
                                          # rda, with options "ties:drop=0.2"; streaming, pipelined_diloco: mean | iso_c
  c.method.mix1 = placeholder(str)  # fgd: topology of Mix1, "random_groups:group_size=2" with options
  c.method.mix2 = placeholder(str)  # fgd: topology of Mix2
  c.method.subset = placeholder(str)  # fgd: what Mix2 covers: a regular expression, or "embeddings_head_early_layers(2)"
  c.method.mix_outer_state = placeholder(str)  # fgd: none | mix1
  c.method.momentum = placeholder(str)  # fgd: local | recovered
  c.method.retain = placeholder(float)  # fgd with recovered momentum: share of the spread that is kept
  c.method.fragments = placeholder(int)  # streaming_diloco, pipelined_diloco: P, divides inner_steps
  c.method.fragment_patterns = placeholder(str)  # or patterns of paths, "embed;layers_[01];." (the first that matches)
  c.method.order = placeholder(str)  # of fragments: strided | sequential layers, balanced tensors, or flat ranges
  c.method.ends = placeholder(str)  # what is outside the layers: own | joined fragment
  c.method.delay = placeholder(int)  # streaming_diloco: inner steps in flight; eager_diloco: rounds
  c.method.blend = placeholder(float)  # streaming_diloco, pipelined_diloco: weight of the local value on arrival
  c.method.landing = placeholder(str)  # pipelined_diloco: add | blend
  c.method.guess = placeholder(str)  # pipelined_diloco: continue | own
  c.method.group_size = placeholder(int)  # noloco
  c.method.alpha = placeholder(float)  # noloco: momentum; gasloc: strength of the gossip
  c.method.beta = placeholder(float)  # noloco: step along the mean progress
  c.method.gamma = placeholder(float)  # noloco: pull towards the group's mean; gasloc: momentum
  c.method.force = placeholder(bool)  # noloco: accept an unstable gamma
  c.method.topology = placeholder(str)  # gasloc: "random_pairs", "two_random_pairs:weight=0.5", "ring", ...
  c.method.eta = placeholder(float)  # gasloc: step along the outer gradient
  c.method.momentum_mixing = placeholder(str)  # gasloc: local | mixed
  c.method.inner_steps = placeholder(str)  # gasloc: steps of each worker, "20;20;10;5"

  c.learners = 4                   # M of python -m fgd_jax.decoupled, which reads neither rounds, workers, method, overlap,
                                   # measure_* nor profile
  c.quorum = 1                     # K, learners without whose contribution a syncer step does not end
  c.steps = 200                    # syncer steps, each of which merges one fragment

  c.decoupled = config_dict.ConfigDict()
  c.decoupled.policy = "decoupled"  # decoupled | delayed_nesterov | async_mean (the latter two: one fragment, on arrival)
  c.decoupled.fragments = placeholder(int)  # P, divides inner_steps; None: one fragment a step (asynchronous policies: 1)
  c.decoupled.overlap = 2          # tau, inner steps in which a merged fragment should be back; 0: learners wait for it
  c.decoupled.blend = 0.0          # weight of the local value when a merged fragment arrives
  c.decoupled.merge = "rda"        # aggregator of the contributions, as method.aggregator
  c.decoupled.outer_lr = placeholder(float)  # None: 0.7 (async_mean: 1)
  c.decoupled.outer_momentum = placeholder(float)  # None: 0.9
  c.decoupled.codec = placeholder(str)  # of the contributions, as method.codec
  c.decoupled.error_feedback = placeholder(bool)  # as method.error_feedback
  c.decoupled.grace = 0.9          # gamma of the grace window; 0: no window
  c.decoupled.grace_cap = 60.0     # seconds, its greatest length
  c.decoupled.silent_after = 10.0  # seconds without a sign of life after which a learner is not waited for
  c.decoupled.dylu = True          # asynchronous policies: slow learners take fewer inner steps (dynamic local updates)
  c.decoupled.syncers = 1          # syncer actors that share the fragments; divides P
  c.decoupled.pace = 0.0           # seconds that an inner step takes at least (0: as fast as it goes)
  c.decoupled.resources = placeholder(str)  # Ray resources of a learner, "GPU=1" or "TPU=4"; None: one CPU

  c.lock()
  if arg:
    from fgd_jax.config import apply_variant
    apply_variant(c, arg)
  return c
