"""What an operator costs: only sums of products do more arithmetic than a few operations per element."""

from __future__ import annotations

import pytest

from ir.cost_model import forward_work
from tests.property.programs import EXAMPLES, Example

PER_ELEMENT = 10
PRODUCTS = ("linear", "matmul", "attention", "conv2d")


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.op not in PRODUCTS], ids=str)
def test_work_is_a_few_operations_per_element(example: Example) -> None:
    op = example.declared
    attrs = op.check_attrs(example.attrs)
    loops = op.solve(op.name, example.types, attrs)
    result = op.result_type(loops, example.types, attrs)
    elements = result.num_elements + sum(operand.num_elements for operand in example.types)
    assert forward_work(op, loops, example.types, result).flops <= PER_ELEMENT * elements
