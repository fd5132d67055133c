"""Remakes tests/checkpoint/golden: tiny models of transformers, and what they compute.

transformers' MiniMaxM2ForCausalLM is the authority; it and torch are not needed to run
the tests. Remake the files in an environment with the `parity` extra:

  pip install -e '.[parity,test]' && python -m tests.checkpoint.make_golden

Per case a directory as `save_pretrained` writes it (for half of the cases config.json
is rewritten in the released dialect), and expected.safetensors: tokens [B, S], logits
[B, S, V] and, under `grad.` and the released names, the gradient of the mean next-token
loss.
"""

import json
import pathlib
import shutil

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

GOLDEN = pathlib.Path(__file__).parent / 'golden'
SEEDS = range(4)


def shape(seed: int) -> dict:
  """Fields of a random small config, `rotary_dim` and `rope_theta` on top."""
  rng = np.random.default_rng(seed)
  kv_heads, head_dim = int(rng.integers(1, 4)), int(rng.choice([8, 12, 16]))
  experts = int(rng.integers(3, 7))
  rotary = head_dim if seed == 2 else int(2 * rng.integers(1, head_dim // 2))
  return {
    'vocab_size': int(rng.integers(24, 48)),
    'hidden_size': int(rng.integers(10, 24)),
    'intermediate_size': int(rng.integers(6, 14)),
    'num_hidden_layers': int(rng.integers(1, 4)),
    'num_attention_heads': kv_heads * (seed % 4 + 1),
    'num_key_value_heads': kv_heads,
    'head_dim': head_dim,
    'num_local_experts': experts,
    'num_experts_per_tok': int(rng.integers(2, experts + 1)),
    'max_position_embeddings': 64,
    'rms_norm_eps': float(rng.choice([1e-6, 1e-3])),
    'rope_theta': float(rng.choice([100.0, 5e6])),
    'rotary_dim': rotary,
  }


def model(seed: int) -> transformers.MiniMaxM2ForCausalLM:
  """A model with every parameter and the router bias away from its initial value."""
  fields = shape(seed)
  rotary, theta = fields.pop('rotary_dim'), fields.pop('rope_theta')
  rope = {'rope_type': 'default', 'rope_theta': theta}
  if rotary != fields['head_dim']:
    rope['partial_rotary_factor'] = rotary / fields['head_dim']
  config = transformers.MiniMaxM2Config(
    **fields,
    rope_parameters=rope,
    bos_token_id=1,
    eos_token_id=2,
    attn_implementation='eager',
    experts_implementation='eager',  # the others want sizes of 16 bytes
    dtype='float32',
  )
  made = transformers.MiniMaxM2ForCausalLM(config).float().eval()
  rng = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, value in [*made.named_parameters(), *made.named_buffers()]:
      if 'inv_freq' in name:
        continue
      noise = torch.randn(value.shape, generator=rng)
      value.copy_(1 + 0.2 * noise if 'norm' in name else 0.3 * noise)
  return made


def save(made: transformers.MiniMaxM2ForCausalLM, seed: int, directory: pathlib.Path):
  """As transformers writes it; odd seeds in several files, with the released config."""
  made.save_pretrained(directory, max_shard_size='24KB' if seed % 2 else '1GB')
  (directory / 'generation_config.json').unlink(missing_ok=True)
  if not seed % 2:
    return
  path = directory / 'config.json'
  fields = json.loads(path.read_text())
  del fields['rope_parameters']
  fields.update(
    rope_theta=shape(seed)['rope_theta'],
    rotary_dim=shape(seed)['rotary_dim'],
    torch_dtype=fields.pop('dtype'),
    attn_type_list=[1] * fields['num_hidden_layers'],
    qk_norm_type='per_layer',
    scoring_func='sigmoid',
    shared_intermediate_size=0,
    use_qk_norm=True,
    use_routing_bias=True,
    use_mtp=True,
    num_mtp_modules=3,
    mtp_transformer_layers=1,
  )
  path.write_text(json.dumps(fields, indent=2) + '\n')


def released_names(named: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
  """Tensors of the model in memory under the names of the files."""
  out = {}
  for name, value in named.items():
    array = value.detach().numpy()
    name = name.replace('.mlp.', '.block_sparse_moe.')
    stem = name.rpartition('.')[0]
    if name.endswith('gate_up_proj'):
      hidden = array.shape[1] // 2
      for e, both in enumerate(array):
        out[f'{stem}.{e}.w1.weight'] = both[:hidden].copy()
        out[f'{stem}.{e}.w3.weight'] = both[hidden:].copy()
    elif name.endswith('experts.down_proj'):
      out |= {f'{stem}.{e}.w2.weight': one.copy() for e, one in enumerate(array)}
    else:
      out[name] = array.copy()
  return out


def computed(made: transformers.MiniMaxM2ForCausalLM, seed: int) -> dict:
  """Tokens, logits, and the gradient of the mean next-token loss."""
  rng = np.random.default_rng(seed + 1000)
  tokens = rng.integers(0, made.config.vocab_size, (2, 10))
  made.zero_grad()
  out = made(torch.from_numpy(tokens), labels=torch.from_numpy(tokens))
  out.loss.backward()
  grads = {
    name: torch.zeros_like(p) if p.grad is None else p.grad
    for name, p in made.named_parameters()
  }
  found = {f'grad.{name}': g for name, g in released_names(grads).items()}
  found['tokens'] = tokens.astype(np.int32)
  found['logits'] = out.logits.detach().numpy()
  return found


def main():
  shutil.rmtree(GOLDEN, ignore_errors=True)
  for seed in SEEDS:
    directory = GOLDEN / f'seed{seed}'
    made = model(seed)
    save(made, seed, directory)
    save_file(computed(made, seed), directory / 'expected.safetensors')
    print(seed, shape(seed), sorted(p.name for p in directory.iterdir()))
  size = sum(p.stat().st_size for p in GOLDEN.rglob('*') if p.is_file())
  print(f'transformers {transformers.__version__}, {size} bytes')


if __name__ == '__main__':
  main()
