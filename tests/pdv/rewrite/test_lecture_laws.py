"""The laws that lectures on rewriting show are in the library: found by the generator, or written and proven alike."""

from __future__ import annotations

import pytest

from pdv.rewrite.check import check_law
from pdv.rewrite.generate.select import implied
from pdv.rewrite.law import Law, parse_law
from pdv.rewrite.library import laws

LECTURES = """
matmul-is-associative: matmul(matmul(x, y), z) == matmul(x, matmul(y, z)) for x[m, k] y[k, n] z[n, p]
linear-is-associative: linear(linear(x, v), w) == linear(x, matmul(w, v)) for x[t, k] v[m, k] w[n, m]
matmul-distributes-left: matmul(x, add(y, z)) == add(matmul(x, y), matmul(x, z)) for x[m, k] y[k, n] z[k, n]
matmul-distributes-right: matmul(add(x, y), z) == add(matmul(x, z), matmul(y, z)) for x[m, k] y[m, k] z[k, n]
linear-distributes: add(linear(x, u), linear(x, v)) == linear(x, add(u, v)) for x[t, k] u[n, k] v[n, k]
transpose-of-product: permute(matmul(x, y), perm=(1, 0)) == matmul(permute(y, perm=(1, 0)), permute(x, perm=(1, 0))) \
for x[m, k] y[k, n]
scale-is-linear: linear(scale(x, factor=c), w) == scale(linear(x, w), factor=c) for x[t, k] w[n, k]
products-of-one-input: concat(matmul(x, y), matmul(x, z), dim=1) == matmul(x, concat(y, z, dim=1)) \
for x[m, k] y[k, n] z[k, p]
products-summed: add(linear(x, u), linear(y, v)) == linear(concat(x, y, dim=1), concat(u, v, dim=1)) \
for x[t, k] y[t, m] u[n, k] v[n, m]
convolution-is-linear: conv2d(add(x, y), f, padding=p) == add(conv2d(x, f, padding=p), conv2d(y, f, padding=p)) \
for x[b, c, h, w] y[b, c, h, w] f[e, c, r, q]
convolutions-of-one-input: concat(conv2d(x, f, padding=p), conv2d(x, g, padding=p), dim=1) == \
conv2d(x, concat(f, g, dim=0), padding=p) for x[b, c, h, w] f[e, c, r, q] g[m, c, r, q]
channels-scaled: mul(conv2d(x, f, padding=p), reshape(s, shape=(e, 1, 1))) == \
conv2d(x, mul(f, reshape(s, shape=(e, 1, 1, 1))), padding=p) for x[b, c, h, w] f[e, c, r, q] s[e]
conv-norm: batch_norm(conv2d(x, f, padding=p), m, v, g, a, eps=o) == add(conv2d(x, mul(f, reshape(mul(g, \
rsqrt(shift(v, offset_by=o))), shape=(e, 1, 1, 1))), padding=p), reshape(sub(a, mul(m, mul(g, rsqrt(shift(v, \
offset_by=o))))), shape=(e, 1, 1))) for x[b, c, h, w] f[e, c, r, q] m[e] v[e] g[e] a[e]
""".strip().splitlines()

FUSIONS = ("fuse-linear-sharing-input", "fuse-matmul-sharing-input", "fuse-conv2d-sharing-input")


@pytest.mark.parametrize("text", LECTURES, ids=lambda text: text.partition(":")[0])
def test_a_law_of_the_lectures_is_a_case_of_one_in_the_library(text: str) -> None:
    law = parse_law(text)
    check_law(law, seed=2)
    assert implied(law, _single(), 2)


def _single() -> list[Law]:
    return [law for law in laws() if len(law.left) == 1]


@pytest.mark.parametrize("name", FUSIONS)
def test_two_products_of_one_input_are_fused_by_joining_weights_and_cutting_the_result(name: str) -> None:
    found = [law for law in laws() if law.name.startswith(name)]
    assert any("slice(" in str(law.right[0]) for law in found)
    assert all("concat(" in str(law.right[0]) for law in found)
