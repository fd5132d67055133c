"""What the plan reads from compiled programs: loops, shapes, collectives, HBM bytes."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from m2jax import sharding
from m2jax.plan import chips, collectives, estimate, hlo, ici, plan, traffic
from tests import processes
from tests.plan import hlo_worker

W = hlo_worker.WIDTH
V5P = next(chip for chip in chips.CHIPS if chip.name == 'v5p')


@pytest.fixture(scope='module')
def found():
  child = processes.start('tests.plan.hlo_worker')
  ((out, err),) = processes.finish([child])
  lines = [json.loads(line) for line in out.splitlines()]
  assert len(lines) == len(hlo_worker.PROGRAMS), err[-3000:]
  return {line['case']: line['found'] for line in lines}


def test_collectives_in_a_loop_count_every_turn(found):
  """XLA's own analysis counts a loop once: the gather of a scanned layer's weights, and
  its transpose, must be there as often as there are layers, with all their bytes."""
  rows = {row[0]: row for row in found['gather_in_a_loop'] if row[0] != 'all-reduce'}
  whole = 4 * W * W
  along_a = [0, 2, 4, 6]
  assert rows['all-gather'] == ['all-gather', whole, along_a, hlo_worker.TURNS, False]
  expected = ['reduce-scatter', whole, along_a, hlo_worker.TURNS, False]
  assert rows['reduce-scatter'] == expected


def test_nested_loops_multiply(found):
  """A loop in a loop runs the product of their turns."""
  ((kind, size, group, times, _),) = [
    row for row in found['nested'] if row[0] != 'all-reduce'
  ]
  assert (kind, times) == ('collective-permute', hlo_worker.TURNS * hlo_worker.INNER)
  assert size == 4 * (hlo_worker.ROWS // 8) * W
  assert group == [0, 2]


def test_exchanges_have_their_bytes_and_groups(found):
  """An all-to-all counts what a device holds, a reduce-scatter what it starts from."""
  rows = {row[0]: row[1:3] for row in found['exchange']}
  rows_here = hlo_worker.ROWS // 8
  assert rows['all-to-all'] == [4 * rows_here * W, [0, 1]]
  assert rows['reduce-scatter'] == [4 * 2 * rows_here * (W // 4), [0, 1]]


LINE = '  %x = f32[8]{0} all-reduce(%y), channel_id=1, replica_groups='


@pytest.mark.parametrize(
  'notation, group',
  [
    ('{{0,4},{1,5},{2,6},{3,7}}', (0, 4)),
    ('{}', tuple(range(8))),
    ('[2,4]<=[8]', (0, 1, 2, 3)),
    ('[4,2]<=[2,4]T(1,0)', (0, 4)),
    ('[2,4]<=[2,2,2]T(1,0,2)', (0, 1, 4, 5)),
    ("mesh['data'=2,'fsdp'=4] {'data'}", (0, 4)),
    ("mesh['data'=2,'fsdp'=2,'expert'=2] {'data','expert'}", (0, 1, 4, 5)),
  ],
)
def test_groups_in_every_notation(notation, group):
  """Links are found from a group's members, however the compiler names them."""
  text = f'ENTRY %main (p: f32[8]) -> f32[8] {{\n{LINE}{notation}, to_apply=%add\n}}'
  (line,) = hlo.parse(text).computations['main']
  assert collectives.first_group(line, 8) == group


def test_groups_in_an_unknown_notation_are_refused():
  """Better no figure than one for the wrong links."""
  text = f'ENTRY %main (p: f32[8]) -> f32[8] {{\n{LINE}<new>, to_apply=%add\n}}'
  (line,) = hlo.parse(text).computations['main']
  with pytest.raises(ValueError, match='unknown notation: .*<new>'):
    collectives.first_group(line, 8)


