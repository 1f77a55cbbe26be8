"""Reading compiled schedules: every form from snippets with numbers by hand, then real compilations for TPUs.

The compilations need libtpu (pip install '.[aot]') and no TPU; GPU targets run with FGD_TEST_GPU_AOT=1 and the
plugin wheels.
"""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import fgd_jax as fgd
from fgd_jax import aot, train
from fgd_jax.aot import hlo, schedule, targets
from fgd_jax.aot.schedule import BLOCKING, EXPOSED, OVERLAPPED
from fgd_jax.default_config import get_config as default

# --- sizes, groups, instructions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, expected", [
    ("f32[4,256,128]{2,1,0:T(8,128)S(1)}", 4 * 256 * 128 * 4),
    ("bf16[8,256]{1,0:T(8,128)(2,1)}", 8 * 256 * 2),
    ("(f32[2]{0}, s8[3]{0:T(256)(4,1)}, token[], u32[]{:S(2)})", 8 + 3 + 4),
    ("s4[10]{0}", 5), ("u4[3]", 1.5), ("f8e4m3fn[7]", 7), ("pred[5]", 5), ("f32[]", 4), ("((f64[2], c64[1]), ())", 24),
    ("f32[<=4,2]", 32), ("token[]", 0), ("f32[0,5]", 0)])
def test_size_of_types_leaves_layouts_out(text, expected):
  assert hlo.size(text) == expected


def test_unknown_element_type_is_an_error():
  with pytest.raises(ValueError, match="quad"):
    hlo.size("quad[3]")


