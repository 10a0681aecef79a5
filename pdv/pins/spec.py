"""What a pins file may say, as pydantic models (docs/pins.md).

mesh: {dp: 2, tp: 4}
axes: {tp: [tensor, sequence]}
techniques: {dp: zero-3}
tensors: {"*.mlp.c_fc.weight": {tp: shard 0}}
operators: [{op: linear, module: "h.*.attn", axis: tp, loop: n}]
forbid: [{op: attention, axis: dp}, {technique: zero-3}]
"""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, model_validator

from ir.errors import did_you_mean
from pdv.cluster.units import ValueProblem, shorten
from pdv.pins.roles import ROLES
from pdv.pins.techniques import TECHNIQUES

STATE = re.compile(r"shard (-?[0-9]{1,2})|whole|cut", re.ASCII)
# what may be forbidden: a role, or parameters that rest cut and are gathered for use
FORBIDDEN = (*ROLES, "zero", "zero-2", "zero-3", "fsdp")


ZERO_1 = "zero-2 is that in a pipeline, and elsewhere holds less: write that"


def _state(value: object) -> str:
    if not isinstance(value, str) or not STATE.fullmatch(value):
        raise ValueProblem(f"{shorten(value)} is no state of a tensor", "Allowed: shard N (N is a dim), cut, whole")
    return value


def _one_of(what: str, known: tuple[str, ...]) -> BeforeValidator:
    def check(value: object) -> str:
        if not isinstance(value, str) or value not in known:
            allowed = f"Allowed: {', '.join(known)}"
            mend = ZERO_1 if str(value).replace("-", "") == "zero1" else did_you_mean(str(value), known)
            raise ValueProblem(f"{shorten(value)} is no {what}", allowed, mend)
        return value

    return BeforeValidator(check)


def _enumerate(value: object) -> object:
    return [value] if isinstance(value, str) else value


State = Annotated[str, BeforeValidator(_state)]
RoleName = Annotated[str, _one_of("role", ROLES)]
TechniqueName = Annotated[str, _one_of("technique", tuple(TECHNIQUES))]
ForbiddenName = Annotated[str, _one_of("technique that can be forbidden", FORBIDDEN)]
Size = Annotated[StrictInt, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Selector(_Strict):
    """Which operators: all that the given fields describe together; patterns are globs.

    Attributes:
        op: the kind of operator: linear.
        param: the parameter that it reads, by its name in the model.
        module: the module that it is part of.
        name: its own name, as `pdv explain` has it.
    """

    op: StrictStr | None = None
    param: StrictStr | None = None
    module: StrictStr | None = None
    name: StrictStr | None = None

    def given(self) -> dict[str, str]:
        """The fields that are set."""
        fields = {"op": self.op, "param": self.param, "module": self.module, "name": self.name}
        return {field: value for field, value in fields.items() if value is not None}


class OperatorPin(Selector):
    """Operators that must be cut so along an axis: one loop by its label, ``none``, or any loop of a role.

    Attributes:
        axis: of the mesh.
        loop: the loop that is cut, by its label, or none.
        role: any loop of it: data, tensor, ….
    """

    axis: StrictStr
    loop: StrictStr | None = None
    role: RoleName | None = None

    @model_validator(mode="after")
    def _one_demand(self) -> Self:
        if (self.loop is None) == (self.role is None):
            raise ValueProblem("an operator's pin says either loop or role", "", "Write `loop: n`, or `role: tensor`")
        if not self.given():
            raise ValueProblem(
                "names no operator", "Allowed: op, param, module, name", "Add `op: linear`, for instance"
            )
        return self


class ForbidPin(Selector):
    """What no plan may do, along one axis or any; a tensor with a state forbids that state of it.

    Attributes:
        axis: of the mesh (default: any).
        loop: that may not be cut.
        technique: that may not be used.
        tensor: that may not be in the state.
        state: of that tensor: shard 0, replicate, ….
    """

    axis: StrictStr | None = None
    loop: StrictStr | None = None
    technique: ForbiddenName | None = None
    tensor: StrictStr | None = None
    state: State | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if (self.tensor is None) != (self.state is None):
            raise ValueProblem(
                "a forbidden state has both tensor and state", "", "Write `tensor: NAME, state: shard 0`"
            )
        if not (self.given() or self.technique or self.tensor or self.axis):
            raise ValueProblem(
                "forbids everything", "", "Name an operator, a technique, an axis, or a tensor and its state"
            )
        if self.tensor is not None and (self.given() or self.technique or self.loop):
            raise ValueProblem("forbids a tensor's state and an operator's cut at once", "", "Write two entries")
        return self


class PinsSpec(_Strict):
    """A pins file.

    Attributes:
        mesh: axes and their sizes, slow to fast.
        axes: what each axis may be used for.
        techniques: what each axis has to be used for.
        tensors: the state of a tensor along an axis.
        operators: how operators are cut.
        forbid: what no plan may do.
    """

    mesh: dict[StrictStr, Size] | None = None
    axes: dict[StrictStr, Annotated[list[RoleName], BeforeValidator(_enumerate)]] = Field(default_factory=dict)
    techniques: dict[StrictStr, TechniqueName] = Field(default_factory=dict)
    tensors: dict[StrictStr, dict[StrictStr, State]] = Field(default_factory=dict)
    operators: list[OperatorPin] = Field(default_factory=list)
    forbid: list[ForbidPin] = Field(default_factory=list)
