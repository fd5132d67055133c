"""Live against transformers: what it writes we read, what we write it reads.

Needs the `parity` extra. golden/ holds four such comparisons for everybody.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax.checkpoint import huggingface
from m2jax.checkpoint.huggingface import fp8, names
from m2jax.text import chat, tokenizer
from tests.checkpoint import parity, test_huggingface

pytestmark = [pytest.mark.torch, pytest.mark.long]
SEEDS = range(100, 104)


@pytest.fixture(scope='module', autouse=True)
def libraries():
  """Imported when a test runs: that takes seconds."""
  global torch, transformers, make_golden
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  from tests.checkpoint import make_golden


def from_pretrained(directory, **kwargs):
  """The model, and what transformers found odd about the files."""
  return transformers.MiniMaxM2ForCausalLM.from_pretrained(
    directory,
    attn_implementation='eager',
    experts_implementation='eager',
    output_loading_info=True,
    **kwargs,
  )


@pytest.mark.parametrize('seed', SEEDS)
def test_theirs(seed, tmp_path):
  """Logits and gradients of what transformers wrote, on other shapes than golden/."""
  made = make_golden.model(seed)
  make_golden.save(made, seed, tmp_path)
  cfg, variables = huggingface.load(tmp_path)
  parity.check(cfg, variables, make_golden.computed(made, seed))


@pytest.mark.parametrize('seed', SEEDS)
def test_ours(seed, tmp_path):
  """What we wrote, in shards and with MTP modules, loads without a missing key and
  computes the same; the modules are all that transformers leaves out."""
  made = make_golden.model(seed)
  make_golden.save(made, seed, tmp_path / 'theirs')
  cfg, _ = huggingface.load(tmp_path / 'theirs')
  cfg = dataclasses.replace(cfg, num_mtp_modules=seed % 3)
  variables = test_huggingface.random_variables(cfg, seed)
  huggingface.save(tmp_path / 'ours', cfg, variables, max_shard_bytes=20_000)
  loaded, about = from_pretrained(tmp_path / 'ours')
  assert not about['missing_keys'] and not about['mismatched_keys']
  assert all(k.startswith(names.MTP_PREFIX) for k in about['unexpected_keys'])
  assert bool(about['unexpected_keys']) == bool(cfg.num_mtp_modules)
  assert loaded.dtype == torch.float32
  plain = dataclasses.replace(cfg, num_mtp_modules=0)
  variables['params'].pop('mtp', None)
  variables['router'].pop('mtp', None)
  parity.check(plain, variables, make_golden.computed(loaded, seed))


def test_bfloat16(tmp_path):
  """`dtype='auto'` takes the dtype from config.json; weights arrive bit for bit, the
  router's as fp32, which it may round."""
  made = make_golden.model(0)
  make_golden.save(made, 0, tmp_path / 'theirs')
  cfg, variables = huggingface.load(tmp_path / 'theirs')
  huggingface.save(tmp_path / 'ours', cfg, variables, dtype='bfloat16')
  loaded, _ = from_pretrained(tmp_path / 'ours', dtype='auto')
  assert loaded.dtype == torch.bfloat16
  named = {k: v.bfloat16().float() for k, v in loaded.named_parameters()}
  want = {k: v.bfloat16().float() for k, v in made.named_parameters()}
  for name, value in make_golden.released_names(want).items():
    np.testing.assert_array_equal(make_golden.released_names(named)[name], value)


def test_fp8(tmp_path):
  """transformers dequantises a block-FP8 checkpoint on CPU to the same weights.

  Its dequantisation takes only sizes that are multiples of the block, or below it.
  """
  pytest.importorskip('accelerate')
  cfg = dataclasses.replace(
    test_huggingface.CFG,
    embed_dim=256,
    expert_dim=128,
    num_heads=4,
    head_dim=64,
    num_layers=1,
    num_mtp_modules=0,
  )
  variables = test_huggingface.random_variables(cfg)
  huggingface.save(tmp_path / 'full', cfg, variables)
  tensors = test_huggingface.files_of(tmp_path / 'full')
  stored, _ = test_huggingface.TestFp8.quantise(tensors, (128, 128))
  values = json.loads((tmp_path / 'full' / 'config.json').read_text())
  values['quantization_config'] = {
    'quant_method': 'fp8',
    'activation_scheme': 'dynamic',
    'weight_block_size': [128, 128],
    'modules_to_not_convert': ['gate', 'e_score_correction_bias', 'lm_head'],
  }
  directory = tmp_path / 'fp8'
  directory.mkdir()
  test_huggingface.save_file(stored, directory / 'model.safetensors', {'format': 'pt'})
  (directory / 'config.json').write_text(json.dumps(values))
  assert any(name.endswith(fp8.SCALE_SUFFIX) for name in stored)
  loaded, about = from_pretrained(directory, dtype='float32')
  assert not about['missing_keys'] and not about['unexpected_keys']
  _, ours = huggingface.load(directory, dtype='float32')
  huggingface.save(tmp_path / 'ours', cfg, ours)
  ours = test_huggingface.files_of(tmp_path / 'ours')
  named = {k: v.float() for k, v in loaded.named_parameters()}
  for name, value in make_golden.released_names(named).items():
    np.testing.assert_array_equal(ours[name], value, err_msg=name)


def exported(directory, **changes):
  """Writes a whole folder, `out`, of a small model; its tokenizer."""
  path = directory / 'tokenizer.json'
  tokenizer.train(['some text, and some more'], 300).save(path)
  cfg = dataclasses.replace(test_huggingface.CFG, vocab_size=300, **changes)
  variables = test_huggingface.random_variables(cfg)
  huggingface.save(directory / 'out', cfg, variables, tokenizer=path.read_bytes())
  return tokenizer.load(path)


def test_tokenizer(tmp_path):
  """AutoTokenizer reads the exported directory, and encodes as we do."""
  ours = exported(tmp_path)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
  text = 'some more text\n'
  assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
  assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)


def test_an_export_chats_and_generates(tmp_path):
  """The whole folder, MTP module and all, with transformers alone: its template
  prompts as the gateway does, and `generate` samples as the model is meant to be."""
  exported(tmp_path, num_mtp_modules=1)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
  messages = [{'role': 'user', 'content': 'some text'}]
  options = dict(add_generation_prompt=True, tokenize=False)
  prompt = theirs.apply_chat_template(messages, **options)
  assert prompt == chat.render(messages, add_generation_prompt=True)
  loaded, _ = from_pretrained(tmp_path / 'out')
  sampled = loaded.generation_config
  assert (sampled.do_sample, sampled.top_p, sampled.top_k) == (True, 0.95, 40)
  ids = theirs(prompt, add_special_tokens=False, return_tensors='pt')
  out = loaded.generate(**ids, max_new_tokens=4)
  assert out.shape[1] > ids['input_ids'].shape[1]


def test_generation(tmp_path):
  """transformers' own decoding, KV cache and all, picks the tokens that we would."""
  made = make_golden.model(1)
  make_golden.save(made, 1, tmp_path)
  cfg, variables = huggingface.load(tmp_path)
  prompt = np.array([[3, 5, 7, 9]])
  out = made.generate(
    torch.from_numpy(prompt), max_new_tokens=6, do_sample=False, eos_token_id=None
  )
  from m2jax import model

  logits = model.M2(cfg).apply(variables, jnp.asarray(out.numpy()[:, :-1]))
  picked = jax.device_get(jnp.argmax(logits, axis=-1))[0, 3:]
  np.testing.assert_array_equal(picked, out.numpy()[0, 4:])
