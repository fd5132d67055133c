"""Law 6: the mesh does not change the answer; and what it costs in collectives.

One process of 32 virtual devices runs a mesh of all axes, another the long cases, a
third those of `make test-thorough`.
"""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import sharding
from m2jax.moe import exchange
from tests import processes
from tests.sharding import mesh_worker, small

ALL = 'all axes'
LONG = (
  'data',
  'fsdp',
  'tensor',
  'context',
  'expert',
  'expert, gathered',
  'steps:adam',
  'update:muon_sphere',
  'resume:sso',
)
THOROUGH = (
  'fsdp expert',
  'tensor context',
  'serve',
  'unrolled',
  'few experts a device',
  'float32',
  'bfloat16',
  'steps:muon',
  'update:sso',
  'update:nor_muon',
  'update:hyperball',
)
# float32 has more terms to add in another order than law 3's samples; in bfloat16 each
# device rounds its part of a sum, where one device is up to 6e-2 from its own float32.
TOLERANCE = {'float32': 1e-5, 'bfloat16': 4e-2}
CFG = small.config()
AXES = ('data', 'fsdp', 'expert', 'tensor', 'context')
TOKENS = 8 * small.ROW_TOKENS


def run(names, timeout_s):
  child = processes.run('tests.sharding.mesh_worker', *names, timeout_s=timeout_s)
  lines = [json.loads(line) for line in child.stdout.splitlines()]
  assert [line['case'] for line in lines] == list(names), child.stderr[-3000:]
  return {line['case']: line for line in lines}


@pytest.fixture(scope='module')
def short():
  return run((ALL,), 900)


@pytest.fixture(scope='module')
def long():
  return run(LONG, 1800)


@pytest.fixture(scope='module')
def thorough():
  return run(THOROUGH, 2700)


def check(result, name):
  leaf, error = result['worst']
  assert error < TOLERANCE.get(name, 1e-10), leaf
  if 'steps' in name:
    assert not result['moved']
  else:
    assert result['leaves'] > 15
    assert name in TOLERANCE or not any(result['loads'].values())


def test_one_device_is_many(short):
  """Loss, every gradient leaf, metrics and expert loads (exactly) are one device's, on
  a mesh of two devices along each axis."""
  assert set(mesh_worker.CASES[ALL].mesh.values()) == {2}
  assert set(mesh_worker.CASES[ALL].mesh) == set(AXES)
  check(short[ALL], ALL)


@pytest.mark.long
@pytest.mark.parametrize('name', LONG)
def test_one_device_is_many_along_each_axis(long, name):
  """The same for more devices along one axis; two optimizer steps leave the same state,
  each leaf where it was; a checkpoint of SSO's resumes on another mesh."""
  check(long[name], name)


@pytest.mark.thorough
@pytest.mark.parametrize('name', THOROUGH)
def test_one_device_is_many_in_other_ways(thorough, name):
  """The same for more shares of an axis, unlike loops over layers, less precision and
  every optimizer."""
  check(thorough[name], name)


def test_padded_exchange_is_the_ragged_one():
  """CPU has no ragged all-to-all; its stand-in does what the documentation of
  `lax.ragged_all_to_all` says, by its own example."""
  where = sharding.make(sharding.MeshConfig(expert=2))
  rows = where.rules.spec('rows', 'experts')

  def one(operand, start, sent, to, got):
    return exchange.padded_all_to_all(
      operand,
      jnp.zeros((4, 1)),
      input_offsets=start,
      send_sizes=sent,
      output_offsets=to,
      recv_sizes=got,
      axis_name=where.axes('experts'),
    )

  plan = np.array([[0, 1, 0, 1], [1, 2, 1, 1], [0, 0, 1, 2], [1, 1, 2, 1]])
  sent = np.array([1.0, 2, 2, 3, 4, 0])[:, None]
  received = jax.jit(where.shard_map(one, (rows,) * 5, rows))(sent, *plan)
  assert received[:, 0].tolist() == [1, 3, 0, 0, 2, 2, 4, 0]


