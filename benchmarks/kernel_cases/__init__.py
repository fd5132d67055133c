"""The ops that benchmarks/kernels.py measures: cases, costs and peers of each."""

from benchmarks.kernel_cases.attention import ATTENTION
from benchmarks.kernel_cases.matmuls import EXPERTS, MATMUL
from benchmarks.kernel_cases.op import Op
from benchmarks.kernel_cases.paged import PAGED
from benchmarks.kernel_cases.tokens import LOGPROBS, NORM_ROPE

__all__ = ['OPS', 'Op']

OPS = {op.name: op for op in (ATTENTION, PAGED, MATMUL, EXPERTS, NORM_ROPE, LOGPROBS)}