ASYNC = """HloModule m, is_scheduled=true
%inside (p: bf16[64]) -> bf16[512] {
  %p = bf16[64]{0} parameter(0)
  ROOT %ag = bf16[512]{0} all-gather(%p), replica_groups={}, dimensions={0}
}
%dot (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}
}
ENTRY %main (p: bf16[64], a: f32[8,8]) -> bf16[512] {
  %p = bf16[64]{0} parameter(0)
  %a = f32[8,8]{1,0} parameter(1)
  %s = ((), (), s32[4]) custom-call-start(), called_computations={%inside}
  %u = ((bf16[512]), bf16[512]) custom-call-update(%s, %p)
  BETWEEN
  %done = bf16[512]{0} custom-call-done(%u)
  %start = (bf16[64], bf16[512]) all-gather-start(%p), replica_groups={}
  ROOT %last = bf16[512]{0} all-gather-done(%start)
}
"""


@pytest.mark.parametrize(
  'opcode, computation',
  [('custom-call', 'called_computations={%inside}'), ('call', 'to_apply=%inside')],
)
def test_asynchronous_calls_of_each_compiler(opcode, computation):
  """The compiler of jax 0.10 writes a call where that of jax 0.12 writes a custom call:
  a plan that reads only one of them loses every gather of the weights."""
  text = ASYNC.replace('custom-call', opcode).replace('BETWEEN', '')
  text = text.replace('called_computations={%inside}', computation)
  first, second = collectives.find(hlo.parse(text), 8)
  assert (first.kind, first.bytes, first.group) == ('all-gather', 1024, tuple(range(8)))
  assert first.asynchronous and second.asynchronous


@pytest.mark.parametrize('axis', ['fsdp', 'context'])
def test_weights_that_are_never_gathered_are_an_error(axis):
  """A notation that the parser does not know would make communication free."""
  mesh = sharding.abstract_mesh(sharding.MeshConfig(**{axis: 8}))
  sharded = sharding.Sharding(mesh, sharding.PRESETS['fsdp_ep'])
  module = hlo.parse(ASYNC.replace('BETWEEN', ''))
  plan.check_gathers('x: micro', module, sharded)
  none = hlo.parse(
    ASYNC.replace('BETWEEN', '')
    .replace('called_computations', 'new_name')
    .replace('all-gather-', 'new-')
  )
  plan.check_gathers('x: micro', none, sharding.Sharding())
  with pytest.raises(ValueError, match=f"x: micro: .*'{axis}': 8.* no all-gather"):
    plan.check_gathers('x: micro', none, sharded)


def test_a_synchronous_call_counts_once():
  """Its lines run as lines of their own: a collective found again through the call
  itself would count twice."""
  text = ASYNC.replace('BETWEEN', '%c = bf16[512]{0} call(%p), to_apply=%inside')
  found = collectives.find(hlo.parse(text), 8)
  assert [c.asynchronous for c in found].count(False) == 1


@pytest.mark.parametrize(
  'dtype, precision, products',
  [
    ('f32', '', 1),
    ('f32', ', operand_precision={high,high}', 3),
    ('f32', ', operand_precision={highest,highest}', 6),
    ('bf16', ', operand_precision={highest,highest}', 1),
  ],
)
def test_matmuls_of_fp32_are_several_of_bfloat16(dtype, precision, products):
  """At the highest precision six: an optimizer's matrix signs cost that."""
  module = hlo.parse(
    f"""HloModule m

ENTRY %main (a: {dtype}[8,4], b: {dtype}[4,16]) -> {dtype}[8,16] {{
  %a = {dtype}[8,4]{{1,0}} parameter(0)
  %b = {dtype}[4,16]{{1,0}} parameter(1)
  ROOT %c = {dtype}[8,16]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, DIMS
}}
""".replace('DIMS', 'rhs_contracting_dims={0}' + precision)
  )
  (work,) = traffic.work(module)
  assert work.flops == products * 2 * 8 * 4 * 16


