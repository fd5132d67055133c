"""transformers' side of `train_vs_transformers`: train steps of MiniMaxM2ForCausalLM.

`train_vs_transformers` starts it with a Python that has torch and transformers; m2jax
is not required. It reads one JSON command per line from stdin and answers each with one
JSON line:

  {"do": "make", "experts": NAME, "optimizer": NAME}  → {"device", "version"}
  {"do": "step"}                                      → {"seconds", "cpu_s", "loss"}

"make" loads the weights; a failed command is answered with {"error"}.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time

import torch
import transformers

OPTIMIZERS = {'fused': dict(fused=True), 'foreach': dict(foreach=True), 'loop': {}}


class Trainer:
  """One model, its optimizer and its one batch."""

  def __init__(self, directory: str, settings: dict, experts: str, optimizer: str):
    cuda = settings['device'] != 'cpu' and torch.cuda.is_available()
    self.device = torch.device('cuda' if cuda else 'cpu')
    model = transformers.MiniMaxM2ForCausalLM.from_pretrained(
      directory,
      dtype=torch.float32,
      attn_implementation='sdpa',
      experts_implementation=experts,
    )
    model.config.use_cache = False
    self.model = model.to(self.device).train()
    self.optimizer = torch.optim.AdamW(
      self.model.parameters(),
      lr=settings['learning_rate'],
      betas=(settings['b1'], settings['b2']),
      eps=settings['eps'],
      weight_decay=0.0,
      **OPTIMIZERS[optimizer],
    )
    self.tokens = torch.tensor(settings['tokens'], device=self.device)
    self.low = settings['dtype'] == 'bfloat16'

  def step(self) -> float:
    low = contextlib.nullcontext()
    if self.low:
      low = torch.autocast(self.device.type, torch.bfloat16)
    with low:
      loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
    loss.backward()
    self.optimizer.step()
    self.optimizer.zero_grad(set_to_none=True)
    return loss.item()  # waits for the device


def main() -> None:
  answers, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
  directory, settings = sys.argv[1], json.loads(sys.argv[2])
  torch.set_num_threads(settings['threads'])
  # as JAX computes fp32 products on a GPU
  torch.set_float32_matmul_precision('high')
  trainer = None
  for line in sys.stdin:
    command = json.loads(line)
    try:
      if command['do'] == 'make':
        trainer = None  # frees the memory of the previous one first
        trainer = Trainer(directory, settings, command['experts'], command['optimizer'])
        answer = dict(
          device=trainer.device.type,
          version=f'torch {torch.__version__}, transformers {transformers.__version__}',
        )
      else:
        started, cpu = time.perf_counter(), time.process_time()
        loss = trainer.step()
        answer = dict(
          seconds=time.perf_counter() - started,
          cpu_s=time.process_time() - cpu,
          loss=loss,
        )
    except Exception as e:  # an implementation may fail in any way here
      answer = dict(error=f'{type(e).__name__}: {e}'.split('\n')[0][:200])
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == '__main__':
  main()
