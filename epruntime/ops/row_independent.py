"""Row-independent forms of torch's CPU ops: what `batch_invariant.install` puts in their place.

elementwise op   -> flat buffer, padded so that every thread's part is whole vector steps -> torch's own kernel
reduction        -> reduced dimensions last and contiguous                               -> torch's own kernel
matrix product   -> `epruntime.ops.gemm`

Torch computes silu, exp and the like with vector instructions, and the last elements of each run with scalar ones that
give other bits; a strided tensor is all scalar. A run is the whole tensor, or a thread's part of it, so that an
element's bits depend on how many there are. In a buffer of whole vector steps per thread they do not. Reductions choose
their order by strides, and the strides of a batch of one row are those of any layout.

Each function has the schema of the op that it replaces. `.out` overloads are never replaced: they are what is called
here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from epruntime.ops import gemm

_aten: Any = torch.ops.aten
Op = Callable[..., Any]

#: Elements of the longest vector step: two 512-bit registers of 2-byte elements, unrolled by two.
STEP = 64
#: Elements from which on torch's CPU kernels use another thread: those of vml.h, and at::internal::GRAIN_SIZE.
GRAINS = (2048, 32_768)
#: Bytes at whose multiples a buffer must begin: a part that begins elsewhere may be worked on in other steps.
_ALIGNMENT = 64


@functools.lru_cache(maxsize=4096)
def padded_elements(n: int, threads: int) -> int:
    """Least number of elements, n or more, of which every thread gets whole vector steps.

    `at::parallel_for` uses t = min(threads, ceil(n / grain)) threads, and each gets ceil(n / t) elements.
    """
    while True:
        parts = (min(threads, max(1, -(-n // grain))) for grain in GRAINS)
        step = STEP * math.lcm(*parts)
        padded = -(-n // step) * step
        if padded == n:
            return n
        n = padded


def _flat(x: torch.Tensor, size: int) -> torch.Tensor:
    """x's elements in a fresh buffer of `size` elements, ones behind them."""
    flat = torch.ones(size, dtype=x.dtype)
    flat[: x.numel()].view(x.shape).copy_(x)
    return flat


