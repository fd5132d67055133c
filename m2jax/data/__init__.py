"""Training data as deterministic streams that resume at the exact next batch.

documents = text_files.TextFiles(text_files.find(root, ('.py',)), encode)
batches = packing.DocumentRows(documents, row_tokens=512, rows=8, seed=0)
for pieces in batches:
  step(forest.chain(pieces, row_tokens=512, rows=8))
  host['data'] = batches.state()          # JSON-able; into the checkpoint
"""
