"""Values that a module makes of nothing but numbers, while it is exported. Entry point: ``KnownValues``.

``torch.linspace(0, 1, 4)`` in ``forward`` is the same in each call: ``if``, ``item`` and loops may go by it, though for
torch's tracing it is a tensor like any other. So are buffers of integers and truth values, which are constants of
programs, unless they are overwritten. What depends on inputs, parameters or other buffers, or is drawn, is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

_MOST = 2**16  # elements of what is computed twice
_ASKED = frozenset(
    "__bool__ __int__ __float__ __index__ __complex__ __contains__ item tolist equal allclose is_nonzero".split()  # noqa: SIM905  # would be a line each
)
_IN_PLACE = frozenset(
    f"__{name}__"
    for name in "setitem iadd isub imul idiv itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()  # noqa: SIM905
)
_SIZED = frozenset("nonzero argwhere masked_select unique unique_consecutive bincount".split())  # noqa: SIM905
_BY_NUMBERS = frozenset(
    "pad view reshape expand repeat narrow unfold roll split interpolate __getitem__".split()  # noqa: SIM905
)
_UNDEFINED = ("empty", "new_empty", "resize", "set_", "share_memory")  # elements that nobody wrote, memory of others
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class KnownValues(TorchFunctionMode):
    """In this mode questions to tensors that are made of numbers alone have their answers.

    Each is kept beside its traced twin and goes through the same functions, in the same memory where they share it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.known: MutableMapping[torch.Tensor, torch.Tensor | None] = WeakIdKeyDictionary()
        self.made_of: MutableMapping[torch.Tensor, frozenset[str]] = WeakIdKeyDictionary()
        self.asked: set[str] = set()
        """The buffers that answers came of."""
        self.written: set[str] = set()
        self.module = module
        self.stored = {
            name: buffer.clone()
            for name, buffer in module.named_buffers()
            if not (buffer.is_floating_point() or buffer.is_complex() or buffer.is_meta) and buffer.numel() <= _MOST
        }

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """While this lasts, the module's forward is called in this mode; what torch does around it is not."""
        own = vars(self.module).get("forward")
        plain = self.module.forward

        @wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:  # Any: what it takes and gives
            before = dict(self.module.named_buffers())
            with self:
                result = plain(*args, **kwargs)
            self.written |= {name for name, buffer in self.module.named_buffers() if buffer is not before.get(name)}
            return result

        self.module.forward = forward
        try:
            yield
        finally:
            del self.module.forward
            if own is not None:
                self.module.forward = own

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        del types
        kwargs = kwargs or {}
        if isinstance(function, OpOverload):  # what torch itself calls on the way
            return function(*args, **kwargs)
        name: str = getattr(function, "__name__", "")
        if name in _BY_NUMBERS:
            args, kwargs = (*args[:1], *tree_map(self._number, args[1:])), tree_map(self._number, kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (torch.Tensor, *_SYMBOLS))]
        values = [self._value(leaf) for leaf in given]
        constant = None not in values
        if constant and name in _ASKED:
            self.asked |= self._buffers_of(given)
            return self._run(function, args, kwargs)
        if constant and name == "__iter__":
            return iter(self.__torch_function__(torch.Tensor.unbind, (), (args[0], 0)))
        if constant and _is_sized_by_values(name, args, kwargs):
            return self._computed(function, args, kwargs)
        written = ([kwargs["out"]] if "out" in kwargs else args[:1]) if _writes(name, kwargs) else ()
        memory = self._memory_of(written)
        self.written |= {key for key, value in self.stored.items() if value.untyped_storage().data_ptr() in memory}
        result = function(*args, **kwargs)
        if constant and (written or _is_defined(name, result)):
            self._keep(result, function, args, kwargs)
        elif written:
            self._forget(written)
        return result

    def _number(self, leaf: Any) -> Any:  # Any: an argument, or a part of one
        """A tensor of one integer as that, where it is known: sizes, widths and bounds that torch asks by itself."""
        if isinstance(leaf, slice):
            return slice(*(self._number(bound) for bound in (leaf.start, leaf.stop, leaf.step)))
        if not isinstance(leaf, torch.Tensor) or leaf.dim() or leaf.is_floating_point() or leaf.dtype == torch.bool:
            return leaf
        if self._value(leaf) is None:
            return leaf
        self.asked |= self._buffers_of([leaf])
        return int(self._run(torch.Tensor.item, (leaf,), {}))

    def _value(self, leaf: Any) -> torch.Tensor | None:  # Any: a tensor, or a size
        """What it is, if known: a plain tensor is a constant of the module, its parameters and buffers are traced."""
        if isinstance(leaf, _SYMBOLS):
            return None
        if leaf in self.known or leaf.requires_grad:
            return self.known.get(leaf)
        if not _is_traced(leaf):
            with _disable_current_modes():
                self.known[leaf] = leaf.clone()
        elif not leaf.is_floating_point():
            name = next((name for name, buffer in self.module.named_buffers() if buffer is leaf), None)
            if name in self.stored:
                self.known[leaf], self.made_of[leaf] = self.stored[name], frozenset((name,))
        return self.known.get(leaf)

    def _buffers_of(self, given: Iterable[Any]) -> frozenset[str]:  # Any: tensors, and sizes
        return frozenset[str]().union(*(self.made_of.get(leaf, ()) for leaf in given if isinstance(leaf, torch.Tensor)))

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:  # Any: torch's
        given = tree_map(lambda leaf: self._value(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        # without torch's modes, which would write each change of the gradient mode into the program
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001
            return function(*given[0], **given[1])

    def _computed(self, function: Any, args: Any, kwargs: Any) -> Any:  # Any: torch's
        """What a function gives, as constants: of how many elements it is tracing could not say."""
        names = self._buffers_of(tree_leaves((args, kwargs)))
        self.asked |= names
        result = self._run(function, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                with _disable_current_modes():
                    self.known[leaf], self.made_of[leaf] = leaf.clone(), names
        return result

    def _keep(self, result: Any, function: Any, args: Any, kwargs: Any) -> None:  # Any: torch's
        """Note the values of what came, unless they were drawn."""
        with _disable_current_modes():
            state = torch.get_rng_state()
            values = self._run(function, args, kwargs)
            drawn = not torch.equal(state, torch.get_rng_state())
            if drawn:
                torch.set_rng_state(state)
        if drawn:
            self._forget((args, kwargs))
        names = self._buffers_of(tree_leaves((args, kwargs)))
        for traced, value in zip(tree_leaves(result), tree_leaves(values), strict=True):
            if isinstance(traced, torch.Tensor):
                self.known[traced] = None if drawn else value
                self.made_of[traced] = names

    def _memory_of(self, leaves: Any) -> set[int]:  # Any: arguments of a function
        tensors = [leaf for leaf in tree_leaves(leaves) if isinstance(leaf, torch.Tensor)]
        return {value.untyped_storage().data_ptr() for leaf in tensors if (value := self._value(leaf)) is not None}

    def _forget(self, written: Any) -> None:  # Any: arguments of a function
        """What shares memory with what is overwritten by unknown values is unknown."""
        memory = self._memory_of(written)
        for traced, value in list(self.known.items()) if memory else ():
            if value is not None and value.untyped_storage().data_ptr() in memory:
                self.known[traced] = None


def _is_sized_by_values(name: str, args: Any, kwargs: Any) -> bool:  # Any: arguments of a function
    """Whether the sizes of what a function gives depend on values of its operands."""
    given = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, torch.Tensor)]
    match name:
        case "repeat_interleave":
            return kwargs.get("output_size") is None and bool(given or len(args) + len(kwargs) == 1)
        case "where":
            return len(args) + len(kwargs) == 1
        case "__getitem__":
            return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in given)
    return name in _SIZED


def _is_traced(leaf: torch.Tensor) -> bool:
    kinds: tuple[type, ...] = (FakeTensor, FunctionalTensor)
    return isinstance(leaf, kinds) or torch._is_functional_tensor(leaf) or is_functorch_wrapped_tensor(leaf)  # noqa: SLF001  # has no public name


def _is_defined(name: str, result: Any) -> bool:  # Any: what a function gave
    """Whether it is of few elements, of sizes that are numbers, each of which was written."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return (
        bool(leaves)
        and not name.startswith(_UNDEFINED)
        and all(isinstance(size, int) for leaf in leaves for size in leaf.shape)
        and sum(leaf.numel() for leaf in leaves) <= _MOST
    )


def _writes(name: str, kwargs: Any) -> bool:  # Any: arguments of a function
    """Whether it overwrites its first argument, or ``out``."""
    return "out" in kwargs or (name in _IN_PLACE if name.endswith("__") else name.endswith("_"))
