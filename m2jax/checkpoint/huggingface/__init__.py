"""Hugging Face checkpoints of M2: reads released weights, exports for transformers.

  cfg, variables = huggingface.load('MiniMax-M2', mesh=mesh, rules=rules)
  huggingface.save('exported', cfg, variables, tokenizer=tokenizer_json)

A directory has config.json (config.py), safetensors under the released names
(names.py), in one file or in shards with an index (files.py), and the files for
generation and chat (texts.py). Weights may be fp32, bf16 or block-FP8 (fp8.py). Both
directions stream (streaming.py): besides the arrays a process holds a few pieces of
streaming.PIECE_BYTES. Every process reads the rows of its own devices and writes its
share of the shards.
"""

from m2jax.checkpoint.huggingface.texts import TOKENIZER
from m2jax.checkpoint.huggingface.weights import MAX_SHARD_BYTES, load, save

__all__ = ['MAX_SHARD_BYTES', 'TOKENIZER', 'load', 'save']