@pytest.mark.parametrize("text, expected", [
    ("replica_groups={{0,1},{2,3}}, use_global_device_ids=true", [[0, 1], [2, 3]]),
    ("replica_groups=[4,2]<=[8], dimensions={0}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("replica_groups=[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ("replica_groups=mesh['worker'=4,'fsdp'=2] {'worker'}, use", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ("replica_groups=mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ("replica_groups={}, to_apply=%add", []), ("dimensions={0}", [])])
def test_replica_groups_in_all_notations(text, expected):
  assert hlo.replica_groups(text) == expected


def _one(line):
  return hlo.parse(f"HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[] {{\n  {line}\n}}\n").computations["main"][0]


FSDP2 = hlo.Devices.of([0, 0, 1, 1])
TWO_SLICES = hlo.Devices.of([0, 0, 1, 1, 2, 2, 3, 3], [0] * 4 + [1] * 4)


@pytest.mark.parametrize("line, devices, senders", [
    ("%a = f32[2] all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true", FSDP2, ()),
    ("%a = f32[2] all-reduce(%x), channel_id=1, replica_groups={{0,2},{1,3}}, use_global_device_ids=true", FSDP2, range(4)),
    ("%a = f32[2] all-reduce(%x), channel_id=1, replica_groups={{0}}", FSDP2, range(4)),  # across all partitions
    ("%a = f32[2] all-reduce(%x), replica_groups={{0}}", FSDP2, ()),  # across replicas, of which there is one
    ("%a = f32[2] collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}", FSDP2, ()),
    ("%a = f32[2] collective-permute(%x), channel_id=1, source_target_pairs={{0,2},{1,0}}", FSDP2, (0,)),
    # a program for two slices numbers the devices of its own slice
    ("%a = f32[2] reduce-scatter(%x), channel_id=1, replica_groups={{0,2},{1,3}}, use_global_device_ids=true", TWO_SLICES,
     range(8)),
    ("%a = f32[2] all-gather(%x), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true", TWO_SLICES, ()),
    ('%a = (f32[2], u32[], token[]) send(%x, %t), channel_id=2, is_host_transfer=true, frontend_attributes={'
     '_xla_megascale_target={{100000->200000},{200000->100000}},_xla_megascale_transfer_type="ONE_TO_ONE"}', TWO_SLICES,
     (0, 4)),
    ('%a = (f32[2], u32[], token[]) send(%x, %t), channel_id=2, is_host_transfer=true, frontend_attributes={'
     '_xla_megascale_target="{1,2}x{0:2}",_xla_megascale_transfer_type="ALL_REDUCE"}', TWO_SLICES, (0, 1, 2, 4, 5, 6)),
    # a worker that spans both slices: nothing crosses workers
    ('%a = (f32[2], u32[], token[]) send(%x, %t), channel_id=2, is_host_transfer=true, frontend_attributes={'
     '_xla_megascale_target="{1,2}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}',
     hlo.Devices.of([0, 1, 0, 1], [0, 0, 1, 1]), ())])
def test_which_devices_send_to_other_workers(line, devices, senders):
  assert hlo.senders(_one(line), devices) == frozenset(senders)


def test_transfers_between_slices_name_devices_by_number_not_by_place_in_the_mesh():
  devices = hlo.Devices.of([0, 1, 2, 3], [0, 0, 1, 1], [100001, 100000, 200000, 200001])
  line = "%a = (f32[2], token[]) send(%x), is_host_transfer=true, _xla_megascale_target={{100000->200001}}"
  assert hlo.senders(_one(line), devices) == {1}


def test_instructions_are_read_with_nested_tuples_comments_and_quotes():
  x = _one('ROOT %all-reduce.4.cloned.1.call-start = ((f32[2]{0:T(8,128)}, /*index=1*/token[]), (f32[2]{0})) '
           'call-start(%a.1, /*index=5*/%b), to_apply=%called, metadata={op_name="jit(f)/mix1/psum"}')
  assert (x.name, x.op, x.operands, x.root) == ("all-reduce.4.cloned.1.call-start", "call-start", ("a.1", "b"), True)
  assert x.op_name == "jit(f)/mix1/psum" and x.called() == ["called"] and hlo.size(x.type) == 16


# --- schedules -------------------------------------------------------------------------------------------------------

WORKERS = hlo.Devices.of([0, 1])
GROUPS = "replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add"
PAIRS = "channel_id=1, source_target_pairs={{0,1},{1,0}}"
SCAN = '%scan = (f32[4]) while(%t), condition=%cond, body=%body, metadata={op_name="jit(r)/shard_map/inner/while"}'
W = "%w = f32[4] get-tuple-element(%scan), index=0"
M1, M2 = 'metadata={op_name="jit(r)/shard_map/mix1/psum"}', 'metadata={op_name="jit(r)/shard_map/mix2/psum"}'


def _module(entry, body="", extra=""):
  return f"""HloModule jit_r, is_scheduled=true, entry_computation_layout={{()->()}}

%add (p.0: f32[], p.1: f32[]) -> f32[] {{
  %p.0 = f32[] parameter(0)
  %p.1 = f32[] parameter(1)
  ROOT %sum = f32[] add(%p.0, %p.1)
}}
{extra}
%cond (c: (s32[], f32[4])) -> pred[] {{
  %c = (s32[], f32[4]) parameter(0)
  %n = s32[] constant(8)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %b = (s32[], f32[4]) parameter(0)
  %x = f32[4] get-tuple-element(%b), index=1
{body}
}}

ENTRY %main (z: f32[4], v: bf16[6]) -> (f32[4]) {{
  %z = f32[4]{{0}} parameter(0)
  %v = bf16[6]{{0}} parameter(1)
  %t = (f32[4]) tuple(%z)
{entry}
}}
"""


def _read(*lines, devices=WORKERS, body=(), extra="", **options):
  join = lambda ls: "\n".join("  " + line for line in ls)
  return schedule.read(_module(join(lines), join(body), extra), devices, **options)


def _totals(s):
  return tuple(s.total(k) for k in ("overlapped", "exposed", "blocking", "in scan"))


def test_permute_beside_the_scan_and_one_that_ends_before_it():
  s = _read(f"%s.1 = (f32[4], f32[4], u32[]) collective-permute-start(%z), {PAIRS}, {M1}",
            f"%s.2 = (bf16[6], bf16[6], u32[]) collective-permute-start(%v), {PAIRS}, {M1}",
            f"%d.2 = bf16[6] collective-permute-done(%s.2), {M1}", SCAN,
            f"%d.1 = f32[4] collective-permute-done(%s.1), {M1}")
  assert _totals(s) == (16, 12, 0, 0)
  first = s.collectives[0]
  assert (first.name, first.scope, first.placed, first.start_index, first.done_index) == ("s.1", "mix1", "overlapped", 3, 7)
  assert s.scans == (6,) and s.length == 8 and s.instructions == 8 + 3 + 4 + 2 and not s.notes


def test_start_that_drifts_behind_the_scan_is_exposed_and_mix2_is_blocking():
  s = _read(SCAN, W, f"%s.1 = f32[4] all-reduce-start(%z), {GROUPS}, {M1}", f"%d.1 = f32[4] all-reduce-done(%s.1), {M1}",
            f"%m = (f32[4], f32[4]) all-reduce(%w, %w), channel_id=2, {GROUPS}, {M2}")
  assert _totals(s) == (0, 16, 32, 0)


def test_collectives_without_names_are_told_apart_by_what_they_depend_on():
  s = _read(f"%early = f32[4] all-reduce-start(%z), {GROUPS}", SCAN, "%e = f32[4] all-reduce-done(%early)", W,
            f"%late = bf16[6] all-reduce(%v), {GROUPS}", "%delta = f32[4] subtract(%z, %w)",
            f"%m = f32[4] all-reduce(%delta), {GROUPS}")
  assert [(c.scope, c.scope_from, c.placed, c.bytes) for c in s.collectives] == [
      ("mix1", "data", "overlapped", 16), ("mix1", "data", "exposed", 12), ("mix2", "data", "blocking", 16)]


def test_what_stays_inside_a_worker_is_not_counted():
  s = _read("%g = f32[8] all-gather(%z), channel_id=1, replica_groups=[2,2]<=[4], dimensions={0}, "
            "use_global_device_ids=true", SCAN, devices=FSDP2)
  assert not s.collectives


def test_asynchronous_calls_carry_the_bytes_of_the_computation_they_wrap():
  wrapped = f"""
%wrapped (q: f32[4], u: bf16[6]) -> (f32[4], bf16[6]) {{
  %q = f32[4] parameter(0)
  %u = bf16[6] parameter(1)
  ROOT %r = (f32[4], bf16[6]) all-reduce(%q, %u), channel_id=1, {GROUPS}, {M1}
}}
"""
  s = _read("%a = ((f32[4], bf16[6]), (f32[4], bf16[6]), u32[]) async-start(%z, %v), calls=%wrapped", SCAN,
            "%a.1 = ((f32[4], bf16[6]), (f32[4], bf16[6]), u32[]) async-update(%a)",
            "%a.2 = (f32[4], bf16[6]) async-done(%a.1)", extra=wrapped)
  assert _totals(s) == (28, 0, 0, 0) and (s.collectives[0].kind, s.collectives[0].scope) == ("all-reduce", "mix1")
  assert s.collectives[0].done_index == 6


SPARSE = f"""
%offloaded (q: f32[4], k: token[]) -> f32[4] {{
  %q = f32[4] parameter(0)
  %k = token[] parameter(1)
  ROOT %r = f32[4] all-reduce(%q), channel_id=1, {GROUPS}, {M1}
}}, execution_thread="sparsecore"
"""
CALL = f'async_execution_thread="sparsecore", to_apply=%offloaded, {M1}'


def test_sparse_core_call_start_that_carries_the_operands():
  s = _read('%p = s32[] custom-call(), custom_call_target="PrepareAsyncCallStart"',
            '%k = token[] custom-call(%p), custom_call_target="PrepareAsyncCallDone"',
            f"%c = ((f32[4], token[]), f32[4]) call-start(%z, %k), {CALL}", SCAN, f"%d = f32[4] call-done(%c), {M1}",
            extra=SPARSE)
  assert _totals(s) == (16, 0, 0, 0)
  assert (s.collectives[0].start_index, s.collectives[0].done_index) == (5, 7)


def test_sparse_core_call_update_that_carries_the_operands():
  start, update = f"%c = ((), (), (s32[1])) call-start(), {CALL}", "%u = ((f32[4]), f32[4]) call-update(%c, %z)"
  s = _read(start, update, SCAN, "%d = f32[4] call-done(%u)", extra=SPARSE)
  assert _totals(s) == (16, 0, 0, 0) and s.collectives[0].start_index == 4
  s = _read(start, SCAN, update, "%d = f32[4] call-done(%u)", extra=SPARSE)  # only set up before the loop
  assert _totals(s) == (0, 16, 0, 0)


def _dcn(name, operand, target, shape="f32[4]"):
  where = (f'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="{name}_0",'
           f'_xla_megascale_target={target}}}')
  return {"send": f"%send.{name} = ({shape}, u32[], token[]) send(%{operand}, %after.{name}), channel_id=4, {where}",
          "recv": f"%recv.{name} = ({shape}, u32[], token[]) recv(%after.{name}), channel_id=3, {where}",
          "sent": f"%sent.{name} = token[] send-done(%send.{name}), channel_id=4, is_host_transfer=true",
          "done": f"%done.{name} = ({shape}, token[]) recv-done(%recv.{name}), channel_id=3, is_host_transfer=true"}


def test_transfers_between_slices_need_send_and_receive_before_the_scan():
  devices = hlo.Devices.of([0, 1], [0, 1])
  swap = '{{100000->200000},{200000->100000}},_xla_megascale_transfer_type="ONE_TO_ONE"'
  mix1, mix2 = _dcn("a", "z", swap), _dcn("b", "w", '"{1,2}x{0:0}",_xla_megascale_transfer_type="ALL_REDUCE"')
  s = _read(mix1["send"], mix1["recv"], SCAN, mix1["sent"], mix1["done"], W, mix2["send"], mix2["recv"], mix2["sent"],
            mix2["done"], devices=devices)
  assert [(c.kind, c.scope, c.placed, c.bytes, c.start_index, c.done_index) for c in s.collectives] == [
      ("collective-permute (between slices)", "mix1", "overlapped", 16, 4, 7),
      ("all-reduce (between slices)", "mix2", "blocking", 16, 10, 12)]
  s = _read(mix1["send"], SCAN, mix1["recv"], mix1["sent"], mix1["done"], devices=devices)
  assert _totals(s) == (0, 16, 0, 0)


def test_the_stages_of_an_all_reduce_in_and_between_slices_are_told_apart():
  slices = 'replica_groups={{0,1}}, use_global_device_ids=true'  # in each slice
  devices = hlo.Devices.of([0, 1, 2, 3], [0, 0, 1, 1])
  between = _dcn("a", "part", '"{1,2}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"', "f32[2]")
  s = _read(f"%part = f32[2] reduce-scatter(%z), channel_id=1, {slices}, dimensions={{0}}, to_apply=%add", between["send"],
            between["recv"], SCAN, between["sent"], between["done"], "%got = f32[2] get-tuple-element(%done.a), index=0",
            f"%whole = f32[4] all-gather(%got), channel_id=1, {slices}, dimensions={{0}}", devices=devices)
  assert [(c.kind, c.placed, c.bytes) for c in s.collectives] == [
      ("reduce-scatter", "exposed", 16), ("all-reduce (between slices)", "overlapped", 8), ("all-gather", "exposed", 8)]


def test_a_permutation_partly_between_slices_counts_once_for_a_device():
  devices = hlo.Devices.of([0, 1, 2, 3], [0, 0, 1, 1])
  across = _dcn("a", "z", '{{100001->200000},{200001->100000}},_xla_megascale_transfer_type="ONE_TO_ONE"')
  s = _read(across["send"], across["recv"], "%s = (f32[4], f32[4], u32[]) collective-permute-start(%z), channel_id=1, "
            "source_target_pairs={{0,1}}", SCAN, "%d = f32[4] collective-permute-done(%s)", across["done"], devices=devices)
  assert [(c.placed, c.bytes, sorted(c.senders)) for c in s.collectives] == [
      ("overlapped", 16, [1, 3]), ("overlapped", 16, [0, 2])]
  assert s.total("overlapped") == 16


def _branches(*sizes):
  return "".join(f"""
%branch.{i} (q: f32[{n}]) -> f32[{n}] {{
  %q = f32[{n}] parameter(0)
  %s.{i} = (f32[{n}], f32[{n}]) collective-permute-start(%q), {PAIRS}, metadata={{op_name="jit(r)/cond/mix2/ppermute"}}
  %d.{i} = f32[{n}] collective-permute-done(%s.{i})
  ROOT %e.{i} = f32[{n}] collective-permute(%d.{i}), {PAIRS}
}}
""" for i, n in enumerate(sizes))


def test_a_switch_counts_its_largest_branch_as_blocking():
  s = _read(SCAN, W, "%choice = s32[] constant(1)", "%m = f32[4] conditional(%choice, %w, %w), "
            "branch_computations={%branch.0, %branch.1}", extra=_branches(4, 10))
  assert [(c.kind, c.scope, c.placed, c.bytes) for c in s.collectives] == [
      ("2 x collective-permute in conditional", "mix2", "blocking", 80)]


def test_branches_by_slice_all_run():
  devices = hlo.Devices.of([0, 1, 2, 3], [0, 0, 1, 1])
  s = _read(SCAN, W, '%id = u32[] custom-call(), custom_call_target="SliceId"', "%m = f32[4] conditional(%id, %w, %w), "
            "branch_computations={%branch.0, %branch.1}", extra=_branches(4, 10), devices=devices)
  assert [(c.bytes, c.senders) for c in s.collectives] == [(80, frozenset(range(4)))]


MATMUL = "%y = f32[4] dot(%x, %x), lhs_contracting_dims={0}"


def test_hops_of_a_ring_in_the_scan_count_when_matrix_products_stand_between():
  start = f'%s = (f32[4], f32[4]) collective-permute-start(%x), {PAIRS}, metadata={{op_name="inner/body/mix1/ppermute"}}'
  done = "%d = f32[4] collective-permute-done(%s)"
  s = _read(SCAN, body=(start, MATMUL, done))
  assert _totals(s) == (16 * 8, 0, 0, 0)  # the loop's condition says 8 trips
  assert s.collectives[0].in_scan and s.collectives[0].times == 8 and s.collectives[0].bytes == 16
  assert _totals(_read(SCAN, body=(start, done, MATMUL))) == (0, 16 * 8, 0, 0)
  fusion = "\n%products (q: f32[4]) -> f32[4] {\n  %q = f32[4] parameter(0)\n  ROOT %c = f32[4] convolution(%q, %q)\n}\n"
  body = (start, "%f = f32[4] fusion(%x), kind=kOutput, calls=%products", done)
  assert _totals(_read(SCAN, body=body, extra=fusion)) == (128, 0, 0, 0)


def test_gradients_in_the_scan_are_neither_mix1_nor_overlapped():
  line = f'%g = f32[4] all-reduce(%x), channel_id=1, {GROUPS}, metadata={{op_name="jit(r)/inner/while/body/mix2/psum"}}'
  s = _read(SCAN, body=(line, MATMUL))
  assert _totals(s) == (0, 0, 0, 128) and s.collectives[0].placed == "in scan"


def test_nameless_hops_belong_to_the_mixer_that_the_caller_says():
  body = (f"%s = (f32[4], f32[4]) collective-permute-start(%x), {PAIRS}", MATMUL, "%d = f32[4] collective-permute-done(%s)")
  assert _totals(_read(SCAN, body=body, inner_scope="mix1")) == (128, 0, 0, 0)
  assert _totals(_read(SCAN, body=body)) == (0, 0, 0, 128)


def test_trips_come_from_xla_when_it_knows_and_from_the_caller_when_nobody_does():
  body = (f"%g = f32[4] all-reduce(%x), channel_id=1, {GROUPS}, {M2}",)
  known = SCAN + ', backend_config={"known_trip_count":{"n":"5"}}'
  assert _read(known, body=body).collectives[0].times == 5
  unknown = _module("  " + SCAN, "  " + body[0]).replace("direction=LT", "direction=NE")
  assert schedule.read(unknown, WORKERS, inner_steps=3).collectives[0].times == 3


def test_a_loop_over_workers_of_a_slot_around_the_scan():
  around = f"""
%workers (k: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %k = (s32[], f32[4]) parameter(0)
  %t = (f32[4]) get-tuple-element(%k), index=1
  {SCAN}
  ROOT %done = (s32[], f32[4]) tuple(%scan)
}}
"""
  loop = '%map = (f32[4]) while(%t), condition=%cond, body=%workers, metadata={op_name="jit(r)/shard_map/while"}'
  s = _read(f"%s = f32[4] all-reduce-start(%z), {GROUPS}, {M1}", loop, "%d = f32[4] all-reduce-done(%s)", extra=around)
  assert _totals(s) == (16, 0, 0, 0) and s.scans == (4,)


def test_fragments_that_travel_beside_the_first_part_of_their_steps():
  """Streaming: an outer loop (8 trips here) whose body launches, runs inner steps, lands and runs the rest."""
  fragment = f"""
%fragment (k: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %k = (s32[], f32[4]) parameter(0)
  %t = (f32[4]) get-tuple-element(%k), index=1
  %s = f32[4] all-reduce-start(%t), {GROUPS}, {M1}
  {SCAN}
  %d = f32[4] all-reduce-done(%s)
  {SCAN.replace("%scan", "%rest").replace("%t", "%d")}
  ROOT %done = (s32[], f32[4]) tuple(%rest)
}}
"""
  loop = '%map = (f32[4]) while(%t), condition=%cond, body=%fragment, metadata={op_name="jit(r)/shard_map/while"}'
  assert _totals(_read(loop, extra=fragment)) == (16 * 8, 0, 0, 0)


def test_a_plain_call_is_read_in_place():
  called = f"""
%graph (q: f32[4]) -> f32[4] {{
  %q = f32[4] parameter(0)
  %s = f32[4] all-reduce-start(%q), {GROUPS}
  {SCAN.replace("%t", "%q")}
  ROOT %d = f32[4] all-reduce-done(%s)
}}
"""
  s = _read("%c = f32[4] call(%z), to_apply=%graph", f"%m = f32[4] all-reduce(%c), {GROUPS}, {M2}", extra=called)
  assert _totals(s) == (16, 0, 16, 0) and s.scans == (4,)


def test_gpu_pair_marked_as_synchronous_does_not_overlap():
  start = f"%s = f32[4] all-reduce-start(%z), {GROUPS}, {M1}, backend_config="
  text = '{"collective_backend_config":{"is_sync":%s}}'
  for flag, expected in (("false", (16, 0, 0, 0)), ("true", (0, 16, 0, 0))):
    assert _totals(_read(start + text % flag, SCAN, "%d = f32[4] all-reduce-done(%s)")) == expected


def test_steps_that_are_written_out():
  """Matrix products of a step between start and done: beside it; none between: exposed. In ENTRY and in a loop over "
    "fragments."""
  start, done = f"%s = f32[4] all-reduce-start(%t), {GROUPS}, {M1}", "%d = f32[4] all-reduce-done(%s)"
  product = '%y = f32[4] dot(%t, %t), metadata={op_name="jit(r)/inner/while/body/dot"}'
  for lines, expected in (((start, product, done), (16, 0, 0, 0)), ((product, start, done), (0, 16, 0, 0))):
    s = _read(*[line.replace("%t", "%z") for line in lines])
    assert _totals(s) == expected and "no loop of inner steps" in s.notes[0]
    fragment = "\n".join(["%fragment (k: (s32[], f32[4])) -> (s32[], f32[4]) {", "  %k = (s32[], f32[4]) parameter(0)",
                          "  %t = (f32[4]) get-tuple-element(%k), index=1", *(f"  {line}" for line in lines),
                          "  ROOT %done = (s32[], f32[4]) tuple(%d)", "}"])
    loop = '%map = (f32[4]) while(%t), condition=%cond, body=%fragment, metadata={op_name="jit(r)/shard_map/while"}'
    assert _totals(_read(loop, extra="\n" + fragment + "\n")) == tuple(8 * n for n in expected)


def test_a_loop_without_its_name_is_taken_for_the_scan():
  s = _read(f"%s = f32[4] all-reduce-start(%z), {GROUPS}", SCAN.split(", metadata")[0], "%d = f32[4] all-reduce-done(%s)")
  assert _totals(s) == (16, 0, 0, 0) and "largest" in s.notes[0]


def test_text_that_is_no_program_is_refused():
  with pytest.raises(ValueError, match="ENTRY"):
    hlo.parse("hello")


# --- targets and the command -----------------------------------------------------------------------------------------


def test_names_of_targets():
  assert targets.parse("v5p:2x2x2", 2) == targets.Target("v5p:2x2x2", "tpu", "v5p", (2, 2, 2), 2)
  assert targets.parse("h100:8").layout == (1, 8) and targets.parse("h100:2x8").layout == (2, 8)
  for name, slices, match in (("v7x:2x2x1", 1, "tpu7x"), ("v5e", 1, "v5e:2x4"), ("v5e:8", 1, "along each axis"),
                              ("a100:8", 1, "h100:8"), ("h100:8", 2, "hosts"), ("h100:1x2x8", 1, "HOSTSxDEVICES"),
                              ("v5e:2x2", 0, "at least 1"), ("v5e:2x0", 1, "not a known target")):
    with pytest.raises(targets.TargetError, match=match):
      targets.parse(name, slices)


def test_missing_compilers_are_named_with_their_packages(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(aot.TargetError, match=r"pip install '\.\[aot\]'"):
    aot.compile_round(default(), "v5e:2x2")
  with pytest.raises(aot.TargetError, match="jax-cuda12-plugin jax-cuda12-pjrt"):
    aot.compile_round(default(), "h100:8")


def test_an_aborted_compiler_gives_one_sentence_and_its_last_lines(monkeypatch):
  monkeypatch.setattr(targets, "refuse_missing", lambda target: None)
  code = "import os, sys; print('CHECK failed: broken', flush=True); os.abort()"
  run = subprocess.run
  monkeypatch.setattr(subprocess, "run", lambda command, **kw: run([sys.executable, "-c", code], **kw))
  with pytest.raises(aot.AotError, match=r"(?s)aborted by SIGABRT on v5e:2x2.*CHECK failed: broken"):
    aot.compile_round(default(), "v5e:2x2")


def test_command_refuses_unknown_targets_in_one_sentence():
  done = subprocess.run([sys.executable, "-m", "fgd_jax.aot", "--config=configs/default.py", "--topology=v99:2x2"],
                        capture_output=True, text=True)
  assert done.returncode == 2 and "v99:2x2 is not a known target" in done.stderr and "Traceback" not in done.stderr


# --- real compilations -----------------------------------------------------------------------------------------------

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None,
                                  reason="the TPU compiler is not installed: pip install '.[aot]'")
needs_gpu_plugin = pytest.mark.skipif(not os.environ.get("FGD_TEST_GPU_AOT"),
                                      reason="GPU targets: launch/test.sh --gpu-aot, which installs the plugin wheels")
DIM, FFN, LAYERS, VOCAB, HEAD = 256, 512, 2, 256, 64  # HEAD: dim / 4 heads, of which 2 are key/value heads
MATRICES = 2 * VOCAB * DIM + LAYERS * (2 * DIM * DIM + 2 * DIM * 2 * HEAD + 3 * DIM * FFN)
NORMS = (2 * LAYERS + 1) * DIM


def _config(method, workers, fsdp=1, **method_options):
  c = default()
  c.workers, c.mesh.fsdp, c.method.name = workers, fsdp, method
  c.inner_steps, c.seq_len, c.batch_size = 16, 64, 4
  c.model.dim, c.model.ffn_dim, c.model.layers, c.model.scan_layers, c.model.remat = DIM, FFN, LAYERS, True, True
  c.model.dtype = "bfloat16"
  for key, value in method_options.items():
    c.method[key] = value
  return c


def _check(report, fsdp=1, padding=0.0):
  """Everything that Mix1 sends overlaps, and it is one device's shard of all parameters (float32)."""
  most, least = 4 * (MATRICES / fsdp + NORMS), 4 * (MATRICES + NORMS) / fsdp  # norms whole on each device, or divided
  assert report.parameters == MATRICES + NORMS
  assert report.exposed_mix1_bytes == 0 and report.in_scan == {"collectives": 0, "bytes": 0}
  assert least <= report.overlapped_bytes <= most * (1 + padding)
  assert report.share_mix1_overlapped == 1
  for c in report.collectives:
    if c.placed == "overlapped":
      assert any(c.start_index < s < c.done_index for s in report.schedule.scans)
  assert report.peak_bytes_per_device > 3 * 4 * (MATRICES + NORMS) / fsdp  # parameters and two moments
  assert 1000 < report.instructions < 20000


@needs_libtpu
def test_v5e_one_slice_permutation_overlaps(tmp_path):
  """Also the command: JSON, the program's text and the picture."""
  args = [f"--config.{k}={v}" for k, v in {
      "workers": 4, "inner_steps": 16, "seq_len": 64, "model.dim": DIM, "model.ffn_dim": FFN, "model.layers": LAYERS,
      "model.scan_layers": True, "model.remat": True, "model.dtype": "bfloat16", "method.name": "LocalM1M2"}.items()]
  done = subprocess.run([sys.executable, "-m", "fgd_jax.aot", "--config=configs/default.py", "--topology=v5e:2x2", "--json",
                         f"--dump-hlo={tmp_path}/round.hlo", f"--plot={tmp_path}/round.png", *args],
                        capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-2000:]
  out = json.loads(done.stdout)
  size = 4 * (MATRICES + NORMS)
  assert (out["overlapped_bytes"], out["exposed_mix1_bytes"], out["blocking_mix2_bytes"]) == (size, 0, size)
  assert out["expected_mix1_bytes"] == size and out["share_overlapped"] == 0.5
  assert {c["kind"] for c in out["collectives"] if c["placed"] == "overlapped"} == {"collective-permute"}
  assert {"peak_bytes_per_device", "compile_seconds", "compile_cpu_seconds", "instructions", "memory", "xla_options",
          "form"} <= out.keys()
  assert "ENTRY" in (tmp_path / "round.hlo").read_text()
  assert (tmp_path / "round.png").read_bytes()[:4] == b"\x89PNG"


@needs_libtpu
def test_v5p_one_slice_mean_overlaps_on_the_sparse_cores():
  report = aot.compile_round(_config("GlobalM1LocalM2", 4), "v5p:2x2x1")
  _check(report)
  assert report.overlapped_bytes == report.expected_mix1_bytes == 4 * (MATRICES + NORMS)
  assert report.xla_options["xla_tpu_enable_sparse_core_collective_offload_all_reduce"] == "true"
  assert {c.kind for c in report.collectives if c.placed == "overlapped"} == {"all-reduce"}


@needs_libtpu
def test_v5p_a_fragment_that_is_one_step_in_flight_overlaps():
  """Streaming with a delay of 1: that single step stays a loop, or XLA would start the transfer behind it."""
  report = aot.compile_round(_config("streaming_diloco", 4, fragments=8, order="flat", delay=1), "v5p:2x2x1")
  assert report.exposed_mix1_bytes == 0 and report.blocking_mix2_bytes == 0
  assert report.in_scan == {"collectives": 0, "bytes": 0}
  assert 4 * (MATRICES + NORMS) <= report.overlapped_bytes <= 4 * (MATRICES + NORMS) * 1.01  # ranges are padded
  assert sum(c.times for c in report.collectives) == 8


@needs_libtpu
def test_two_v5e_slices_mean_overlaps_with_sharded_workers():
  report = aot.compile_round(_config("GlobalM1", 2, fsdp=4), "v5e:2x2", slices=2)
  _check(report, fsdp=4, padding=0.01)
  assert report.mesh == {"worker": 2, "fsdp": 4, "tensor": 1} and report.blocking_mix2_bytes == 0
  assert {c.kind for c in report.collectives} == {"all-reduce (between slices)"}


@needs_libtpu
def test_v5e_one_slice_mean_goes_round_a_ring_in_the_scan():
  report = aot.compile_round(_config("GlobalM1", 4), "v5e:2x2")
  assert report.form == "ring" and report.exposed_mix1_bytes == 0
  assert report.expected_mix1_bytes == pytest.approx(2 * 3 / 4 * 4 * (MATRICES + NORMS))
  # 16 steps carry 2 segments of 6 hops and 4 idle ones; chunks are padded to whole tiles of 4 kB
  padded = 8 * -(-report.expected_mix1_bytes / 1.5 // (8 * 4096)) * 4096
  assert report.overlapped_bytes == padded * 2 * 3 / 4 * 16 / 12
  assert all(c.in_scan and c.times == 16 for c in report.collectives)


@needs_libtpu
def test_a_target_that_is_too_small_and_a_shape_that_does_not_exist():
  c = _config("GlobalM1", 4, fsdp=4)
  c.mesh.worker = 4
  with pytest.raises(ValueError, match="needs 16 devices"):
    aot.compile_round(c, "v5e:2x2")
  with pytest.raises(ValueError, match="refused by the compiler"):
    aot.compile_round(c, "v5e:2x3")


@needs_gpu_plugin
@pytest.mark.parametrize("method, workers, fsdp", [
    ("GlobalM1LocalM2", 8, 1), ("LocalM1M2", 8, 1), ("GlobalM1LocalM2", 4, 2), ("LocalM1M2", 4, 2)])
def test_h100_one_packed_buffer_overlaps(method, workers, fsdp):
  report = aot.compile_round(_config(method, workers, fsdp), "h100:8")
  _check(report, fsdp)
  assert np.isclose(report.overlapped_bytes, report.blocking_mix2_bytes, rtol=0.01)


# --- a program compiled here -------------------------------------------------------------------------------------------


def test_the_trainer_reads_its_own_schedule(monkeypatch):
  """On CPU collectives are synchronous, so all of Mix1 is exposed: its size, and a warning."""
  mesh = jax.make_mesh((4,), ("worker",), devices=jax.devices()[:4])
  workers = fgd.Workers(4, mesh)
  init, round_fn = fgd.build_round(fgd.methods.make("GlobalM1LocalM2"), lambda p, b, rng: ((b @ p["w"]) ** 2).mean(),
                                   optax.adam(1e-2), workers=workers)
  batches = np.ones((4, 5, 2, 6), np.float32)
  executables = round_fn.compile(init({"w": np.ones((6, 7), np.float32)}), batches, measured=(False,))
  (run,) = executables.values()
  found = aot.read_round(run.as_text(), workers, round_fn.method, 5)
  assert found.total(EXPOSED) == found.total(BLOCKING) == 4 * 6 * 7 and found.total(OVERLAPPED) == 0
  said = []
  monkeypatch.setattr(train.logging, "warning", lambda text, *values: said.append(text % values))
  train.report_overlap(executables, workers, round_fn.method, 5)
  assert len(said) == 1 and "Mix1 blocks" in said[0]
  train.report_overlap({(False, None): None}, workers, round_fn.method, 5)
  assert "could not be read" in said[1]
