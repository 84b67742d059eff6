"""Batch-invariant torch: aten's CPU ops whose bits for a row depend on that row alone.

install -> torch.library: REPLACED ops of the CPU key -> row_independent.py -> gemm.py, or torch's `.out` overloads
unsteady_use: is an op, as a model calls it, known to be row-independent then? -> census.py

Every op is in one of three classes. REPLACED: torch's own kernel gives a row other bits in another batch or on another
number of threads. EXACT: data movement, and arithmetic that IEEE 754 rounds in one way. ROW_LOCAL: torch's own kernel
works on a row at a time. `tests/kernels/test_batch_invariant.py` runs each of them at 1 to 70 rows on 1 to 4 threads,
and `tests/e2e/test_census.py` asserts that no served model uses another.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from epruntime.ops import row_independent as rows

_aten: Any = torch.ops.aten


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Elementwise ops that torch computes in vector and in scalar form, with other bits.
_ELEMENTWISE = _names(
    "silu gelu sigmoid tanh exp exp2 expm1 log log1p log2 log10 sin cos tan atan erf erfc softplus elu mish "
    "hardswish hardsigmoid"
)
_WITHOUT_IN_PLACE = ("softplus",)
_unary = {name: rows.elementwise(getattr(_aten, name).out) for name in sorted(_ELEMENTWISE)}

#: aten name -> what it is replaced by.
REPLACED: dict[str, rows.Op] = {
    **_unary,
    **{f"{name}_": rows.in_place(op) for name, op in _unary.items() if name not in _WITHOUT_IN_PLACE},
    "rsqrt": rows.rsqrt,
    "rsqrt_": rows.in_place(rows.rsqrt),
    "log_sigmoid_forward": rows.log_sigmoid_forward,
    "pow.Tensor_Scalar": rows.pow_tensor_scalar,
    "pow_.Scalar": rows.in_place(rows.pow_tensor_scalar),
    "pow.Scalar": rows.pow_scalar,
    "pow.Tensor_Tensor": rows.pow_tensor_tensor,
    "pow_.Tensor": rows.in_place(rows.pow_tensor_tensor),
    "sum.dim_IntList": rows.sum_dims,
    "mean.dim": rows.mean_dims,
    "linalg_vector_norm": rows.vector_norm,
    "_softmax": rows.softmax(_aten._softmax.out),
    "_log_softmax": rows.softmax(_aten._log_softmax.out),
    "mm": rows.mm,
    "addmm": rows.addmm,
    "bmm": rows.bmm,
    "baddbmm": rows.baddbmm,
    "addbmm": rows.addbmm,
    "mv": rows.mv,
    "addmv": rows.addmv,
    "dot": rows.dot,
}
#: Replaced only for a model that multiplies complex numbers: a call of it costs every other model's products, too.
COMPLEX: dict[str, rows.Op] = {"mul.Tensor": rows.mul, "mul_.Tensor": rows.in_place(rows.mul)}

#: Data movement, and arithmetic that is rounded in one way however many elements there are.
EXACT = _names(
    """
    abs add.Tensor add_.Tensor sub.Tensor sub_.Tensor rsub.Scalar mul.Tensor mul_.Tensor mul.out div.Tensor div_.Tensor
    neg reciprocal sqrt copysign.Tensor nan_to_num bitwise_left_shift.Tensor_Scalar
    addcmul lerp.Scalar relu relu_ leaky_relu _prelu_kernel hardtanh floor floor_divide remainder.Scalar round sign
    clamp clamp_ clamp.Tensor clamp_min clamp_max maximum minimum where.self masked_fill.Scalar masked_fill_.Scalar
    eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar
    ge.Tensor bitwise_not bitwise_and.Tensor bitwise_or.Tensor logical_not logical_and
    alias view view.dtype _unsafe_view expand t transpose.int permute select.int slice.Tensor split.Tensor
    split_with_sizes unbind.int unsqueeze squeeze squeeze.dim detach detach_ lift_fresh view_as_complex view_as_real
    _to_copy clone copy_ cat stack constant_pad_nd repeat flip tril
    embedding gather index.Tensor index_put_ index_copy_ index_select scatter.value scatter_.value scatter.src
    scatter_.src searchsorted.Tensor bincount nonzero repeat_interleave.Tensor
    arange arange.start arange.start_step empty.memory_format empty_like full full_like new_zeros ones ones_like
    scalar_tensor zeros zeros_like zero_ fill_.Scalar _local_scalar_dense complex polar
    """
)
#: Torch works on one row at a time, in an order that its length alone decides.
ROW_LOCAL = _names("native_layer_norm topk sort sort.stable cumsum max.dim min.dim amax argmax any.dim all.dim")
#: Over all elements: the same whatever the order for integers, and no request's own for floating point.
_OVER_ALL = frozenset(("sum", "max", "min", "any", "all"))
#: Ops that complex numbers may go through.
_ON_COMPLEX = _names(
    "view_as_real view_as_complex unsqueeze view alias slice.Tensor select.int polar clone copy_ detach"
)

_libraries: dict[str, torch.library.Library] = {}


def _put(key: str, replacements: Mapping[str, rows.Op]) -> None:
    if key in _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # torch says that a kernel is overridden, which is the purpose
        warnings.simplefilter("ignore")
        for name, replacement in replacements.items():
            library.impl(name, replacement, "CPU")
    _libraries[key] = library


def install(*, complex_products: bool = False) -> None:
    """Puts the row-independent ops in place, for this process; again changes nothing.

    Args:
        complex_products: also products of complex numbers, which only some models need.
    """
    _put("all", REPLACED)
    if complex_products:
        _put("complex", COMPLEX)


def uninstall() -> None:
    """Gives torch its own ops back; without `install` changes nothing."""
    while _libraries:
        _libraries.popitem()[1]._destroy()


def installed() -> bool:
    return "all" in _libraries


def unsteady_use(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why a row's bits may depend on its batch-mates in this call under `install`; "" if they do not.

    Args:
        name: of the aten op with its overload, as "sum.dim_IntList".
    """
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if any(x.is_complex() for x in tensors) and name not in _ON_COMPLEX and name not in COMPLEX:
        return f"{name} of complex numbers"
    if name in ("add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor", "rsub.Scalar"):
        return "" if kwargs.get("alpha", *(args[2:] or (1,))) == 1 else f"{name} with alpha"
    if name in _OVER_ALL:
        return f"{name} over the whole batch" if tensors[0].is_floating_point() else ""
    return "" if name in REPLACED or name in EXACT or name in ROW_LOCAL else name
