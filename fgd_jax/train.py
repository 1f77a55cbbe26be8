"""Trains a language model: config -> mesh -> state -> rounds, with evaluation, measurement, checkpoints and logs.

    python -m fgd_jax.train --config=configs/quickstart.py --workdir=runs/quickstart [--config.rounds=300]

Started again with the same command, a run that was stopped anywhere goes on where its last checkpoint was, bit for bit;
with another mesh or number of workers it goes on as docs/resume.md says. Several processes (launch/README.md) train one run
together: each reads its own workers' data, all write checkpoints, and the first one logs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict, config_flags

import fgd_jax as fgd
from fgd_jax import aot, command, data, distributed, export, faults, measure, models, resize
from fgd_jax import config as configs
from fgd_jax.checkpoint import Checkpoints, Progress
from fgd_jax.folder import LOCK_FILE, claimed, recognise_run, what_next, write_config, write_json
from fgd_jax.mixing.stacks import finite_rows
from fgd_jax.quarantine import CAUSES, NonFiniteError
from fgd_jax.report import curves
from fgd_jax.runlog import NoLog, RunLog, read_lines, show_own_logs
from fgd_jax.state import State, checksum

PyTree = Any
LOST_PEER = 4  # exit status: launch/common.sh looks for the process that died, not for those that lost it
ADVICE = ("Nothing was saved over earlier checkpoints. Try a lower inner.lr or method.outer_lr in a new --workdir, or look "
          "at that worker's data.")


class PreemptedError(RuntimeError):
  """A process was told to stop (SIGTERM, Ctrl-C); the state is saved."""


def train(config: ConfigDict, workdir: str) -> dict[str, Any]:
  """Runs `config` in the folder `workdir` to its last round, resuming what is there; returns the summary.

  Raises:
    ValueError, FileNotFoundError: what cannot work, in one sentence, before the first round.
    NonFiniteError: a non-finite loss or state, naming worker and step; nothing is saved over the last good checkpoint.
    PeerError: another process of the run stopped or did not come.
    PreemptedError: after a save, where a process of the run was told to stop and heeds that (`distributed.heed_signals`,
      as the command does).
  """
  configs.validate(config)
  distributed.start(configs.flat(config), config.limits.start)
  with contextlib.ExitStack() as stack:
    distributed.by_leader("claiming the run's folder", lambda: stack.enter_context(claimed(workdir)), config.limits.start)
    distributed.shared_file(os.path.join(workdir, LOCK_FILE), config.limits.start)
    watch = stack.enter_context(distributed.Watch(config.limits.stall if distributed.count() > 1 else 0))
    return _train(config, workdir, watch)


def _train(config: ConfigDict, workdir: str, watch: distributed.Watch) -> dict[str, Any]:
  limit = config.limits.start
  summary = distributed.by_leader("looking at the run's folder", lambda: recognise_run(config, workdir), limit)
  if summary is not None:
    logging.info("The run in %s is finished (%d rounds, held-out loss %.4f); nothing to do. For more rounds see "
                 "docs/resume.md.", workdir, summary["rounds"], summary["eval_loss"])
    return summary

  # --- data, model, method -------------------------------------------------------------------------------------------
  configs.set_cpu_devices(config, distributed.count())
  distributed.together("the devices", distributed.refuse_silent_cpu, limit)
  workers = configs.make_workers(config)
  distributed.preflight(workers.mesh, limit)
  corpus = distributed.together(
      "the training data", lambda: data.load(config.data, config.seq_len, config.seed), config.limits.stall or 1e6,
      same=lambda c: {"sequences": len(c.train), "held out": len(c.heldout), "unigram loss": repr(c.unigram_loss)})
  data.round_batches(corpus.train, config.workers, config.inner_steps, config.batch_size, config.seed)  # or refuses
  heldout = data.heldout_batches(corpus.heldout, config.eval_batch_size, config.eval_batches)["tokens"]
  model = models.make(configs.make_model_config(config, corpus.vocab_size))
  probe = jnp.asarray(heldout.reshape(-1, heldout.shape[-1])[:config.measure_sequences, :-1])
  measures = (consensus_by_block, js_of(model.apply, probe)) if config.measure_every else ()
  init, round_fn = configs.build_round(config, model.loss, workers, measures)

  # --- state: fresh, or the newest checkpoint ------------------------------------------------------------------------
  params_shape = jax.eval_shape(model.init, jax.random.key(config.seed))
  watch.at("The checkpoints were not opened and restored")
  checkpoints = Checkpoints(os.path.join(workdir, "checkpoints"), config.checkpoint_keep, config)
  distributed.together("the newest checkpoint", checkpoints.latest, limit, same=lambda latest: {"round": latest})
  found = checkpoints.found()
  if found is None:
    state = init(distributed.together(
        "the first parameters", lambda: export.first_params(config, model), limit,
        same=lambda params: {"init_from": config.init_from and checksum(params)}))
    iterator = read_rounds(config, corpus, checkpoints.progress, workers.local)
  elif found[0].workers == config.workers:
    checkpoints.progress = found[1]
    iterator = read_rounds(config, corpus, checkpoints.progress, workers.local)
    state = checkpoints.restore(round_fn.abstract_state(params_shape), iterator)
    logging.info("Resuming at round %d of %d.", state.round, config.rounds)
  else:
    state = restore_other_workers(config, found[0], checkpoints, round_fn, model, params_shape, workers)
    checkpoints.progress = found[1].changed(int(state.round), config)
    iterator = read_rounds(config, corpus, checkpoints.progress, workers.local)
  if distributed.leader():
    write_config(config, workdir)
  shapes = {"tokens": jax.ShapeDtypeStruct((config.workers, config.inner_steps, config.batch_size, config.seq_len + 1),
                                           jnp.int32)}
  troubles = None
  if configs.simulated(config):
    logging.info("Simulating %d rounds at %s for each worker and %s s an inner step ...", config.rounds,
                 config.network.bandwidth or "1Gbps", config.network.step_seconds or "1")
    troubles = faults.simulate(config, round_fn, state.params, shapes)
  start = int(state.round)
  steps_RxM = taken_steps(config, troubles)
  tokens = tokens_after(config, checkpoints.progress, steps_RxM)
  logging.info("%s parameters, %s, method %s, %d rounds of %s tokens on %s (%s).",
               f"{models.count_params(params_shape):,}", workers, config.method.name, config.rounds,
               f"{tokens[-1] / config.rounds:,.0f}", workers.platform, f"unigram loss {corpus.unigram_loss:.3f}")
  if troubles is not None:
    logging.info("Simulated: %s", troubles.describe())

  # --- compile, once -------------------------------------------------------------------------------------------------
  plan = round_fn.plan(shapes)
  logging.info("Overlap form %s, XLA options %s.", plan.form, plan.options or "none")
  if plan.warning:
    logging.warning("%s", plan.warning)
  logging.info("Compiling (half a minute or more on two cores) ...")
  began = time.time()
  watch.at("Compiling and the first evaluation did not end")
  executables = round_fn.compile(state, shapes, measured=(False, True) if config.measure_every else (False,))
  evaluate = make_evaluation(model.loss, heldout, workers)
  before = evaluate(round_fn.eval_params(state), state.params)
  all_finite = jax.jit(lambda state: finite_rows(state[:3]), out_shardings=workers.replicated())
  logging.info("Compiled %d executable(s) for the rounds in %.1f s; held-out loss is %.3f now.", len(executables),
               time.time() - began, before["eval_loss"])
  if workers.platform != "cpu" and plan.form != "none" and distributed.leader():
    report_overlap(executables, workers, round_fn.method, config.inner_steps)

  log = RunLog(workdir, start, (tokens[start], tokens[-1])) if distributed.leader() else NoLog()
  if found is not None and found[0].workers != config.workers:
    log.events([{"round": start + 1, "step": start * config.inner_steps, "event": "workers", "before": found[0].workers,
                 "now": config.workers, "cause": f"resume.workers={config.resume.workers}"}])

  # --- rounds. Order matters: save before the iterator advances, read a round's metrics after the next is dispatched -
  pending: dict[str, Any] | None = None
  profile = Profile(configs.profiled_rounds(config), os.path.join(workdir, "profile"))
  try:
    while int(state.round) < config.rounds:
      done = int(state.round)
      watch.at(f"Round {done} did not end")
      profile.at(done + 1, state)
      stop = distributed.preempted(done)
      if done > start and (stop or config.checkpoint_every and done % config.checkpoint_every == 0):
        flush(pending, log, config)
        pending = None
        refuse_non_finite(all_finite(state), done * config.inner_steps)
        checkpoints.save(state, iterator, tokens[done])
      if stop:
        raise PreemptedError(f"Told to stop ({distributed.SIGNALS[distributed.stopped_by()]}) after round {done}.")
      batches = round_fn.from_local(next(iterator))
      measured = due(done + 1, config.measure_every, config.rounds)
      alive = links = None
      if troubles is not None and configs.faulty(config):
        alive, links = troubles.alive[done], troubles.links(done)
        for worker, donor in troubles.rejoining(done):
          state = round_fn.rejoin(state, worker, donor)
      with jax.profiler.StepTraceAnnotation("round", step_num=done + 1):
        state, metrics = round_fn(state, batches, alive=alive, measured=measured, links=links)
      if due(done + 1, config.eval_every, config.rounds) or done + 1 == config.rounds:
        metrics |= evaluate(round_fn.eval_params(state, alive), state.params, alive)
      metrics = workers.everywhere(metrics)
      record = {"round": done + 1, "step": (done + 1) * config.inner_steps, "tokens": tokens[done + 1]}
      if troubles is not None:
        record |= troubles.record(done)
      previous, pending = pending, {
          "record": record, "metrics": metrics, "tokens": tokens[done + 1] - tokens[done], "taken": steps_RxM[done],
          "events": [] if troubles is None else troubles.events(done, config.inner_steps)}
      flush(previous, log, config)
    flush(pending, log, config)
    profile.at(config.rounds + 1, state)
    refuse_non_finite(all_finite(state), config.rounds * config.inner_steps)
    checkpoints.save(state, iterator, tokens[-1])
  finally:
    profile.close()
    log.close()
    checkpoints.close()

  # --- summary -------------------------------------------------------------------------------------------------------
  facts = {"parameters": models.count_params(params_shape), "unigram_loss": corpus.unigram_loss,
           "train_tokens_available": corpus.train_tokens, "placement": repr(workers), "processes": distributed.count()}
  summary = distributed.by_leader("the summary", lambda: summarise(config, workdir, facts), limit)
  logging.info("Done: held-out loss %.4f (unigram %.4f). Figures in %s, plot in %s.", summary["eval_loss"],
               summary["unigram_loss"], os.path.join(workdir, "summary.json"), os.path.join(workdir, curves.FILE_NAME))
  return summary


def due(rounds: int, every: int, last: int) -> bool:
  """Whether something done every `every` rounds (0: never) is done after `rounds` rounds; the last round counts."""
  return bool(every) and (rounds % every == 0 or rounds == last)


def read_rounds(config: ConfigDict, corpus: data.Corpus, progress: Progress, local: Sequence[int]
                ) -> Iterator[dict[str, np.ndarray]]:
  """The batches of `local` workers in the rounds since the number of workers changed; its position is in checkpoints."""
  rounds = data.round_batches(corpus.train, config.workers, config.inner_steps, config.batch_size, config.seed,
                              progress.earlier, local)
  return iter(rounds.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def restore_other_workers(config: ConfigDict, saved: ConfigDict, checkpoints: Checkpoints, round_fn: fgd.Round,
                          model: models.Model, params_shape: PyTree, workers: fgd.Workers) -> State:
  """The newest checkpoint, of the number of workers in `saved`, as the state of the workers of `config`."""
  _, as_saved = configs.build_round(saved, model.loss, fgd.Workers(saved.workers), overlap="auto")
  state = checkpoints.restore(resize.spread(as_saved.abstract_state(params_shape), workers))
  state, fresh = resize.resize(state, round_fn, config.resume.workers)
  logging.warning("Resuming at round %d of %d with workers=%d in place of %d (resume.workers=%s: %s); data are dealt anew, "
                  "and no sequence is read twice in a pass.", state.round, config.rounds, config.workers, saved.workers,
                  config.resume.workers, resize.describe(config.resume.workers, saved.workers, config.workers))
  if fresh:
    logging.warning("Parts of the method's state that the checkpoint lacks start afresh at the mean parameters: %s.",
                    ", ".join(fresh[:5]) + (", ..." if len(fresh) > 5 else ""))
  if config.method.name == "local":
    logging.warning("Workers of method local never agreed, so their mean is a model that nobody trained; "
                    "resume.workers=first keeps single models when workers leave.")
  return state


def report_overlap(executables: dict[Any, Any], workers: fgd.Workers, method: fgd.methods.Method, steps: int) -> None:
  """Logs what the compiler made of Mix1, and warns where it is not beside the inner steps."""
  try:
    schedules = [aot.read_round(run.as_text(), workers, method, steps) for (measured, _), run in executables.items()
                 if not measured]
  except Exception as e:  # the text is the compiler's own and changes with its version; training does not depend on it
    logging.warning("The compiled schedule could not be read (%s).", e)
    return
  worst = max(schedules, key=lambda s: s.total(aot.EXPOSED))
  megabytes = [worst.total(place) / 1e6 for place in (aot.OVERLAPPED, aot.EXPOSED, aot.BLOCKING)]
  logging.info("Compiled schedule, bytes a device and round: %.1f MB beside the inner steps, %.1f MB of Mix1 exposed, "
               "%.1f MB blocking.", *megabytes)
  if megabytes[1]:
    logging.warning("Mix1 blocks: %.1f MB a round are not beside the inner steps. python -m fgd_jax.aot shows where; "
                    "another overlap.form or method.mix1 may overlap (docs/overlap.md).", megabytes[1])


class Profile:
  """Writes a jax profiler trace of chosen rounds to a folder (TensorBoard's profile plugin, and a Perfetto file).

  Args:
    rounds: numbers of completed rounds, counted from 1.
    folder: where the trace goes.
  """

  def __init__(self, rounds: range, folder: str):
    self._rounds, self._folder, self._running = rounds, folder, False

  def at(self, number: int, state: State) -> None:
    """Called before round `number` starts; waits for the rounds before it where the trace begins or ends."""
    if self._running != (number in self._rounds):
      jax.block_until_ready(state)
      self.close()
      if number in self._rounds:
        logging.info("Profiling rounds %d to %d into %s.", self._rounds[0], self._rounds[-1], self._folder)
        jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        self._running = True

  def close(self) -> None:
    if self._running:
      self._running = False
      jax.profiler.stop_trace()


# --- the run's summary -----------------------------------------------------------------------------------------------


def summarise(config: ConfigDict, workdir: str, facts: dict[str, Any]) -> dict[str, Any]:
  """Writes summary.json and the plot from metrics.jsonl."""
  records = read_lines(os.path.join(workdir, "metrics.jsonl"))
  last = records[-1] if records else {}
  if last.get("round") != config.rounds or "eval_loss" not in last:
    raise ValueError(f"{workdir}/metrics.jsonl lacks the record of round {config.rounds}, so there is no summary; the final "
                     "state is in checkpoints/.")
  speeds = [r["tokens_per_second"] for r in records if r.get("tokens_per_second")]
  keys = ("eval_loss", "eval_perplexity", "eval_loss_workers", "train_loss", "tokens", "step", "bytes_overlapped",
          "bytes_blocking")
  simulated = [key for key in ("simulated_seconds", "compute_utilization") if key in last]
  summary = {"rounds": config.rounds, "method": config.method.name, "workers": config.workers,
             **{key: last[key] for key in [*keys, *simulated]}, **facts,
             "consensus_l2": last_value(records, "consensus_l2"), "js_distance": last_value(records, "js_distance"),
             "tokens_per_second": float(np.median(speeds)) if speeds else None,
             "jax": jax.__version__, "python": platform.python_version(), "platform": jax.devices()[0].platform}
  curves.plot_run(workdir, summary)
  write_json(os.path.join(workdir, "summary.json"), summary)
  return summary


def last_value(records: list[dict[str, Any]], key: str) -> Any:
  return next((r[key] for r in reversed(records) if key in r), None)


# --- metrics ---------------------------------------------------------------------------------------------------------


def flush(pending: dict[str, Any] | None, log: RunLog | NoLog, config: ConfigDict) -> None:
  """Reads a round's metrics from the device (waiting for it) and writes its record."""
  if pending is None:
    return
  record, metrics = pending["record"], jax.device_get(pending["metrics"])
  loss_MxH, causes_M = metrics.pop("loss"), metrics.pop("quarantine", None)
  counts = np.arange(config.inner_steps) < np.asarray(pending["taken"])[:, None]  # losses of steps that were taken
  finite = np.isfinite(loss_MxH)
  log.events(pending["events"])
  if causes_M is not None:
    record["quarantined"] = int(np.count_nonzero(causes_M))
    log.events(quarantined(causes_M, finite, record, config.inner_steps))
    if 0 < record["quarantined"] == record.get("workers_alive", config.workers):
      raise NonFiniteError(f"All {record['quarantined']} workers are in quarantine in round {record['round']} (events.jsonl "
                           "says why), so nothing is learned. " + ADVICE)
    counts = counts & finite
  elif not finite[counts].all():
    worker, h = np.argwhere(counts & ~finite)[0]
    step = record["step"] - config.inner_steps + h + 1
    raise NonFiniteError(f"Worker {worker} has loss {loss_MxH[worker, h]} at step {step} (round {record['round']}). "
                         + ADVICE)
  record["train_loss"] = float(loss_MxH[counts].mean()) if counts.any() else None
  if "consensus_inner" in metrics:
    record["consensus_l2"] = math.sqrt(metrics["consensus_inner"])
    record["consensus_blocks"] = {k: float(v) for k, v in metrics.pop("consensus_blocks").items()}
  record |= {key: float(value) for key, value in metrics.items()}
  if "eval_loss" in record:
    record["eval_perplexity"] = math.exp(min(record["eval_loss"], 700.0))
  record["tokens_per_second"] = log.speed(pending["tokens"])
  log.write(record)


def quarantined(causes_M: np.ndarray, finite_MxH: np.ndarray, record: dict[str, Any], steps: int) -> list[dict[str, Any]]:
  """An event for each worker in quarantine: the step is that of its first loss that is not finite, else the round's last."""
  events = []
  for worker in np.flatnonzero(causes_M):
    h = int(np.argmin(finite_MxH[worker])) if not finite_MxH[worker].all() else steps - 1
    events.append({"round": record["round"], "step": record["step"] - steps + h + 1, "event": "quarantine",
                   "worker": int(worker), "cause": CAUSES[causes_M[worker]]})
    logging.warning("Worker %d is in quarantine at step %d (round %d): its %s is not finite.", worker, events[-1]["step"],
                    record["round"], events[-1]["cause"])
  return events


def tokens_after(config: ConfigDict, progress: Progress, steps_RxM: np.ndarray) -> list[int]:
  """Tokens of all workers after 0, 1, ... R rounds; before the number of workers changed, as the checkpoint counted them."""
  since = np.concatenate([[0], np.cumsum(steps_RxM.sum(axis=1))]) * config.batch_size * config.seq_len
  return [int(progress.tokens + n - since[progress.since]) for n in since]


def taken_steps(config: ConfigDict, troubles: faults.Faults | None) -> np.ndarray:
  """[R, M]: inner steps that each worker takes in each round; none while it is down."""
  steps = np.asarray(configs.steps_of_workers(config))
  return np.broadcast_to(steps, (config.rounds, config.workers)) if troubles is None else troubles.alive * steps


def refuse_non_finite(finite_M: jax.Array, step: int) -> None:
  """Stops before a save when a worker's parameters or optimizer state hold a non-finite number."""
  bad = np.flatnonzero(~np.asarray(finite_M))
  if bad.size:
    raise NonFiniteError(f"Worker {bad[0]} has non-finite parameters or optimizer state after step {step}. "
                         + ADVICE)


def consensus_by_block(w: PyTree, z: PyTree) -> dict[str, Any]:
  """Consensus distances (squared) of w in total and by block, and of z in total."""
  blocks = measure.by_block(w, lambda path: path.split("/")[0], fgd.mixing.path_of)
  return {"consensus_inner": sum(blocks.values()), "consensus_blocks": blocks,
          "consensus_outer": measure.pairwise_squared_distance(z)}


def js_of(apply: Callable, tokens_BxL: jax.Array) -> Callable:
  """A measure: JS distances of the workers' predictions on fixed held-out tokens, at the end of the inner phase."""
  def js(w: PyTree, z: PyTree) -> dict[str, jax.Array]:
    return measure.pairwise_js(jax.vmap(lambda params: apply(params, tokens_BxL))(w))

  return js


def make_evaluation(loss: Callable, heldout_NxBxL: np.ndarray, workers: fgd.Workers) -> Callable:
  """evaluate(mean params, stacked params, alive) -> eval_loss of the mean model and eval_loss_workers, the workers' mean.

  The fixed batches are spread over the device positions. `alive` [M]: the workers that count; None: all.
  """
  sharding = workers.replicated()
  if workers.mesh is not None and heldout_NxBxL.shape[1] % workers.placement.devices == 0:
    sharding = NamedSharding(workers.mesh, PartitionSpec(None, "worker"))
  batches = workers.put(heldout_NxBxL, sharding)
  mean_loss = lambda params, tokens: jnp.mean(jax.lax.map(lambda b: loss(params, {"tokens": b}, None), tokens))
  one = jax.jit(mean_loss, out_shardings=workers.replicated())
  each = workers.spmd(lambda stack, tokens: workers.each(
      lambda params: mean_loss(params, tokens), stack, how="map"), stacks=1)
  average = jax.jit(lambda stack, tokens, alive: jnp.mean(each(stack, tokens), where=alive),
                    out_shardings=workers.replicated())

  def evaluate(mean: PyTree, stack: PyTree, alive: Any = None) -> dict[str, Any]:
    alive = np.ones(workers.count, bool) if alive is None or not alive.any() else alive
    return {"eval_loss": one(mean, batches), "eval_loss_workers": average(stack, batches, alive)}

  return evaluate


# --- command ---------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    command.refuse(f"Unexpected argument {argv[1]!r}; all options start with --.")
  if not flags.FLAGS.workdir:
    command.refuse("--workdir is missing; give the folder for checkpoints, metrics and plots, such as --workdir=runs/a.")
  show_own_logs()
  distributed.heed_signals(lambda: what_next(flags.FLAGS.workdir))
  try:
    train(flags.FLAGS.config, flags.FLAGS.workdir)
    distributed.finish()
  except PreemptedError as e:
    logging.warning("%s %s", e, what_next(flags.FLAGS.workdir))
    distributed.finish()
    raise SystemExit(128 + distributed.stopped_by()) from e
  except (ValueError, OSError, NonFiniteError, distributed.PeerError) as e:
    if os.environ.get("FGD_JAX_TRACEBACK"):
      raise
    logging.error("%s", " ".join(str(e).split()))
    raise SystemExit(2) from e
  except jax.errors.JaxRuntimeError as e:
    if distributed.count() == 1:
      raise
    logging.error("Process %d ends: %s. Another process has probably died; see its log. %s",
                  distributed.index(), str(e).strip().splitlines()[0][:300], what_next(flags.FLAGS.workdir))
    raise SystemExit(LOST_PEER) from e


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", help_string=(
      "Config file with optional settings, e.g. configs/quickstart.py:workers=8,method=LocalM1M2 (required). Every key of "
      "configs/default.py can also be set by --config.KEY=VALUE. Methods: " + ", ".join(
          [*fgd.methods.METHODS, *fgd.methods.PRESETS]) + "."))
  flags.DEFINE_string("workdir", None, "Folder of the run (required); the same command resumes it.")
  flags.mark_flag_as_required("config")
  app.run(main, flags_parser=functools.partial(
      command.parse_flags,
      usage="python -m fgd_jax.train --config=FILE[:key=value,...] --workdir=DIR; keys: configs/default.py"))
