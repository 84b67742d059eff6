"""A case for every op of `epruntime.ops.batch_invariant`: how a model calls it on rows, and on what.

R rows, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Rows = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to call an op.

    Attributes:
        op: name in the table. label: of the case, where an op has several.
        run: x [R, W] -> a tensor, or several, whose first dimension is R.
        positive: x is above 0.1. complex: x is complex, and the dtype only of its parts.
    """

    op: str
    run: Callable[[Rows], Any]
    label: str = ""
    positive: bool = False
    complex: bool = False

    @property
    def name(self) -> str:
        return f"{self.op} {self.label}".strip()


def weights(*shape: int, like: Rows) -> torch.Tensor:
    """Fixed random numbers: a model's weights."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(like.dtype)


def _linear(x: Rows, columns: int, *, bias: bool) -> torch.Tensor:
    weight = weights(columns, x.shape[1], like=x)
    return F.linear(x, weight, weights(columns, like=x) if bias else None)


def _per_head(x: Rows) -> torch.Tensor:
    """[heads, R, W] by [heads, W, 5], as latent attention does."""
    heads = torch.stack((x, x.flip(-1)))
    return torch.bmm(heads, weights(2, x.shape[1], 5, like=x)).transpose(0, 1)


def _as_keys(x: Rows) -> torch.Tensor:
    """x as the columns of the second factor, as an indexer does with keys."""
    return torch.mm(weights(3, x.shape[1], like=x), x.t()).t()


def _grid(x: Rows) -> torch.Tensor:
    """[R, W] -> [R, 4, W], other numbers in each of the four."""
    return x[:, None] * weights(4, 1, like=x)


def _rope(x: Rows) -> torch.Tensor:
    """[R, W] complex -> by angles [R, 1, W]."""
    return torch.view_as_real(torch.stack((x, x + 1), 1) * x[:, None])


def _index(x: Rows) -> torch.Tensor:
    return (x.abs() * 10).long() % x.shape[1]


def _filled(x: Rows) -> torch.Tensor:
    return torch.zeros_like(x)


_UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "exp": torch.exp, "exp2": torch.exp2,
    "expm1": torch.expm1, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "atan": torch.atan, "erf": torch.erf,
    "erfc": torch.erfc, "softplus": F.softplus, "elu": F.elu, "mish": F.mish, "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}  # fmt: skip
_OF_POSITIVE = {"log": torch.log, "log1p": torch.log1p, "log2": torch.log2, "log10": torch.log10, "rsqrt": torch.rsqrt}

REPLACED = [
    *(Case(op=name, run=run) for name, run in _UNARY.items()),
    *(Case(op=name, run=run, positive=True) for name, run in _OF_POSITIVE.items()),
    Case(op="gelu", label="tanh", run=lambda x: F.gelu(x, approximate="tanh")),
    Case(op="softplus", label="beta", run=lambda x: F.softplus(x, beta=2.0, threshold=3.0)),
    Case(op="elu", label="alpha", run=lambda x: F.elu(x, alpha=0.7)),
    Case(op="elu", label="selu", run=F.selu),
    Case(op="log_sigmoid_forward", run=F.logsigmoid),
    *(
        Case(op="pow.Tensor_Scalar", label=str(e), run=lambda x, e=e: x.pow(e), positive=True)
        for e in (2, 3, 0.5, -0.5, -1, 1.7)
    ),
    Case(op="pow.Scalar", run=lambda x: torch.pow(1.3, x)),
    Case(op="pow.Tensor_Tensor", run=lambda x: x**x, positive=True),
    Case(op="sum.dim_IntList", run=lambda x: x.sum(-1)),
    Case(op="sum.dim_IntList", label="middle", run=lambda x: _grid(x).sum(1)),
    Case(op="sum.dim_IntList", label="two", run=lambda x: _grid(x).sum((1, 2), keepdim=True)),
    Case(op="sum.dim_IntList", label="of a transpose", run=lambda x: _grid(x).transpose(1, 2).sum(-1)),
    Case(op="mean.dim", run=lambda x: x.mean(-1, keepdim=True)),
    Case(op="mean.dim", label="middle", run=lambda x: _grid(x).mean(1)),
    Case(op="linalg_vector_norm", run=lambda x: torch.linalg.vector_norm(x, dim=-1)),
    Case(op="linalg_vector_norm", label="middle", run=lambda x: torch.linalg.vector_norm(_grid(x), dim=1)),
    Case(op="linalg_vector_norm", label="of order 1", run=lambda x: F.normalize(x, p=1.0, dim=-1)),
    Case(op="_softmax", run=lambda x: x.softmax(-1)),
    Case(op="_softmax", label="fp32", run=lambda x: x.softmax(-1, dtype=torch.float32)),
    Case(op="_softmax", label="middle", run=lambda x: _grid(x).softmax(1)),
    Case(op="_log_softmax", run=lambda x: x.log_softmax(-1)),
    Case(op="_log_softmax", label="middle", run=lambda x: _grid(x).log_softmax(1)),
]
IN_PLACE = [
    *(
        Case(op=f"{name}_", run=lambda x, name=name: getattr(torch.ops.aten, f"{name}_")(x.clone()), positive=True)
        for name in (*_UNARY, *_OF_POSITIVE)
        if name != "softplus"
    ),
    Case(op="pow_.Scalar", run=lambda x: x.clone().pow_(1.7), positive=True),
    Case(op="pow_.Tensor", run=lambda x: x.clone().pow_(x), positive=True),
]
PRODUCTS = [
    *(Case(op="mm", label=f"to {n}", run=lambda x, n=n: _linear(x, n, bias=False)) for n in (1, 2, 7, 11, 33, 64)),
    Case(op="mm", label="row-major", run=lambda x: x @ weights(x.shape[1], 9, like=x)),
    Case(op="mm", label="as keys", run=_as_keys),
    Case(op="addmm", run=lambda x: _linear(x, 33, bias=True)),
    Case(op="addmm", label="scaled", run=lambda x: torch.addmm(x[:, :1], x, weights(x.shape[1], 5, like=x), beta=0.5)),
    Case(op="bmm", run=_per_head),
    Case(
        op="bmm",
        label="einsum",
        run=lambda x: torch.einsum("rgw,gow->rgo", _grid(x), weights(4, 3, x.shape[1], like=x)),
    ),
    Case(op="baddbmm", run=lambda x: torch.baddbmm(x[None, :, :1], x[None], weights(1, x.shape[1], 5, like=x))[0]),
    Case(op="addbmm", run=lambda x: torch.addbmm(x[:, :1], torch.stack((x, x)), weights(2, x.shape[1], 5, like=x))),
    Case(op="mv", run=lambda x: torch.mv(x, weights(x.shape[1], like=x))),
    Case(op="addmv", run=lambda x: torch.addmv(x[:, 0], x, weights(x.shape[1], like=x), beta=2)),
    Case(op="dot", run=lambda x: torch.stack([torch.dot(row, row) for row in x[:8]])),
]
COMPLEX = [
    Case(op="mul.Tensor", label="complex", run=lambda x: torch.view_as_real(x * x), complex=True),
    Case(op="mul.Tensor", label="complex rope", run=_rope, complex=True),
    Case(op="mul.Tensor", label="complex and real", run=lambda x: torch.view_as_real(x * 0.37 * x.real), complex=True),
    Case(op="mul_.Tensor", label="complex", run=lambda x: torch.view_as_real(x.clone().mul_(x)), complex=True),
    Case(op="mul.Tensor", label="real", run=lambda x: (x * x, x * 0.37, 2 * x, x * weights(1, like=x).double()[0])),
    Case(op="mul_.Tensor", label="real", run=lambda x: x.clone().mul_(x)),
]
ROW_LOCAL = [
    Case(op="native_layer_norm", run=lambda x: F.layer_norm(x, x.shape[-1:], weights(x.shape[1], like=x))),
    Case(op="native_layer_norm", label="plain", run=lambda x: F.layer_norm(x, x.shape[-1:])),
    Case(op="topk", run=lambda x: x.topk(min(3, x.shape[1]), -1)),
    Case(op="topk", label="unsorted", run=lambda x: x.topk(min(3, x.shape[1]), -1, sorted=False)),
    Case(op="topk", label="with ties", run=lambda x: x.sign().topk(min(4, x.shape[1]), -1)),
    Case(op="sort", run=lambda x: x.sort(-1, descending=True)),
    Case(op="sort.stable", run=lambda x: x.sign().sort(dim=-1, stable=True)),
    Case(op="cumsum", run=lambda x: x.cumsum(-1)),
    Case(op="max.dim", run=lambda x: x.sign().max(-1)),
    Case(op="min.dim", run=lambda x: x.sign().min(-1)),
    Case(op="amax", run=lambda x: x.amax(-1)),
    Case(op="argmax", run=lambda x: x.sign().argmax(-1)),
    Case(op="any.dim", run=lambda x: (x > 1).any(-1)),
    Case(op="all.dim", run=lambda x: (x > -1).all(-1)),
]
EXACT = [
    Case(op="abs", run=torch.abs),
    Case(op="add.Tensor", run=lambda x: (x + x[:, :1], x + 0.37)),
    Case(op="add_.Tensor", run=lambda x: x.clone().add_(x)),
    Case(op="sub.Tensor", run=lambda x: x - x[:, :1]),
    Case(op="sub_.Tensor", run=lambda x: x.clone().sub_(0.3)),
    Case(op="rsub.Scalar", run=lambda x: 1 - x),
    Case(op="mul.Tensor", run=lambda x: (x * x[:, :1], x * 0.37)),
    Case(op="mul_.Tensor", run=lambda x: x.clone().mul_(x)),
    Case(op="mul.out", run=lambda x: torch.mul(x[:, :1], x, out=torch.empty_like(x))),
    Case(op="div.Tensor", run=lambda x: (x / x[:, :1], x / 3.7, 1 / x)),
    Case(op="div_.Tensor", run=lambda x: x.clone().div_(x.flip(-1))),
    Case(op="neg", run=torch.neg),
    Case(op="reciprocal", run=torch.reciprocal),
    Case(op="sqrt", run=torch.sqrt, positive=True),
    Case(op="copysign.Tensor", run=lambda x: torch.copysign(x.abs(), x.flip(-1))),
    Case(op="nan_to_num", run=lambda x: x.sqrt().nan_to_num()),
    Case(op="bitwise_left_shift.Tensor_Scalar", run=lambda x: _index(x).bitwise_left_shift(3)),
    Case(op="addcmul", run=lambda x: torch.addcmul(x, x, x)),
    Case(op="lerp.Scalar", run=lambda x: torch.lerp(x, x.flip(-1), 0.3)),
    Case(op="relu", run=torch.relu),
    Case(op="relu_", run=lambda x: x.clone().relu_()),
    Case(op="leaky_relu", run=lambda x: F.leaky_relu(x, 0.03)),
    Case(op="_prelu_kernel", run=lambda x: F.prelu(x, weights(1, like=x))),
    Case(op="hardtanh", run=F.hardtanh),
    Case(op="floor", run=torch.floor),
    Case(op="floor_divide", run=lambda x: x // 0.3),
    Case(op="remainder.Scalar", run=lambda x: x % 0.3),
    Case(op="round", run=torch.round),
    Case(op="sign", run=torch.sign),
    Case(op="clamp", run=lambda x: x.clamp(-0.5, 1.0)),
    Case(op="clamp_", run=lambda x: x.clone().clamp_(min=-0.5)),
    Case(op="clamp.Tensor", run=lambda x: x.clamp(x.new_tensor(-0.5))),
    Case(op="clamp_min", run=lambda x: x.clamp_min(0.1)),
    Case(op="clamp_max", run=lambda x: x.clamp_max(0.1)),
    Case(op="maximum", run=lambda x: torch.maximum(x, x[:, :1])),
    Case(op="minimum", run=lambda x: torch.minimum(x, x[:, :1])),
    Case(op="where.self", run=lambda x: torch.where(x > 0, x, -x * 0.3)),
    Case(op="masked_fill.Scalar", run=lambda x: x.masked_fill(x > 0, 0.5)),
    Case(op="masked_fill_.Scalar", run=lambda x: x.clone().masked_fill_(x > 0, 0.5)),
    *(
        Case(op=f"{op}.Scalar", run=lambda x, op=op: getattr(torch, op)(x, 0.5))
        for op in ("eq", "ne", "lt", "le", "gt", "ge")
    ),
    *(
        Case(op=f"{op}.Tensor", run=lambda x, op=op: getattr(torch, op)(x, x.flip(-1)))
        for op in ("eq", "ne", "lt", "le", "gt", "ge")
    ),
    Case(op="bitwise_not", run=lambda x: ~(x > 0)),
    Case(op="bitwise_and.Tensor", run=lambda x: (x > 0) & (x < 1)),
    Case(op="bitwise_or.Tensor", run=lambda x: (x < 0) | (x > 1)),
    Case(op="logical_not", run=torch.logical_not),
    Case(op="logical_and", run=lambda x: torch.logical_and(x > 0, x)),
    Case(op="alias", run=torch.ops.aten.alias),
    Case(op="view", run=lambda x: x.contiguous().view(-1, 1, x.shape[1])),
    Case(op="view.dtype", run=lambda x: x.contiguous().view(torch.uint8)),
    Case(op="_unsafe_view", run=lambda x: torch.ops.aten._unsafe_view(x.contiguous(), [-1, 1, x.shape[1]])),
    Case(op="expand", run=lambda x: x[:, None].expand(-1, 3, -1)),
    Case(op="t", run=lambda x: x.t().t()),
    Case(op="transpose.int", run=lambda x: x.transpose(0, 1).transpose(0, 1)),
    Case(op="permute", run=lambda x: x[:, :, None].permute(0, 2, 1)),
    Case(op="select.int", run=lambda x: x.select(1, 0)),
    Case(op="slice.Tensor", run=lambda x: x[:, : x.shape[1] // 2 + 1]),
    Case(op="split.Tensor", run=lambda x: x.split(x.shape[1] // 2 + 1, -1)),
    Case(op="split_with_sizes", run=lambda x: x.split([1, x.shape[1] - 1], -1)),
    Case(op="unbind.int", run=lambda x: _grid(x).unbind(1)),
    Case(op="unsqueeze", run=lambda x: x.unsqueeze(1)),
    Case(op="squeeze", run=lambda x: x[:, :1].squeeze().reshape(-1)),
    Case(op="squeeze.dim", run=lambda x: x[:, :1].squeeze(1)),
    Case(op="detach", run=lambda x: x.detach()),
    Case(op="detach_", run=lambda x: x.clone().detach_()),
    Case(op="lift_fresh", run=torch.ops.aten.lift_fresh),
    Case(op="view_as_complex", run=lambda x: torch.view_as_complex(torch.stack((x, x), -1).float())),
    Case(op="view_as_real", run=lambda x: torch.view_as_real(torch.complex(x.float(), x.float()))),
    Case(op="_to_copy", run=lambda x: (x.to(torch.bfloat16), x.to(torch.float32), x.to(torch.int64))),
    Case(op="clone", run=torch.clone),
    Case(op="copy_", run=lambda x: _filled(x).copy_(x)),
    Case(op="cat", run=lambda x: torch.cat((x, x[:, :1]), -1)),
    Case(op="stack", run=lambda x: torch.stack((x, x.flip(-1)), -1)),
    Case(op="constant_pad_nd", run=lambda x: F.pad(x, (1, 3), value=2.0)),
    Case(op="repeat", run=lambda x: x.repeat(1, 2)),
    Case(op="flip", run=lambda x: x.flip(-1)),
    Case(op="tril", run=lambda x: _grid(x).tril()),
    Case(op="embedding", run=lambda x: F.embedding(_index(x)[:, 0], weights(x.shape[1], 5, like=x))),
    Case(op="gather", run=lambda x: x.gather(1, _index(x))),
    Case(op="index.Tensor", run=lambda x: x[:, _index(x)[0] * 0]),
    Case(op="index_put_", run=lambda x: torch.ops.aten.index_put_(_filled(x), [torch.arange(len(x))], x)),
    Case(op="index_copy_", run=lambda x: _filled(x).index_copy_(0, torch.arange(len(x)), x)),
    Case(op="index_select", run=lambda x: x.index_select(0, torch.arange(len(x)))),
    Case(op="scatter.value", run=lambda x: x.scatter(1, _index(x), 0.5)),
    Case(op="scatter_.value", run=lambda x: _filled(x).scatter_(1, _index(x), 1.0)),
    Case(op="scatter.src", run=lambda x: x.scatter(1, _index(x)[:, :1], x)),
    Case(op="scatter_.src", run=lambda x: _filled(x).scatter_(1, _index(x)[:, :1], x)),
    Case(op="searchsorted.Tensor", run=lambda x: torch.searchsorted(torch.arange(-2, 3).to(x.dtype), x.contiguous())),
    Case(op="bincount", run=lambda x: torch.stack([row.bincount(minlength=x.shape[1]) for row in _index(x)[:8]])),
    Case(op="nonzero", run=lambda x: (x[:, :1] > -100).nonzero()[:, 1]),
    Case(
        op="repeat_interleave.Tensor", run=lambda x: torch.repeat_interleave(torch.full((len(x),), 2)).view(-1, 2) * 0
    ),
    *(
        Case(op=op, run=run)
        for op, run in {
            "arange": lambda x: torch.arange(len(x)) * 0,
            "arange.start": lambda x: torch.arange(1, len(x) + 1) * 0,
            "arange.start_step": lambda x: torch.arange(0, 2 * len(x), 2) * 0,
            "empty.memory_format": lambda x: torch.empty(len(x), 0),
            "empty_like": lambda x: torch.empty_like(x) != torch.empty_like(x).fill_(float("nan")),
            "full": lambda x: torch.full((len(x), 3), 0.7),
            "full_like": lambda x: torch.full_like(x, 0.7),
            "new_zeros": lambda x: x.new_zeros(x.shape),
            "ones": lambda x: torch.ones(len(x), 2),
            "ones_like": torch.ones_like,
            "scalar_tensor": lambda x: x + torch.scalar_tensor(0.3, dtype=x.dtype),
            "zeros": lambda x: torch.zeros(len(x), 2),
            "zeros_like": torch.zeros_like,
            "zero_": lambda x: x.clone().zero_(),
            "fill_.Scalar": lambda x: x.clone().fill_(0.3),
            "_local_scalar_dense": lambda x: torch.tensor([row[0].item() for row in x[:8]]),
        }.items()
    ),
    Case(op="complex", run=lambda x: torch.view_as_real(torch.complex(x.float(), x.float()))),
    Case(op="polar", run=lambda x: torch.view_as_real(torch.polar(torch.ones_like(x).float(), x.float()))),
]
