"""Census: which aten ops the CPU is asked for while some code runs, and which of them are not known to be steady."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from epruntime.ops.batch_invariant import COMPLEX, unsteady_use


class Census(TorchDispatchMode):
    """Records ops as they are called. Composite ops are taken apart as the dispatcher would, so that what is recorded
    is what has a kernel of its own; ops that such a kernel calls are not seen.

    Attributes:
        ops: names with overload, as "sum.dim_IntList".
        unsteady: reasons why a row's bits may depend on others; see `unsteady_use`.
        multiplies_complex: does it multiply complex numbers?
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()
        self.unsteady: set[str] = set()
        self.multiplies_complex = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        full_name = func.name()
        if _is_composite(full_name):
            with self:
                return func.decompose(*args, **kwargs)
        namespace, _, name = full_name.partition("::")
        if namespace == "aten":
            self.ops.add(name)
            reason = unsteady_use(name, args, kwargs)
            if reason:
                self.unsteady.add(reason)
            if name in COMPLEX and any(isinstance(x, torch.Tensor) and x.is_complex() for x in args):
                self.multiplies_complex = True
        else:
            self.unsteady.add(full_name)
        return func(*args, **kwargs)


def _is_composite(name: str) -> bool:
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(name, "CompositeImplicitAutograd") and not has(name, "CPU"))
