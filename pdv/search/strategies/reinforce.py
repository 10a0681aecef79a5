"""Policy gradient: ColocRL's REINFORCE (Mirhoseini et al., "Device Placement Optimization with RL", ICML'17).

A policy makes plans operator by operator, in program order, drawing each configuration from a distribution over those
that are legal after what was drawn before; plans that turn out cheap make their draws likelier (reward: minus the
square root of the cost, less its running mean, both as in the paper). ColocRL places groups of operators together;
here operators that differ only in their names are a group, and take the value drawn for the first of them where it is
legal. The paper's recurrent policy network is a table of logits here: one row per group.
"""

from __future__ import annotations

import numpy as np

from ir.graph import Node
from pdv.search.solver.tables import Table
from pdv.search.strategies.decode import Decoder, Indices
from pdv.search.strategies.network import Flat, Values
from pdv.search.strategies.pricing import Minimized, NetworkTask, strategy

BATCH = 16
UPDATES = 150
LEARNING_RATE = 1.0
MEAN_DECAY = 0.9  # of the running mean
FLATTENING = 3e-3  # pull towards equal chances (an entropy bonus), so that no draw dies out early


def minimize(task: NetworkTask) -> Minimized:
    """The best plan drawn, its single choices bettered at the end; no bound is known."""
    flat = task.flat
    policy = _Policy(flat, task.rng)
    best: Values | None = None if task.start is None else dict(task.start)
    least = float("inf") if best is None else flat.value(best)
    mean: float | None = None
    for update in range(task.steps(UPDATES)):
        if update and task.clock.left_s <= 0:
            break
        taken, costs = policy.draw()
        winner = int(costs.argmin())
        if costs[winner] < least:
            best, least = policy.decoder.values(taken[winner]), float(costs[winner])
            task.offer(best, least)
        rewards = -np.sqrt(np.maximum(costs, 0.0))
        mean = float(rewards.mean()) if mean is None else mean * MEAN_DECAY + float(rewards.mean()) * (1 - MEAN_DECAY)
        spread = float(rewards.std()) or 1.0
        policy.learn((rewards - mean) / spread)
    assert best is not None
    best = flat.polish(best)
    return Minimized(best if flat.value(best) < flat.illegal else None)


class _Policy:
    """Logits of each group's values; what was drawn last, and with which chances."""

    def __init__(self, flat: Flat, rng: np.random.Generator) -> None:
        self.decoder = Decoder(flat)
        self._illegal = flat.illegal
        self._rng = rng
        names = {variable: node for node, variable in flat.network.variables.items()}
        kinds = [_kind(names[variable], flat.sizes[variable]) for variable in flat.choices]
        order = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        self._groups = [order[kind] for kind in kinds]
        sizes = {order[kind]: flat.sizes[variable] for kind, variable in zip(kinds, flat.choices, strict=True)}
        self._logits = [np.zeros(sizes[group]) for group in range(len(order))]
        self._drawn: dict[int, Indices] = {}
        self._gradient = [np.zeros((BATCH, len(logits))) for logits in self._logits]

    def draw(self) -> tuple[Indices, Table]:
        """([batch, choices] values, [batch] costs)."""
        self._drawn = {}
        for gradient in self._gradient:
            gradient[:] = 0.0
        return self.decoder.run(self._choose, BATCH)

    def learn(self, advantages: Table) -> None:
        """One step along the advantage times the gradient of the log-chance of what was drawn."""
        for group, gradient in enumerate(self._gradient):
            step = LEARNING_RATE * (advantages @ gradient) / BATCH
            self._logits[group] = self._logits[group] * (1 - FLATTENING) + step

    def _choose(self, number: int, added: Table) -> Indices:
        """The group's value where it is legal, else a draw among what is."""
        group = self._groups[number]
        legal = added < self._illegal / 2
        legal |= ~legal.any(axis=1, keepdims=True)  # a dead end: the plan is illegal whatever is drawn
        weights = np.exp(self._logits[group] - self._logits[group].max()) * legal
        chances = weights / weights.sum(axis=1, keepdims=True)
        rolls = self._rng.random(len(added))[:, None]
        drawn: Indices = np.minimum((chances.cumsum(axis=1) < rolls).sum(axis=1), added.shape[1] - 1)
        again = np.ones(len(added), dtype=bool)
        if group in self._drawn:
            again = ~legal[np.arange(len(added)), self._drawn[group]]
            drawn = np.where(again, drawn, self._drawn[group])
        else:
            self._drawn[group] = drawn
        score = -chances
        score[np.arange(len(added)), drawn] += 1.0
        self._gradient[group] += score * again[:, None]
        return drawn


def _kind(node: Node, size: int) -> str:
    """What operators have in common that differ in their names only."""
    operands = [f"{x.op.name} {x.type} {x.needs_grad}" for x in node.operands]
    attrs = [] if node.is_leaf else [f"{key}={value!s}" for key, value in node.attrs.items()]
    return f"{node.name if node.is_leaf else node.op.name} {attrs} {node.type} {operands} {size}"


reinforce = strategy(minimize)
