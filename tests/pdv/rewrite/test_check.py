"""What proves laws: true ones hold, false ones do not, and a law that is hardly ever about anything is refused."""

from __future__ import annotations

import pytest

from ir.errors import ShapeError, VerificationError
from pdv.rewrite.check import check_law, holds, proven
from pdv.rewrite.instantiate import instantiate
from pdv.rewrite.law import parse_law

TRUE = """
associate: linear(linear(x, v), w) == linear(x, matmul(w, v)) for x[*s, k] v[m, k] w[n, m]
any-dim: relu(chunk(x, dim=d, parts=p, index=i)) == chunk(relu(x), dim=d, parts=p, index=i) for x[*s]
any-order: relu(permute(x, perm=p)) == permute(relu(x), perm=p) for x[*s]
any-shape: relu(reshape(x, shape=t)) == reshape(relu(x), shape=t) for x[*s]
factors: scale(scale(x, factor=c), factor=e) == scale(x, factor=c * e) for x[*s]
broadcast: add(scale(x, factor=c), scale(y, factor=c)) == scale(add(x, y), factor=c) for x[*s] y[*r]
window: conv2d(scale(x, factor=a), f, stride=s, padding=p) == scale(conv2d(x, f, stride=s, padding=p), factor=a) \
for x[b, c, h, w] f[e, c, r, q]
rows: embedding(linear(t, w), i) == linear(embedding(t, i), w) for t[v, d] i[*s]:i64 w[e, d]
""".strip().splitlines()

FALSE = {
    "perm: permute(permute(x, perm=p), perm=p) == x for x[*s]": "values",  # true of two dims, and of swaps
    "piece: chunk(concat(x, y, dim=-1), dim=-1, parts=p, index=1) == y for x[*s] y[*r]": "values",
    "sum: linear(add(x, y), add(u, v)) == add(linear(x, u), linear(y, v)) for x[*s, k] y[*s, k] u[n, k] "
    "v[n, k]": "values",
    "window: conv2d(conv2d(x, f), g) == conv2d(x, f) for x[n, c, h, w] f[c, c, 1, 1] g[c, c, 1, 1]": "values",
    "function: relu(scale(x, factor=c)) == scale(relu(x), factor=c) for x[*s]": "values",
    "padded: conv2d(add(x, y), f, padding=p) == add(conv2d(x, f, padding=p), y) for x[n, c, h, w] f[c, c, 1, 1] "
    "y[n, c, h, w]": "values",
}


@pytest.mark.parametrize("text", TRUE, ids=lambda text: text.partition(":")[0])
def test_a_true_law_is_proven(text: str) -> None:
    proof = check_law(parse_law(text))
    assert proof.instances >= 4
    assert proof.error_bound < 1e-12


@pytest.mark.parametrize(("text", "check"), FALSE.items(), ids=lambda text: text.partition(":")[0])
def test_a_false_law_is_refused(text: str, check: str) -> None:
    with pytest.raises(VerificationError) as caught:
        check_law(parse_law(text))
    assert caught.value.check == check


def test_a_name_that_is_no_freedom_is_refused() -> None:
    """k and m must be the same wherever the law type-checks: then they are one name."""
    with pytest.raises(VerificationError, match="always alike"):
        check_law(
            parse_law("alike: linear(scale(x, factor=c), w) == linear(x, scale(w, factor=c)) for x[t, k] w[n, m]")
        )


def test_a_law_about_nothing_is_refused() -> None:
    with pytest.raises(VerificationError, match="type-checks at 0"):
        check_law(parse_law("never: linear(x, w) == matmul(w, linear(x, w)) for x[2, 3] w[5, 3]"))


def test_the_proof_is_written_behind_the_law() -> None:
    law = proven(parse_law(TRUE[0]))
    assert "proven at" in str(law).partition("#")[2]
    assert parse_law(str(law)) == law


def test_two_checks_are_the_same() -> None:
    law = parse_law(TRUE[0])
    assert check_law(law, seed=3) == check_law(law, seed=3)
    assert holds(law, seed=4)


@pytest.mark.parametrize(
    "term",
    [
        "slice(x, dim=1, start=2, stop=9)",
        "chunk(x, dim=1, parts=2, index=2)",
        "chunk(x, dim=1, parts=4, index=0)",
        "chunk(x, dim=-3, parts=2, index=0)",
        "permute(x, perm=(0, 0))",
        "reduce_sum(x, dims=(2,), keepdim=True)",
        "reshape(x, shape=(5, 5))",
    ],
)
def test_what_does_not_type_check_is_told(term: str) -> None:
    with pytest.raises(ShapeError):
        instantiate(parse_law(f"t: {term} == x for x[t, k]"), {"t": 4, "k": 6})