@pytest.mark.parametrize(
  'between, flops',
  [('%n = f32[8,8]{1,0} negate(%a)', 0), ('%f = f32[8,8]{1,0} FUSION', 1024)],
)
def test_what_runs_beside_an_asynchronous_collective(between, flops):
  """An estimate that hides a collective which is started and at once waited for, or
  behind less work than there is, would promise what the program cannot do."""
  between = between.replace('FUSION', 'fusion(%a), kind=kOutput, calls=%dot')
  module = hlo.parse(ASYNC.replace('BETWEEN', between))
  first, second = collectives.find(module, 8)
  assert (first.kind, first.bytes, first.asynchronous) == ('all-gather', 1024, True)
  work = [i for i in first.overlapping if not i.opcode.startswith('custom-call')]
  assert [traffic.product_flops(module, i, {}) for i in work] == [flops]
  time = traffic.seconds(module, first.overlapping, 'main', V5P)
  hbm = 2 * 4 * 8 * 8 / V5P.hbm_bandwidth
  assert time == pytest.approx(max(hbm, flops / V5P.peak_flops))
  assert (second.bytes, second.asynchronous, second.overlapping) == (1024, True, ())


ROOFS = """ENTRY %main (a: f32[512,512], b: f32[4096]) -> f32[4096] {
  %a = f32[512,512]{1,0} parameter(0)
  %b = f32[4096]{0} parameter(1)
  %d = f32[512,512]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %n = f32[4096]{0} negate(%b)
}
"""


def test_every_instruction_has_its_own_roof():
  """A matmul does not hide the bytes of the next instruction of its stage, which would
  promise time that the program takes."""
  matmul, negate = traffic.work(hlo.parse(ROOFS))
  assert matmul.stage == negate.stage == ('forward', 'rest')
  assert (matmul.flops, matmul.hbm_bytes) == (2 * 512**3, 3 * 4 * 512**2)
  assert (negate.flops, negate.hbm_bytes) == (0, 2 * 4 * 4096)
  padded = 40 * matmul.flops
  (stage,) = estimate.stages([matmul, negate], {matmul.stage: padded}, V5P)
  assert stage.compute_bound_s == pytest.approx(padded / V5P.peak_flops)
  assert stage.hbm_bound_s == pytest.approx(negate.hbm_bytes / V5P.hbm_bandwidth)
  assert padded / V5P.peak_flops > matmul.hbm_bytes / V5P.hbm_bandwidth


RAGGED = """%inside (p: bf16[64], q: bf16[512]) -> bf16[512] {
  %p = bf16[64]{0} parameter(0)
  %q = bf16[512]{0} parameter(1)
  ROOT %r = bf16[512]{0} ragged-all-to-all(%p, %q), replica_groups={}
}
ENTRY %main (p: bf16[64], q: bf16[512]) -> bf16[64] {
  %p = bf16[64]{0} parameter(0)
  %q = bf16[512]{0} parameter(1)
  %s = ((bf16[64], bf16[512]), bf16[512]) async-start(%p, %q), calls=%inside
  %d = bf16[512]{0} async-done(%s)
  %t = ((bf16[64], bf16[512]), bf16[512]) ragged-all-to-all-start(%p, %q), replica_groups={}
  %e = bf16[512]{0} ragged-all-to-all-done(%t)
  ROOT %back = bf16[64]{0} ragged-all-to-all(%d, %p), replica_groups={}
}
"""  # noqa: E501


def test_a_ragged_exchange_counts_what_is_sent():
  """Its larger buffer has room for the worst case, which does not travel: 8 times too
  much here, there and back, and however the compiler spells it."""
  found = collectives.find(hlo.parse(RAGGED), 8)
  assert [c.bytes for c in found] == [128, 128, 128]
  assert [c.asynchronous for c in found] == [True, True, False]


