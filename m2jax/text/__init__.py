"""Text: M2's special tokens, chat template, response parser and tokenizers.

`chat` turns OpenAI messages into M2's prompt and back; `tokenizer` turns prompt pieces
into ids without letting user text forge a special token; `bpe` trains a small
byte-level vocabulary; `strict_json` reads JSON that all of them can digest.
Source: facts/m2-and-forge.md §2.
"""
