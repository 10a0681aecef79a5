"""Primes that nobody can know before the programs are fixed: drawn from a hash of what they will judge."""

from __future__ import annotations

import hashlib
from itertools import count

LEAST = 1 << 30
PRIMES = 50_697_537
"""Primes from ``LEAST`` to 2·``LEAST``: pi(2^31) - pi(2^30) = 105,097,565 - 54,400,028 (OEIS A007053)."""


def draw_primes(key: str, number: int) -> tuple[int, ...]:
    """``number`` different primes between 2^30 and 2^31, each as likely as any other, the same for the same key."""
    found: dict[int, None] = {}
    for attempt in count():
        word = int.from_bytes(hashlib.sha256(f"{key}/{attempt}".encode()).digest()[:8], "little")
        candidate = LEAST + word % LEAST
        if is_prime(candidate):
            found[candidate] = None
        if len(found) == number:
            break
    return tuple(found)


def is_prime(n: int) -> bool:
    """Whether n < 2^32 is prime, by Miller and Rabin's test with bases that suffice there (Jaeschke 1993)."""
    if n < 2:
        return False
    for small in (2, 3, 5, 7, 11, 13):
        if n % small == 0:
            return n == small
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 7, 61):
        x = pow(base, odd, n)
        if x in (0, 1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True
