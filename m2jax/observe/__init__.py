"""What a run tells people: metric records, the live terminal view, the report.

`metrics.jsonl` is the truth (DESIGN §6, Observability). The terminal view, TensorBoard
and the report read the same records; `names` lists what may be in them. Every value is
optional: a reader shows what it finds.
"""
