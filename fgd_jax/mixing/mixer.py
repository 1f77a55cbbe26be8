"""A mixer carries a topology to the devices: start (collectives only), finish (all arithmetic), or both at once.

Between start and finish the round puts its inner steps, and a barrier in front of finish: arithmetic on what was
received, even only its assembly, would end the transfer before the inner steps instead of beside them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType

from fgd_jax.mixing import exchange
from fgd_jax.mixing.codec import Codec, make_codec
from fgd_jax.mixing.context import Context
from fgd_jax.mixing.pack import Packing
from fgd_jax.mixing.stacks import rows, where_rows
from fgd_jax.mixing.subset import path_of
from fgd_jax.mixing.topology import Pattern, Topology, make_topology

PyTree = Any
COUNT = "count of the healthy"  # path of the leaf that counts them


@dataclasses.dataclass(frozen=True)
class Mixer:
  """Averages pytrees over workers as its topology says.

  `start` and `finish` act on a slot's stack (leaves [K, ...]); calling the mixer, inside a method, is the blocking use
  on one worker's tree. `matrix`, `contraction` and `stripe_of` are the topology's. With a codec every worker compresses its
  leaves, and what is mixed, its own included, is what the codec makes of them (`seen`), summed in float32 at least; a mean
  is then an all-gather of the compressed leaves.

  Where `Context.healthy` is given, a sick worker is left out: to a sum it adds zeros and is not counted (the count travels
  as one more number), in all other messages it sends NaN, which is how those who receive them know. A healthy worker keeps
  the weight of sick neighbours itself, so that the mean over the healthy stays; a sick one takes the average of its healthy
  neighbours by their weights, and its own value where it has none.
  """

  topology: Topology
  key: str = "mix"
  codec: Codec | None = None

  def matrix(self, r: int, stripe: int | None = None, alive: Any = None, links: Any = None) -> np.ndarray:
    """See `Topology.matrix`."""
    return self.topology.matrix(r, stripe=stripe, alive=alive, links=links)

  def contraction(self, rounds: int = 1) -> float:
    """See `Topology.contraction`."""
    return self.topology.contraction(rounds)

  def stripe_of(self, path: str) -> int:
    """See `Topology.stripe_of`."""
    return self.topology.stripe_of(path)

  @property
  def varying(self) -> bool:
    """Whether the permutation changes from round to round."""
    return len(self.topology.bank) > 1

  def links(self, ctx: Context) -> jax.Array | None:
    """bool [M, M]: which pairs can exchange in this event, on the diagonal who takes part; None: all."""
    table = None if ctx.links is None else ctx.links.get(self.key)
    return None if table is None else table[ctx.event if table.shape[0] > 1 else 0]

  def alive(self, ctx: Context) -> jax.Array:
    """bool [M]: who takes part in this mixer's exchange."""
    links = self.links(ctx)
    return ctx.alive if links is None else ctx.alive & jnp.diagonal(links)

  def heard(self, ctx: Context) -> jax.Array:
    """Whether what this worker sends, inside a method, is used by others or mixed with its own."""
    alive = self.alive(ctx)[ctx.worker]
    return alive if ctx.healthy is None else alive & ctx.healthy

  def bytes_sent(self, tree: PyTree) -> float:
    """Bytes that one worker sends for `tree` (one worker's shapes): a ring all-reduce 2(M-1)/M S, a message S each.

    With a codec, S is what it makes of the leaves, and a mean is an all-gather, (M-1) S.
    """
    workers = self.topology.workers
    if self.topology.bank[0].mean:
      return (workers - 1) * self._payload_bytes(tree) * (2 / workers if self.codec is None else 1)
    return max(p.messages() for p in self.topology.bank) * self._payload_bytes(tree)

  def _payload_bytes(self, tree: PyTree) -> float:
    """S: bytes of one worker's tree as it travels."""
    nbytes = (lambda x: x.size * x.dtype.itemsize) if self.codec is None else self.codec.nbytes
    return float(sum(map(nbytes, jax.tree.leaves(tree))))

  def seen(self, tree: PyTree, ctx: Context) -> PyTree:
    """What the others get to see of one worker's tree: itself, or what the codec makes of it."""
    if self.codec is None or self.topology.identity:
      return tree
    stack = self._decoded(self._encoded(jax.tree.map(lambda x: x[None], tree), ctx._replace(ids=ctx.worker[None])), tree)
    return jax.tree.map(lambda x: x[0], stack)

  def _encoded(self, stack: PyTree, ctx: Context) -> PyTree:
    """uint8 [K, rows, width] of every leaf."""
    codec = self.codec
    assert codec is not None
    leaves, treedef = jax.tree.flatten(stack)
    if not codec.stochastic:
      return jax.tree.unflatten(treedef, [jax.vmap(codec.encode)(x) for x in leaves])
    keys = jax.vmap(lambda worker: ctx.key(self.topology.seed, worker))(ctx.ids)
    encode = lambda i: jax.vmap(lambda x, key: codec.encode(x, jax.random.fold_in(key, i)))
    return jax.tree.unflatten(treedef, [encode(i)(x, keys) for i, x in enumerate(leaves)])

  def _decoded(self, payload: PyTree, like: PyTree) -> PyTree:
    """Leaves [K, ...] from uint8 [K, rows, width]; `like`: one worker's shapes and dtypes."""
    codec = self.codec
    assert codec is not None
    return jax.tree.map(lambda p, x: jax.vmap(lambda row: codec.decode(row, x))(p), payload, like)

  def start(self, stack: PyTree, ctx: Context) -> list[Any]:
    """Launches the collectives for a stack of leaves [K, ...]; returns the raw received values, one for each buffer."""
    leaves, ctx = self._wire(stack, ctx)
    groups = [[leaves[i] for i in group] for group in self._groups(leaves, ctx)]
    with jax.named_scope(self.key):  # by which fgd_jax.aot tells the mixers' collectives apart
      return [self._launch(self._buffer(group, ctx), self._pattern(self.stripe_of(group[0][0]), ctx), ctx)
              for group in groups]

  def _wire(self, stack: PyTree, ctx: Context) -> tuple[list[tuple[str, jax.Array]], Context]:
    """The leaves as they travel, with paths, and the form in which they do: compressed leaves share a buffer.

    Where sick workers are left out of a sum, one more leaf counts the healthy.
    """
    if ctx.healthy is not None and not self._counts(ctx):
      stack = where_rows(ctx.healthy, stack, jnp.nan)
    if self.codec is not None:
      return _leaves(self._encoded(stack, ctx)), ctx._replace(packing=_packing_here(), ring=None)
    leaves = _leaves(stack)
    if self._counts(ctx):
      dtype = jnp.promote_types(leaves[0][1].dtype, jnp.float32)
      leaves.append((COUNT, jnp.ones((leaves[0][1].shape[0], 1), dtype)))
    return leaves, ctx

  def _counts(self, ctx: Context) -> bool:
    """Whether the healthy workers are counted by the exchange itself."""
    return ctx.healthy is not None and self.topology.bank[0].mean and self.codec is None

  def _buffer(self, group: list[tuple[str, jax.Array]], ctx: Context) -> jax.Array:
    """What travels for these leaves."""
    if self.topology.bank[0].mean:
      takes = self.alive(ctx)[ctx.ids]
      takes = takes & ctx.healthy if self._counts(ctx) else takes
      group = [(path, where_rows(takes, x, 0)) for path, x in group]
      if ctx.ring is not None:
        assert ctx.packing is not None
        return ctx.packing.pack([(path, x[0]) for path, x in group], lead=0, pieces=ctx.ring.pieces)
    return group[0][1] if len(group) == 1 or ctx.packing is None else ctx.packing.pack(group, lead=1)

  def _launch(self, buffer: jax.Array, pattern: Pattern, ctx: Context) -> Any:
    if pattern.mean and self.codec is not None:
      return exchange.gather_workers(buffer, ctx.placement)
    if pattern.mean:
      return buffer if ctx.ring is not None else exchange.sum_over_workers(buffer, ctx.placement)
    return [exchange.permute_start(buffer, source, ctx.placement, ctx.ids) for _, source in pattern.terms]

  def during(self, raw: list[Any], h: Any, ctx: Context) -> list[Any]:
    """What inner step h carries of an exchange that `start` prepared: hops of the ring form, else nothing."""
    if ctx.ring is None:
      return raw
    with jax.named_scope(self.key):
      return ctx.ring.during(raw, h)

  def finish(self, raw: list[Any], stack: PyTree, ctx: Context) -> PyTree:
    """The mixed stack, leaves [K, ...], from what `start` received and the workers' own values."""
    leaves, ctx = self._wire(stack, ctx)
    patterns = [self._pattern(self.stripe_of(leaves[group[0]][0]), ctx) for group in self._groups(leaves, ctx)]
    return self._mixed([self._assembled(got, p, ctx) for got, p in zip(raw, patterns)], patterns, stack, leaves, ctx)

  def _assembled(self, got: Any, pattern: Pattern, ctx: Context) -> list[jax.Array]:
    """What was received for a buffer: the sum, or a stack [K, ...] for each term."""
    if pattern.mean:
      return [got]
    return [exchange.permute_finish(block, source, ctx.placement, ctx.ids)
            for (_, source), block in zip(pattern.terms, got)]

  def _mixed(self, received: list[list[jax.Array]], patterns: list[Pattern], stack: PyTree,
             wires: list[tuple[str, jax.Array]], ctx: Context, whole: bool = False) -> PyTree:
    """The arithmetic behind an exchange, leaf by leaf.

    A buffer of several leaves that was received in several messages is mixed as it is and unpacked once, so that the
    program does not grow with leaves times messages; that takes room for one buffer more. `whole`: one message as well.
    """
    leaves, treedef = jax.tree.flatten(stack)
    mixed: dict[int, jax.Array] = {}
    parts: dict[int, tuple[list[jax.Array], Pattern]] = {}
    for group, buffers, pattern in zip(self._groups(wires, ctx), received, patterns):
      like = [wires[i] for i in group]
      if len(pattern.terms) > (0 if whole else 1) and ctx.packing is not None and len(group) > 1 and self.codec is None:
        own = ctx.packing.pack([(wires[i][0], leaves[i]) for i in group], lead=1)
        out = ctx.packing.unpack(self._mixed_leaf(buffers, own, own, pattern, ctx, None), like, lead=1)
        mixed.update(zip(group, out))
      else:
        unpacked = [self._unpacked(buffer, like, pattern, ctx) for buffer in buffers]
        parts.update({i: ([got[k] for got in unpacked], pattern) for k, i in enumerate(group)})
    count = parts[len(wires) - 1][0][0][0] if self._counts(ctx) else None
    mixed.update({i: self._mixed_leaf(got, leaves[i], wires[i][1], pattern, ctx, count)
                  for i, (got, pattern) in parts.items() if i < len(leaves)})
    return jax.tree.unflatten(treedef, [mixed[i] for i in range(len(leaves))])

  def _groups(self, leaves: list[tuple[str, Any]], ctx: Context) -> list[list[int]]:
    """Indices of the leaves that travel in one buffer: where they are packed, those of one stripe and dtype."""
    groups: dict[Any, list[int]] = {}
    for i, (path, x) in enumerate(leaves):
      groups.setdefault(i if ctx.packing is None else (self.stripe_of(path), str(x.dtype)), []).append(i)
    return list(groups.values())

  def _unpacked(self, buffer: jax.Array, like: list[tuple[str, jax.Array]], pattern: Pattern, ctx: Context
                ) -> list[jax.Array]:
    """A received buffer, leaf by leaf."""
    if ctx.packing is None or (len(like) == 1 and not (pattern.mean and ctx.ring)):
      return [buffer]
    return ctx.packing.unpack(buffer, like, lead=0 if pattern.mean and self.codec is None else 1)

  def _mixed_leaf(self, received: list[jax.Array], x: jax.Array, wire: jax.Array, pattern: Pattern, ctx: Context,
                  count: jax.Array | None) -> jax.Array:
    """One leaf [K, ...] after the exchange: x, from what was received and, with a codec, from what it sent itself."""
    alive = self.alive(ctx)
    own, here = x, rows(alive[ctx.ids], x)
    if self.codec is not None:
      like = jax.ShapeDtypeStruct(x.shape[1:], jnp.promote_types(x.dtype, jnp.float32))
      own = jnp.where(here if ctx.healthy is None else here & rows(ctx.healthy, x), self._decoded(wire, like), x)
      if pattern.mean:
        total, count = self._decoded_sum(received[0], like, alive, ctx)
        received = [total]
      else:
        received = [self._decoded(got, like) for got in received]
    if pattern.mean:
      count = jnp.sum(alive) if count is None else count
      mean = received[0] / jnp.maximum(count, 1).astype(received[0].dtype)
      mean = mean if not pattern.keep else pattern.keep * own + (1 - pattern.keep) * mean
      return jnp.where(here & (count > 0), mean.astype(x.dtype), x)
    if not pattern.terms:
      return x
    wide = jnp.promote_types(x.dtype, jnp.float32)  # weights such as 1/3 rounded to bfloat16 would move the mean
    by_row = lambda weight: rows(jnp.asarray(np.asarray(weight, np.float64))[ctx.ids], x).astype(wide)
    weights = [by_row(weight) if isinstance(weight, tuple) else weight for weight, _ in pattern.terms]
    terms = []
    for weight, (_, source), other in zip(weights, pattern.terms, received):
      active = rows(self._active(source, alive, ctx)[ctx.ids], x)
      if ctx.healthy is not None:
        active = active & jnp.isfinite(other).all(axis=tuple(range(1, x.ndim)), keepdims=True)
      terms.append((weight, active, other))
    mixed = own.astype(wide) * (1 - sum(weights))
    for weight, active, other in terms:
      mixed = mixed + weight * jnp.where(active, other, own).astype(wide)
    if ctx.healthy is not None:
      total = jnp.zeros((), wide) + sum(weight * active.astype(wide) for weight, active, _ in terms)
      others = sum(weight * jnp.where(active, other, 0).astype(wide) for weight, active, other in terms)
      restored = jnp.where(total > 0, others / jnp.where(total > 0, total, 1), x.astype(wide))
      mixed = jnp.where(rows(ctx.healthy, x), mixed, restored)
    return mixed.astype(x.dtype)

  def _active(self, source: Any, alive: jax.Array, ctx: Context) -> jax.Array:
    """bool [M]: who uses what it receives from source[m]; one-sided it would move the mean, so directed ones drop whole."""
    links, source = self.links(ctx), jnp.asarray(source)
    active = alive & alive[source]
    if links is not None:
      active = active & links[jnp.arange(ctx.workers), source]
    return active if self.topology.symmetric else jnp.broadcast_to(jnp.all(active), active.shape)

  def _decoded_sum(self, payload: jax.Array, like: jax.ShapeDtypeStruct, alive: jax.Array, ctx: Context
                   ) -> tuple[jax.Array, jax.Array]:
    """The sum over workers, in their order on every worker, of uint8 [M, rows, width], and how many are in it."""
    def add(carry, row):
      total, count = carry
      payload, alive = row
      value = self.codec.decode(payload, like)  # type: ignore[union-attr]
      if ctx.healthy is not None:
        alive = alive & jnp.isfinite(value).all()
        value = jnp.where(alive, value, 0)
      return (total + value, count + alive), None

    start = jnp.zeros(like.shape, like.dtype), jnp.int32(0)
    return lax.scan(add, start, (payload, alive))[0]

  def __call__(self, tree: PyTree, ctx: Context) -> PyTree:
    """The blocking exchange of one worker's tree, for use inside a method."""
    if ctx.sent is not None:
      ctx.sent.append(self.bytes_sent(tree))
      return tree
    if self.topology.identity:
      return tree
    return self._over_slots(self._mix_stack, lambda x: x, tree, ctx)

  def gather(self, tree: PyTree, ctx: Context) -> PyTree:
    """All workers' trees on every worker, blocking: leaves [M, ...]; zeros for those that are not alive, NaN for the sick.

    Bytes: M - 1 messages, each what the codec makes of the tree.
    """
    workers = self.topology.workers
    everyone = lambda x: jnp.broadcast_to(x, (workers, *x.shape))
    if ctx.sent is not None:
      ctx.sent.append((workers - 1) * self._payload_bytes(tree))
      return jax.tree.map(everyone, tree)
    return self._over_slots(self._gather_stack, everyone, tree, ctx, same=True)

  def _over_slots(self, exchange_stack: Callable, like: Callable, tree: PyTree, ctx: Context, same: bool = False) -> PyTree:
    """An exchange of this slot's stack, called by each of its workers under vmap.

    Args:
      exchange_stack: (stack with leaves [K, ...], ctx) -> stack of the workers' results.
      like: leaf -> an array of a worker's result's shape.
      tree: one worker's.
      ctx: the context.
      same: all workers get the same result, and exchange_stack returns it once.
    """
    own = (tree, ctx.healthy)
    if ctx.placement.slots == 1:
      stack, healthy = jax.tree.map(lambda x: x[None], own)
      out = exchange_stack(stack, ctx._replace(healthy=healthy))
      return out if same else jax.tree.map(lambda x: x[0], out)

    @custom_vmap
    def run(own, shared):
      return jax.tree.map(like, own[0])  # for its shapes: with several workers in a slot, methods always run under vmap

    @run.def_vmap
    def _(slots, batched, own, shared):
      stack, healthy = jax.tree.map(lambda x, b: x if b else jnp.broadcast_to(x, (slots, *x.shape)), own, batched[0])
      out = exchange_stack(stack, ctx._replace(healthy=healthy, **shared))
      return out, jax.tree.map(lambda _: not same, own[0])

    # Traced values are handed in; the rest of the context is the same for all.
    shared = {"ids": ctx.ids, "alive": ctx.alive, "choices": dict(ctx.choices), "round": ctx.round, "event": ctx.event,
              "links": None if ctx.links is None else dict(ctx.links)}
    return run(own, shared)

  def _gather_stack(self, stack: PyTree, ctx: Context) -> PyTree:
    stack = where_rows(ctx.alive[ctx.ids], stack, 0)
    if ctx.healthy is not None:
      stack = where_rows(ctx.healthy, stack, jnp.nan)
    plain = self.codec is None or self.topology.identity
    wire = stack if plain else self._encoded(stack, ctx)
    with jax.named_scope(self.key):
      everyone = jax.tree.map(lambda x: exchange.gather_workers(x, ctx.placement), wire)
    if plain:
      return everyone
    return self._decoded(everyone, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stack))

  def _mix_stack(self, stack: PyTree, ctx: Context) -> PyTree:
    choice = ctx.choices.get(self.key, 0)
    ctx = ctx._replace(packing=None, ring=None)
    if isinstance(choice, int) or not self.varying or ctx.placement.devices == 1:
      if len(self.topology.bank[0].terms) > 1 and ctx.placement.devices > 1:  # or leaves times terms would travel
        ctx = ctx._replace(packing=_packing_here())
      return self.finish(self.start(stack, ctx), stack, ctx)
    # One branch a pattern, each with a transfer for each buffer and nothing else, so that programs grow little with the
    # bank: leaves share buffers, and the arithmetic stands once, behind the switch.
    leaves, ctx = self._wire(stack, ctx._replace(packing=_packing_here()))
    groups = [[leaves[i] for i in group] for group in self._groups(leaves, ctx)]
    stripes = [self.stripe_of(group[0][0]) for group in groups]
    buffers = [self._buffer(group, ctx) for group in groups]

    def branch(i: int) -> list[list[jax.Array]]:
      fixed = ctx._replace(choices={**ctx.choices, self.key: i})
      patterns = [self._pattern(stripe, fixed) for stripe in stripes]
      with jax.named_scope(self.key):
        raw = [self._launch(buffer, pattern, fixed) for buffer, pattern in zip(buffers, patterns)]
      return [self._assembled(got, pattern, fixed) for got, pattern in zip(raw, patterns)]

    received = lax.switch(choice, [lambda i=i: branch(i) for i in range(len(self.topology.bank))])
    return self._mixed(received, [self._traced(choice + stripe) for stripe in stripes], stack, leaves, ctx, whole=True)

  def _pattern(self, stripe: int, ctx: Context) -> Pattern:
    """The pattern of this stripe in this round; on one position its sources may be traced (a gather, not a switch)."""
    bank, choice = self.topology.bank, ctx.choices.get(self.key, 0)
    if len(bank) == 1:
      return bank[0]
    index = (choice + stripe) % len(bank)
    if isinstance(index, int):
      return bank[index]
    if ctx.placement.devices > 1:
      raise ValueError(f"{self.key}: a permutation chosen at run time cannot be launched ahead on a mesh.")
    return self._traced(index)

  def _traced(self, index: Any) -> Pattern:
    """The pattern with this number (modulo the bank's length), known at run time; all have the first one's weights."""
    bank = self.topology.bank
    sources = np.asarray([[source for _, source in p.terms] for p in bank])  # [bank, terms, M]
    row = jnp.asarray(sources)[index % len(bank)]
    return Pattern(tuple((weight, row[k]) for k, (weight, _) in enumerate(bank[0].terms)))


