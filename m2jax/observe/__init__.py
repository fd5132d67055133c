"""What a run reports: metric records, the live terminal view, the HTML report.

`metrics.jsonl` is the source of truth (DESIGN §6, Observability). The terminal view,
TensorBoard and the report read the same records; `names` lists the metrics that they
may have. Every value is optional: a reader shows what it finds.
"""