def by_operation(result):
  """{operation: [[(axes…), …] of each instance]}."""
  found: dict[str, list[list[tuple[int, ...]]]] = {}
  for operation, shapes in result['collectives']:
    sizes = [
      tuple(int(n) for n in shape.split('[')[1].rstrip(']').split(',') if n)
      for shape in shapes
    ]
    found.setdefault(operation, []).append(sizes)
  return found


def elements(instances):
  return sum(math.prod(shape) for shapes in instances for shape in shapes)


def test_each_axis_moves_what_is_its(short):
  """In one program: weights are gathered over fsdp one layer at a time and not the
  table; the residual stream over tensor, as often as it is scattered; keys and values
  over context, no queries; tokens reach experts by all-to-all. What is all-reduced is
  gradients, each once, and numbers of tokens."""
  found = by_operation(short[ALL])
  shapes = {k: [s for instance in v for s in instance] for k, v in found.items()}
  gathered, scattered = shapes['all-gather'], shapes['reduce-scatter']
  device = TOKENS // 16  # a tensor group's
  expert = (CFG.num_experts // 2, CFG.embed_dim, CFG.expert_dim // 2)
  q = (CFG.embed_dim, CFG.num_heads * CFG.head_dim // 2)
  assert gathered.count(expert) in (6, 8) and gathered.count(q) in (3, 4)
  assert not any(shape[0] == CFG.num_layers for shape in gathered if len(shape) > 2)
  assert (CFG.vocab_size // 2, CFG.embed_dim) not in gathered
  assert gathered.count((device, CFG.embed_dim)) == 2 * (2 + 2 + 1)
  assert scattered.count((device // 2, CFG.embed_dim)) == 2 * (2 + 2 + 1)
  kv = (1, small.ROW_TOKENS, CFG.num_kv_heads // 2, CFG.head_dim)
  assert kv in gathered and (1, device, *kv[2:]) in scattered
  assert not any(shape[2:] == (CFG.num_heads // 2, CFG.head_dim) for shape in gathered)
  assert elements(found['all-to-all']) > device * CFG.embed_dim
  summed = shapes['all-reduce']
  stacks = [shape for shape in summed if len(shape) == 4]
  assert len(stacks) == 6  # gate, up and down of the layers and of the module
  assert not any(shape[-2:] == (device, CFG.embed_dim) for shape in summed)


@pytest.mark.long
def test_data_parallelism_is_one_sum_of_gradients(long):
  """Nothing but all-reduces: one of all gradients, and of loads and metrics."""
  found = by_operation(long['data'])
  assert set(found) == {'all-reduce'}
  gradients = [s for s in found['all-reduce'] if (CFG.vocab_size, CFG.embed_dim) in s]
  assert len(gradients) == 1
  rest = [s for s in found['all-reduce'] if s not in gradients]
  assert len(rest) <= 3 and elements(rest) < 100


@pytest.mark.long
def test_fsdp_gathers_layer_by_layer(long):
  """Weights are gathered one layer at a time, never as a stack, and again in the
  backward pass rather than kept; their gradients are scattered (XLA keeps the
  reduce-scatter on CPU); only norms, loads and scalars, which lie on every device, are
  all-reduced."""
  found = by_operation(long['fsdp'])
  assert set(found) == {'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all'}
  gathered = {shape for shapes in found['all-gather'] for shape in shapes}
  expert = (CFG.num_experts, CFG.embed_dim, CFG.expert_dim)
  q = (CFG.embed_dim, CFG.num_heads * CFG.head_dim)
  for weight in (expert, q):  # gate and up; in layers twice, and in the MTP module,
    # a loop of one turn, twice or, where XLA merges them, once
    count = sum(shapes == [weight] for shapes in found['all-gather'])
    assert count in ((6, 8) if weight == expert else (3, 4))
  assert not any(shape[0] == CFG.num_layers for shape in gathered)
  assert elements(found['all-reduce']) < 1000 < CFG.vocab_size * CFG.embed_dim
  # The table is not gathered for a lookup: ids go out, channels come back.
  assert (CFG.vocab_size, CFG.embed_dim) not in gathered
  assert (TOKENS,) in gathered


@pytest.mark.long
def test_tensor_parallelism_splits_the_residual_stream(long):
  """Tokens are gathered before attention and before the experts, with their routing,
  and scattered after: nothing of the residual stream is all-reduced, and no logits, q,
  k or weights cross devices. What is summed: QK-norm's two numbers a token, the head's
  few, and the gradients of parameters that all devices have."""
  found = by_operation(long['tensor'])
  assert set(found) == {'all-reduce', 'all-gather', 'reduce-scatter'}
  shapes = {k: [s for instance in v for s in instance] for k, v in found.items()}
  whole, part = (TOKENS, CFG.embed_dim), (TOKENS // 4, CFG.embed_dim)
  # 2 in a layer and an MTP module, and their final states; as often backward, where
  # what was scattered is gathered
  assert shapes['all-gather'].count(whole) == 2 * (2 + 2 + 1)
  assert shapes['reduce-scatter'].count(part) == 2 * (2 + 2 + 1)
  routing = (TOKENS, CFG.experts_per_token)
  assert set(shapes['all-gather']) == {whole, (1, *whole), routing}
  summed = shapes['all-reduce']
  assert (TOKENS, 2) in summed
  assert not any(shape[-2:] in (whole, part) for shape in summed)
  assert not any(
    {CFG.vocab_size, CFG.vocab_size // 4} & set(shape)
    for instance in shapes.values()
    for shape in instance
  )


@pytest.mark.long
def test_experts_are_reached_by_all_to_all(long):
  """Tokens travel by all-to-all and nothing but counts is gathered; expert weights stay
  where they are. The gathered way moves tokens by all-gather and reduce-scatter."""
  found = by_operation(long['expert'])
  assert elements(found['all-gather']) < 1000 and 'reduce-scatter' not in found
  assert elements(found['all-to-all']) > TOKENS * CFG.embed_dim
  summed = {shape[-3:] for shapes in found['all-reduce'] for shape in shapes}
  assert (CFG.num_experts // 4, CFG.embed_dim, CFG.expert_dim) not in summed
  other = by_operation(long['expert, gathered'])
  assert 'all-to-all' not in other
  assert [(TOKENS, CFG.embed_dim)] in other['all-gather']
  assert [(TOKENS // 4, CFG.embed_dim)] in other['reduce-scatter']


@pytest.mark.long
def test_context_gathers_keys_and_values(long):
  """K and V of whole rows are gathered, and d_k, d_v scattered; queries stay."""
  found = by_operation(long['context'])
  kv = (8, small.ROW_TOKENS, CFG.num_kv_heads, CFG.head_dim)
  assert [kv] in found['all-gather']
  shard = (8, small.ROW_TOKENS // 4, CFG.num_kv_heads, CFG.head_dim)
  assert [shard] in found['reduce-scatter']
  gathered = [shape for shapes in found['all-gather'] for shape in shapes]
  assert not any(CFG.num_heads in shape[2:] for shape in gathered if len(shape) == 4)


@pytest.mark.long
def test_matrices_are_exchanged_not_gathered(long):
  """An optimizer that needs whole matrices: parts travel by all-to-all, of as many
  matrices as devices, so that each device holds one of each. Nothing as large as a
  matrix of experts is gathered: only singular vectors, and the results of attention's
  matrices, which the expert axis replicates and therefore divides."""
  found = by_operation(long['update:muon_sphere'])
  assert 'all-to-all' in found
  matrix = CFG.embed_dim * CFG.expert_dim
  for shapes in (*found.get('all-gather', []), *found.get('all-reduce', [])):
    assert elements([shapes]) < matrix, shapes
  heads = CFG.num_layers * CFG.num_heads // 2
  assert [(heads, CFG.embed_dim // 2, CFG.head_dim)] in found['all-gather']