def _packing_here() -> Packing | None:
  """All leaves of a dtype in one buffer, except where XLA shards them (fsdp): packing would gather them first."""
  mesh = jax.sharding.get_abstract_mesh()
  sharded = any(kind != AxisType.Manual and mesh.shape[name] > 1 for name, kind in zip(mesh.axis_names, mesh.axis_types))
  return None if sharded else Packing({}, {})


def _leaves(stack: PyTree) -> list[tuple[str, jax.Array]]:
  return [(path_of(path), x) for path, x in jax.tree_util.tree_flatten_with_path(stack)[0]]


def make(name: str | tuple[str, Mapping[str, Any]], *, workers: int, seed: int = 0, key: str = "mix",
         codec: Any = None, **options: Any) -> Mixer:
  """A mixer over `workers` workers.

  Args:
    name: name of a topology, or (name, options).
    workers: M.
    seed: of the random topologies; the draw of round r is a pure function of (seed, r).
    key: the mixer's place in a method ("mix1", "mix2").
    codec: how leaves are compressed on the wire (`fgd_jax.mixing.codec`): a name, (name, options) or None.
    **options: of the topology (`group_size` for random_groups).

  Raises:
    ValueError: unknown topology or option, or an impossible number of workers.
  """
  if not isinstance(name, str):
    try:
      name, given = name
      options = {**given, **options}
    except (TypeError, ValueError) as e:
      raise ValueError(f"Topology {name!r} must be a name or (name, options).") from e
  mixer = Mixer(make_topology(name, workers, seed, **options), key, make_codec(codec))
  if mixer.codec is not None and mixer.topology.bank[0].mean:
    model = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    coded, plain = mixer.bytes_sent(model), dataclasses.replace(mixer, codec=None).bytes_sent(model)
    if coded > plain:
      warnings.warn(f"codec={mixer.codec.name!r}: a mean over {workers} workers is an all-gather of what each compressed, "
                    f"{coded / plain:.1f} times the bytes of an all-reduce without codec; use a narrower codec or none.",
                    stacklevel=2)
  return mixer