def test_padding_of_tiles_counts():
  """A piece of 6 rows takes 8 in HBM: D split too finely costs memory."""
  text = 'bf16[256,6,1536]{2,1,0:T(8,128)(2,1)S(1)}'
  (array,) = hlo.arrays(text)
  assert array.bytes == 2 * 256 * 6 * 1536
  assert array.padded_bytes == 2 * 256 * 8 * 1536
  assert array.space == 1
  (column,) = hlo.arrays('f32[3072,48]{0,1:T(8,128)}')
  assert column.padded_bytes == 4 * 3072 * 48


def test_traffic_counts_slices_and_loops():
  """Of stacked weights a turn reads its own layer; else the plan would charge a layer
  with the whole model, L times."""
  layers, rows = 7, 96

  def f(x, w):
    def turn(x, w):
      return jnp.tanh(x @ w), None

    return jax.lax.scan(turn, x, w)[0]

  w = jax.ShapeDtypeStruct((layers, 256, 256), jnp.float32)
  x = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
  module = hlo.parse(jax.jit(f).lower(x, w).compile().as_text())
  moved = sum(w.times * w.hbm_bytes for w in traffic.work(module))
  weights, activations = 4 * layers * 256 * 256, 4 * layers * rows * 256
  assert weights <= moved <= 3 * weights + 8 * activations
  dots = [v for v in hlo.walk(module) if v.times == layers]
  assert dots


def grid(*sides):
  points = [()]
  for side in sides:
    points = [(*p, i) for p in points for i in range(side)]
  return points


def test_links_of_a_ring_a_line_and_a_torus():
  """Against the scaling book's formulas, by hand: W one way, V = 1 GB."""
  W, V, shape = V5P.link_bandwidth, 1e9, (8, 8, 8)
  ring = [(0, 0, i) for i in range(8)]
  gather = ici.seconds('all-gather', V, ring, shape, V5P)
  assert gather == pytest.approx(7 / 8 * V / (2 * W))
  assert ici.seconds('all-reduce', V, ring, shape, V5P) == pytest.approx(2 * gather)
  torus = ici.seconds('all-gather', V, grid(8, 8, 8), shape, V5P)
  assert torus == pytest.approx(511 / 512 * V / (6 * W))
  line = ici.seconds('all-gather', V, ring[:4], shape, V5P)
  assert line == pytest.approx(3 / 4 * V / W)
  strided = ici.seconds('all-gather', V, ring[::2], shape, V5P)
  assert strided == pytest.approx(3 / 4 * V / W)  # two groups share the ring
  exchange = ici.seconds('all-to-all', V, ring, shape, V5P)
  assert exchange == pytest.approx(V * 8 / (8 * W))
  # by counting: each chip sends V/8 to each, on average 2 links far, over 16 links
  assert exchange == pytest.approx(8 * V * 2 / (16 * W))


HIDDEN = """%inside (p: bf16[64]) -> bf16[4194304] {
  %p = bf16[64]{0} parameter(0)
  ROOT %g = bf16[4194304]{0} all-gather(%p), replica_groups={}, dimensions={0}
}
ENTRY %main (p: bf16[64], a: f32[512,512]) -> bf16[4194304] {
  %p = bf16[64]{0} parameter(0)
  %a = f32[512,512]{1,0} parameter(1)
  %s = ((bf16[64]), bf16[4194304]) async-start(%p), calls=%inside
  %d = f32[512,512]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %e = bf16[4194304]{0} async-done(%s)
}
"""


def test_bytes_of_a_collective_take_no_time_of_their_own():
  """They move while its links are busy: a gather that a matmul hides would count a
  second time, as an instruction between the two."""
  work = traffic.work(hlo.parse(HIDDEN))
  gather, matmul = work
  assert gather.communicates and gather.hbm_bytes == 2 * 2 * 4194304
  assert not matmul.communicates
  (stage,) = estimate.stages(work, {}, V5P)
  assert stage.hbm_bytes == gather.hbm_bytes + matmul.hbm_bytes
  assert stage.seconds == matmul.hbm_bytes / V5P.hbm_bandwidth
