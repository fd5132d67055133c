"""Training data as deterministic streams that resume at exactly the next batch.

texts = text_files.TextFiles(text_files.find(root, ('.py',)), root=root)
tokens = documents.Encoded(texts, encode)
batches = packing.DocumentRows(tokens, row_tokens=512, rows=8, streams=8, seed=0)
for pieces in batches:
  step(forest.chain(pieces, row_tokens=512, rows=8))
  host['data'] = batches.state()          # JSON-serialisable; goes into the checkpoint

`corpus` builds such a source from several domains: scored (`quality`), mixed
(`mixture`) and, for long contexts, joined (`long_context`).
"""
