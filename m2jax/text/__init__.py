"""Text: M2's special tokens, chat template, response parser and tokenizers.

`chat` converts OpenAI messages to M2's prompt and back; `tokenizer` encodes the pieces
of a prompt so that user text cannot produce a special token; `bpe` trains a small
byte-level vocabulary; `strict_json` reads JSON that all of them can handle.
Source: facts/m2-and-forge.md §2.
"""