def _floating(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def elementwise(out_op: Op) -> Op:
    """An op of one tensor, by its `.out` overload."""

    def replacement(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = _floating(x)
        if x.dim() == 0:  # no row of a batch: as torch computes it
            return out_op(x, *args, **kwargs, out=torch.empty_like(x))
        n = x.numel()
        size = padded_elements(n, torch.get_num_threads())
        if size == n and x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
            return out_op(x, *args, **kwargs, out=torch.empty_like(x))
        flat = _flat(x, size)
        return out_op(flat, *args, **kwargs, out=torch.empty_like(flat))[:n].view(x.shape)

    return replacement


def in_place(replacement: Op) -> Op:
    def replacement_(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x.copy_(replacement(x, *args, **kwargs))

    return replacement_


_rsqrt_any = elementwise(_aten.rsqrt.out)
_pow_any = elementwise(_aten.pow.Tensor_Scalar_out)
#: Exponents for which torch multiplies or takes a square root, which IEEE 754 rounds in one way.
_EXACT_EXPONENTS = (0.5, 1.0, 2.0, 3.0)


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32:  # a square root and a division
        return _aten.rsqrt.out(x, out=torch.empty_like(x))
    return _rsqrt_any(x)


def pow_tensor_scalar(x: torch.Tensor, exponent: Any) -> torch.Tensor:
    if x.is_floating_point() and not isinstance(exponent, complex) and float(exponent) in _EXACT_EXPONENTS:
        return _aten.pow.Tensor_Scalar_out(x, exponent, out=torch.empty_like(x))
    dtype = torch.result_type(x, exponent)
    if not dtype.is_floating_point:
        return _aten.pow.Tensor_Scalar_out(x, exponent, out=x.new_empty(0, dtype=dtype))
    return _pow_any(x.to(dtype), exponent)


def pow_scalar(base: Any, exponent: torch.Tensor) -> torch.Tensor:
    dtype = torch.result_type(base, exponent)
    return pow_tensor_tensor(torch.full((), base, dtype=dtype), exponent)


def pow_tensor_tensor(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    dtype = torch.result_type(x, exponent)
    x, exponent = torch.broadcast_tensors(x.to(dtype), exponent.to(dtype))
    if x.dim() == 0:
        return _aten.pow.Tensor_Tensor_out(x, exponent, out=torch.empty_like(x))
    size = padded_elements(x.numel(), torch.get_num_threads())
    bases, exponents = _flat(x, size), _flat(exponent, size)
    return _aten.pow.Tensor_Tensor_out(bases, exponents, out=torch.empty_like(bases))[: x.numel()].view(x.shape)


def log_sigmoid_forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = _flat(x, padded_elements(x.numel(), torch.get_num_threads()))
    out, buffer = torch.empty_like(flat), torch.empty_like(flat)
    _aten.log_sigmoid_forward.output(flat, output=out, buffer=buffer)
    return out[: x.numel()].view(x.shape), x.new_empty(0)  # the buffer is for autograd, which is off


_mul_out, _view_as_real = _aten.mul.out, torch.view_as_real


def _is_complex(x: Any) -> bool:
    return x.is_complex() if isinstance(x, torch.Tensor) else isinstance(x, complex)


def mul(x: torch.Tensor, y: Any) -> torch.Tensor:
    """Complex numbers are multiplied part by part: torch fuses a multiplication and an addition in places.

    `y` may be a number: the dispatcher unwraps what was one.
    """
    if not (_is_complex(x) or _is_complex(y)):
        return _mul_out(x, y, out=torch.empty(0, dtype=torch.result_type(x, y)))
    dtype = torch.result_type(x, y)
    parts = [_view_as_real(torch.as_tensor(z).to(dtype).resolve_conj()).unbind(-1) for z in (x, y)]
    (a, b), (c, d) = parts
    return torch.complex(a * c - b * d, a * d + b * c)


def _reduced_last(x: torch.Tensor, dims: Sequence[int] | None) -> tuple[torch.Tensor, list[int]]:
    """x as [kept..., R] with R all elements that are reduced, contiguous; and x's shape with ones where reduced."""
    reduced = sorted(d % x.dim() for d in dims) if dims else list(range(x.dim()))
    kept = [d for d in range(x.dim()) if d not in reduced]
    shape = [1 if d in reduced else size for d, size in enumerate(x.shape)]
    length = math.prod(x.shape[d] for d in reduced)  # said, since it cannot be inferred where x is empty
    rows = x.permute([*kept, *reduced]).reshape(*(x.shape[d] for d in kept), length).contiguous()
    return rows, shape


def _reduce(
    out_op: Op, x: torch.Tensor, dims: Any, keepdim: bool, dtype: torch.dtype | None, *before: Any
) -> torch.Tensor:
    """A reduction by its `.out` overload: `out_op(x, *before, dims, keepdim, dtype=, out=)`."""
    dims = [dims] if isinstance(dims, int) else dims
    # integers, and a single number, have the same sum in any order
    exact = not (x.is_floating_point() or x.is_complex()) or x.dim() == 0
    out = torch.empty(0, dtype=dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64))
    # One row of so many elements would be shared out among threads:
    whole = x.numel() >= GRAINS[1]
    if exact or (x.is_contiguous() and not whole and dims and len(dims) == 1 and dims[0] in (-1, x.dim() - 1)):
        return out_op(x, *before, dims, keepdim, dtype=dtype, out=out)
    rows, shape = _reduced_last(x, dims)
    single = whole and rows.numel() == rows.shape[-1]
    if single:
        rows = rows.reshape(1, -1).repeat(2, 1)
    out = out_op(rows, *before, [-1], False, dtype=dtype, out=out)
    out = (out[0] if single else out).reshape(shape)
    return out if keepdim else out.squeeze(sorted(_dims(x, dims)))


def sum_dims(x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _reduce(_aten.sum.IntList_out, x, dim, keepdim, dtype)


def mean_dims(x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _reduce(_aten.mean.out, x, dim, keepdim, dtype)


def vector_norm(
    x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _reduce(_aten.linalg_vector_norm.out, x, dim, keepdim, dtype, ord)


def _dims(x: torch.Tensor, dims: Sequence[int] | None) -> set[int]:
    return {d % x.dim() for d in dims} if dims else set(range(x.dim()))


def softmax(out_op: Op) -> Op:
    """`_softmax` and `_log_softmax`: over a dimension that is not the last, torch works on several rows at once."""

    def replacement(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if x.dim() < 2 or dim in (-1, x.dim() - 1):
            return out_op(x, dim, half_to_float, out=torch.empty(0, dtype=x.dtype))
        rows = x.transpose(dim, -1).contiguous()
        return out_op(rows, -1, half_to_float, out=torch.empty_like(rows)).transpose(dim, -1).contiguous()

    return replacement


_PRODUCT_DTYPES = (torch.float32, torch.bfloat16)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype in _PRODUCT_DTYPES:
        return gemm.bmm(a, b)
    if a.dtype == torch.float16:
        return gemm.bmm(a.float(), b.float()).half()
    out = a.new_zeros((a.shape[0], a.shape[1], b.shape[2]))
    for k in range(a.shape[2]):  # k after k; nothing that is served comes here
        out += a[:, :, k : k + 1] * b[:, k : k + 1]
    return out


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return gemm.matmul(a, b) if a.dtype in _PRODUCT_DTYPES else bmm(a[None], b[None])[0]


def _scaled(bias: torch.Tensor, product: torch.Tensor, beta: Any, alpha: Any) -> torch.Tensor:
    """beta * bias + alpha * product, in fp32 if that is wider; a bias times 0 is ignored, NaN included."""
    wide = torch.promote_types(bias.dtype, product.dtype)
    out = product.to(wide) * alpha
    return (out if beta == 0 else bias.to(wide) * beta + out).to(bias.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    if beta == 1 and alpha == 1 and bias.dim() == 1 and bias.shape[0] == b.shape[1] and a.dtype in _PRODUCT_DTYPES:
        return gemm.matmul(a, b, bias)
    return _scaled(bias, mm(_wide(a), _wide(b)), beta, alpha)


def baddbmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    return _scaled(bias, bmm(_wide(a), _wide(b)), beta, alpha)


def addbmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    products = bmm(_wide(a), _wide(b))
    total = products[0]
    for product in products[1:]:
        total = total + product
    return _scaled(bias, total, beta, alpha)


def mv(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return mm(a, v[:, None])[:, 0]


def addmv(bias: torch.Tensor, a: torch.Tensor, v: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    return _scaled(bias, mv(_wide(a), _wide(v)), beta, alpha)


def dot(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return mm(u[None], v[:, None])[0, 0]
