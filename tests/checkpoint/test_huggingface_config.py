"""config.json ↔ ModelConfig: both dialects, and what must not be taken for M2."""

import dataclasses
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.checkpoint import CheckpointMismatch, CorruptCheckpoint
from m2jax.checkpoint.huggingface import config as config_lib
from m2jax.config import REMAT, ModelConfig, m2, tiny

# facts/m2-and-forge.md §1.1: what several copies of the released file agree on.
RELEASED = {
  'architectures': ['MiniMaxM2ForCausalLM'],
  'model_type': 'minimax_m2',
  'num_hidden_layers': 62,
  'hidden_size': 3072,
  'num_attention_heads': 48,
  'num_key_value_heads': 8,
  'head_dim': 128,
  'intermediate_size': 1536,
  'num_local_experts': 256,
  'num_experts_per_tok': 8,
  'shared_intermediate_size': 0,
  'scoring_func': 'sigmoid',
  'use_routing_bias': True,
  'rotary_dim': 64,
  'rope_theta': 5_000_000,
  'use_qk_norm': True,
  'qk_norm_type': 'per_layer',
  'rms_norm_eps': 1e-6,
  'attention_bias': False,
  'tie_word_embeddings': False,
  'hidden_act': 'silu',
  'vocab_size': 200_064,
  'max_position_embeddings': 196_608,
  'attn_type_list': [1] * 62,
  'use_mtp': True,
  'num_mtp_modules': 3,
  'mtp_transformer_layers': 1,
  'torch_dtype': 'bfloat16',
  'quantization_config': {
    'quant_method': 'fp8',
    'fmt': 'float8_e4m3fn',
    'activation_scheme': 'dynamic',
    'weight_block_size': [128, 128],
    'modules_to_not_convert': ['gate', 'e_score_correction_bias', 'lm_head'],
  },
}


def without(*names):
  return {k: v for k, v in RELEASED.items() if k not in names}


def test_released():
  """The released file is the preset `m2()`, with the three modules it promises."""
  cfg, block = config_lib.decode(RELEASED)
  assert block == (128, 128)
  want = dataclasses.replace(m2(), num_mtp_modules=3, param_dtype='bfloat16')
  assert dataclasses.replace(cfg, remat='layer') == want


@pytest.mark.parametrize(
  ('rope', 'rotary_dim'),
  [
    ({'rope_theta': 1e4, 'rope_type': 'default', 'partial_rotary_factor': 0.5}, 64),
    ({'rope_theta': 1e4, 'rope_type': 'default'}, 128),
    ({'rope_theta': 1e4, 'partial_rotary_factor': 6 / 128}, 6),
  ],
)
def test_transformers_dialect(rope, rotary_dim):
  """Without a partial factor the whole head rotates."""
  values = {**without('rotary_dim', 'rope_theta'), 'rope_parameters': rope}
  cfg, _ = config_lib.decode(values)
  assert (cfg.rotary_dim, cfg.rope_theta) == (rotary_dim, 1e4)


@st.composite
def configs(draw):
  """Any small model; head and rotary sizes at which h·(r/h) is not r in floating
  point are among them."""
  size = st.integers(1, 9)
  kv_heads, experts = draw(size), draw(size)
  head_dim = draw(st.integers(2, 300))
  return ModelConfig(
    vocab_size=draw(st.integers(1, 300_000)),
    num_layers=draw(size),
    embed_dim=draw(size),
    num_heads=kv_heads * draw(size),
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    rotary_dim=2 * draw(st.integers(1, head_dim // 2)),
    rope_theta=draw(st.floats(1.5, 1e8)),
    num_experts=experts,
    experts_per_token=draw(st.integers(1, experts)),
    expert_dim=draw(size),
    num_mtp_modules=draw(st.integers(0, 3)),
    dtype=draw(st.sampled_from(['float32', 'bfloat16'])),
    param_dtype=draw(st.sampled_from(['float32', 'bfloat16'])),
    remat=draw(st.sampled_from(REMAT)),
    unroll_layers=draw(st.booleans()),
  )


@given(configs())
def test_round_trip(cfg):
  """Every field comes back, in both dialects alone, and transformers, which truncates
  head_dim · factor, rotates as many dims as this model."""
  values = json.loads(json.dumps(config_lib.encode(cfg, cfg.param_dtype, {})))
  assert config_lib.decode(values).cfg == cfg
  rope = values['rope_parameters']
  assert int(cfg.head_dim * rope['partial_rotary_factor']) == cfg.rotary_dim
  for names in (('rope_parameters',), ('rotary_dim', 'rope_theta')):
    half = {k: v for k, v in values.items() if k not in names}
    assert config_lib.decode(half).cfg == cfg
  assert all(
    values[name] is None or values[name] < cfg.vocab_size
    for name in ('bos_token_id', 'eos_token_id')
  )


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'model_type': 'mixtral'}, "model_type='mixtral'"),
    ({'tie_word_embeddings': True}, 'tie_word_embeddings=True'),
    ({'attention_bias': True}, 'attention_bias=True'),
    ({'qk_norm_type': 'per_head'}, "qk_norm_type='per_head'"),
    ({'use_qk_norm': False}, 'use_qk_norm=False'),
    ({'scoring_func': 'softmax'}, "scoring_func='softmax'"),
    ({'use_routing_bias': False}, 'use_routing_bias=False'),
    ({'shared_intermediate_size': 64}, 'shared_intermediate_size=64'),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu'"),
    ({'attn_type_list': [0, 1]}, 'attn_type_list'),
    ({'mtp_transformer_layers': 2}, 'mtp_transformer_layers=2'),
    ({'hidden_size': None}, 'missing fields: hidden_size'),
    ({'num_attention_heads': 47}, 'num_heads=47'),
    ({'hidden_size': 'many'}, "hidden_size='many'"),
    ({'rotary_dim': [64]}, 'rotary_dim=[64]'),
    ({'torch_dtype': 'float16'}, "'float16'"),
    ({'rope_parameters': {'rope_type': 'yarn'}}, "rope_type='yarn'"),
    ({'rope_scaling': {'type': 'linear'}}, "rope_type='linear'"),
    ({'rope_parameters': {'partial_rotary_factor': 1.0}}, 'contradict'),
    ({'quantization_config': {'quant_method': 'gptq'}}, "quant_method='gptq'"),
    (
      {'quantization_config': {'quant_method': 'fp8', 'weight_block_size': [128]}},
      'weight_block_size',
    ),
  ],
)
def test_other_models_are_refused(change, message, tmp_path):
  """Loaded as M2 they would run, and compute something else."""
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(RELEASED | change))
  with pytest.raises(CheckpointMismatch) as error:
    config_lib.read(tmp_path)
  assert message in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
  'change', [dict(window=8, full_attention_every=2), dict(router_scores='softmax')]
)
def test_variants_are_not_written(change):
  """The format has no words for them: read back they would be another model."""
  cfg = dataclasses.replace(tiny(), **change)
  with pytest.raises(ValueError, match=next(iter(change))):
    config_lib.encode(cfg, 'float32', {})


@pytest.mark.parametrize('content', ['', '{', '[1]'])
def test_no_json(content, tmp_path: pathlib.Path):
  (tmp_path / 'config.json').write_text(content)
  with pytest.raises(CorruptCheckpoint, match=r'config\.json'):
    config_lib.read(tmp_path)
