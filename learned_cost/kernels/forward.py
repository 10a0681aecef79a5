"""What the kernel model computes from its weights, written once: by NumPy as it is asked, by torch as it is trained.

Three parts, one after the other (docs/cost-model.md); weights go by their names in torch's ``state_dict``:

1. ``prior`` knows no device. It says how much of each resource (``features.RESOURCES``) a kernel of this shape uses,
   and how much a launch costs; time is their sum. What it learned on some devices therefore holds on others.
2. ``specialist`` corrects the prior on devices it was trained on; ``adapters`` do, one by one, for further devices.
3. ``fusion`` is a graph network over the kernels of a subgraph: how much less (or more) than the sum of its kernels the
   subgraph takes. Message passing is GraphSAGE's (Hamilton, Ying and Leskovec, NeurIPS 2017), along edges and against
   them.

Entry point: ``Forward``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learned_cost.kernels.features import RESOURCES, Features, stand_ins
from learned_cost.kernels.nodes import TEXTS

Array = Any  # a NumPy array, or a torch tensor where the model is trained: what the arithmetic gives and takes
Codes = NDArray[np.int64]

CLIP = 5.0  # deviations from the mean that a number may be
BOUND_SHARPNESS = 8.0
# Log seconds by resource that a well-written kernel is taken to need before anything was measured: memory and
# arithmetic at some 80-95 % of their rates, and little of the rest.
PRIOR_LOG_USE = (0.25, 0.05, -0.7, -1.5, -1.0, -2.5)
# Where the logs of scales start, by part: what each errs when little is learned yet.
PRIOR_LOG_SCALE, SEEN_LOG_SCALE, ADAPTED_LOG_SCALE = -1.0, -2.0, -1.5
MIDDLE_LOG_S = -10.0  # 45 us, about the middle of what there is
WITHOUT_PHYSICS_LOG_S = -9.0  # 0.12 ms, the middle of what there is to learn from


class Arithmetic:
    """What the model needs beyond the operators of Python, by NumPy in double precision.

    Sums in single precision differ with the size of the batch that they are made in, and from machine to machine, by
    enough to turn the last digit that is kept of a prediction.
    """

    def array(self, values: NDArray[Any]) -> Array:
        """The values as an operand."""
        return values.astype(np.float64)

    def words(self, prefix: str, name: str, codes: Codes) -> Codes:
        """Codes of words as they are looked up; training leaves some out."""
        del prefix, name
        return codes

    def rows(self, table: Array, codes: Codes) -> Array:
        """Rows of an embedding."""
        return table[codes]

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """[n, in] -> [n, out]."""
        return x @ weight.T if bias is None else x @ weight.T + bias

    def normal(self, x: Array, weight: Array, bias: Array) -> Array:
        """Layer normalization of the last dim."""
        centred = x - x.mean(axis=1, keepdims=True)
        return centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + 1e-5) * weight + bias

    def silu(self, x: Array) -> Array:
        """x / (1 + exp(-x))."""
        return x / (1.0 + np.exp(-np.clip(x, -80.0, 80.0)))

    def exp(self, x: Array) -> Array:
        """Of each element."""
        return np.exp(x)

    def clip(self, x: Array, most: float) -> Array:
        """Between ``-most`` and ``most``."""
        return np.clip(x, -most, most)

    def join(self, parts: Iterable[Array]) -> Array:
        """[n, a], [n, b], … -> [n, a + b + …]."""
        return np.concatenate(list(parts), axis=1)

    def where(self, condition: NDArray[np.bool_], x: Array, y: Array | float) -> Array:
        """[n] of one or the other."""
        return np.where(condition, x, y)

    def put(self, x: Array, at: Codes, values: Array) -> Array:
        """A copy of [n] with other values at some places."""
        x = x.copy()
        x[at] = values
        return x

    def log_sum_exp(self, x: Array) -> Array:
        """[n, m] -> [n, 1]."""
        top = x.max(axis=1)
        return (top + np.log(np.exp(x - top[:, None]).sum(axis=1)))[:, None]

    def above(self, mean: Array, bound: Array) -> Array:
        """Never under the bound, and where well above it as it was."""
        return bound + np.logaddexp(0.0, BOUND_SHARPNESS * (mean - bound)) / BOUND_SHARPNESS

    def sums(self, values: Array, place: Codes, count: int) -> Array:
        """[n, m] -> [count, m], by place."""
        result = np.zeros((count, values.shape[1]))
        np.add.at(result, place, values)
        return result

    def means(self, values: Array, place: Codes, count: int) -> Array:
        """[n, m] -> [count, m], by place; 0 where there is none."""
        sizes = np.maximum(np.bincount(place, minlength=count), 1)[:, None]
        return self.sums(values, place, count) / sizes

    def most(self, values: Array, place: Codes, count: int) -> Array:
        """[n] -> [count], the largest by place, as a constant."""
        top = np.full(count, -np.inf)
        np.maximum.at(top, place, values)
        return top

    def log(self, x: Array) -> Array:
        """Of each element."""
        return np.log(x)


@dataclass(frozen=True)
class Forward:
    """The model at some weights.

    Attributes:
        arrays: weights by name.
        model: vocabularies, devices and adapters, as files describe them.
        physics: without, a plain network of the same size: neither prior nor bound.
    """

    arrays: Mapping[str, Array]
    model: Mapping[str, Any]  # Any: JSON
    by: Arithmetic
    physics: bool = True

    def subgraphs(self, features: Features, chosen: Codes, start: Codes) -> tuple[Array, Array]:
        """(log seconds, log scale) [g] of the chosen subgraphs; ``start`` [all + 1] counts kernels before each."""
        kernels, place = kernels_of(start, chosen)
        mean, scale = self.kernels(features, kernels)
        count = len(chosen)
        if len(kernels) == count:
            return mean, scale
        top = self.by.most(mean, place, count)
        total = top + self.by.log(self.by.sums(self.by.exp(mean - top[place])[:, None], place, count)[:, 0])
        scale = self.by.means(scale[:, None], place, count)[:, 0]
        if self.model["fusion"] is None:
            return total, scale
        out = self._fusion(features, kernels, chosen, place, (mean - total[place])[:, None])
        many = np.bincount(place, minlength=count) > 1
        return total + self.by.where(many, out[:, 0], 0.0), self.by.where(many, out[:, 1] + ADAPTED_LOG_SCALE, scale)

    def prior(self, features: Features, kernels: Codes) -> tuple[Array, Array, Array]:
        """(log seconds [n], log scale [n], departures from ``PRIOR_LOG_USE`` and the launch's [n, R + 1])."""
        codes = self._codes("prior.words", self.model["vocab"], features, kernels)
        blind = self._scale("blind", features.blind[kernels])
        out = self._trunk("prior.trunk", [blind, self._embed("prior.words", codes)])
        count = len(RESOURCES)
        usual = self.by.array(features.resources[kernels]) + self.by.array(np.array(PRIOR_LOG_USE, dtype=np.float32))
        launch = self.by.rows(self.arrays["prior.launch.weight"], codes["stack"]) + out[:, count : count + 1]
        mean = self.by.log_sum_exp(self.by.join([usual + out[:, :count], launch]))[:, 0]
        return mean, out[:, count + 1] + PRIOR_LOG_SCALE, out[:, : count + 1]

    def kernels(self, features: Features, kernels: Codes) -> tuple[Array, Array]:
        """(log seconds, log scale) [n] of each kernel alone, above its bound."""
        mean, scale, _ = self.prior(features, kernels)
        if not self.physics:
            mean, scale = 0.0 * mean + WITHOUT_PHYSICS_LOG_S, 0.0 * scale
        on = features.device[features.graph[kernels]]
        dtypes, _ = features.texts["dtype"]
        device = stand_ins(features, self.model["devices"], self.model["known"])[on, dtypes[kernels]]
        if (device > 0).any():
            out = self._correct(features, kernels, mean, scale, device)
            mean = mean + self.by.where(device > 0, out[:, 0], 0.0)
            scale = self.by.where(device > 0, out[:, 1] + SEEN_LOG_SCALE, scale)
        for code, name in enumerate(features.devices):
            here = np.flatnonzero(on == code)
            if name in self.model["adapters"] and len(here):
                out = self._adapt(features, kernels[here], mean[here], name)
                mean = self.by.put(mean, here, mean[here] + out[:, 0])
                scale = self.by.put(scale, here, out[:, 1] + ADAPTED_LOG_SCALE)
        return self.by.above(mean, self.by.array(features.bound[kernels])) if self.physics else mean, scale

    def _correct(self, features: Features, kernels: Codes, mean: Array, scale: Array, device: Codes) -> Array:
        words = self._embed("words", self._codes("words", self.model["vocab"], features, kernels))
        relative = (self.by.array(features.resources[kernels]) - mean[:, None]) * float(self.physics)
        numbers = [self._scale(name, getattr(features, name)[kernels]) for name in ("blind", "own")]
        base = [(mean - MIDDLE_LOG_S)[:, None], scale[:, None]]
        at = self.by.rows(self.arrays["device.weight"], device)
        return self._trunk("specialist", [*numbers, relative, *base, words, at])

    def _adapt(self, features: Features, kernels: Codes, mean: Array, name: str) -> Array:
        prefix = f"adapters.{module_name(name)}"
        codes = self._codes(f"{prefix}.words", self.model["adapters"][name], features, kernels)
        blind, words = self._scale("blind", features.blind[kernels]), self._embed(f"{prefix}.words", codes)
        return self._trunk(f"{prefix}.trunk", [blind, (mean - MIDDLE_LOG_S)[:, None], words])

    def _fusion(self, features: Features, kernels: Codes, chosen: Codes, place: Codes, share: Array) -> Array:
        """[g, 2] from kernels, of which ``share`` [n, 1] is the log of the part of the subgraph's time."""
        resources, fusion = self.by.array(features.resources[kernels]), self.model["fusion"]
        codes = self._codes("fusion.words", fusion["vocab"], features, kernels)
        relative = resources - self.by.log_sum_exp(resources)
        numbers = [self._scale("blind", features.blind[kernels]), self._embed("fusion.words", codes), relative]
        x = self.by.silu(self._linear("fusion.enter", self.by.join([*numbers, share])))
        edges = _edges_of(features, chosen, kernels)
        for layer in range(2 if fusion["edges"] else 0):
            along = self._sage(f"fusion.along.{layer}", x, edges)
            x = x + self.by.silu(along + self._sage(f"fusion.against.{layer}", x, edges[::-1]))
        count = len(chosen)
        weighted, mean = self.by.sums(x * self.by.exp(share), place, count), self.by.means(x, place, count)
        return self._trunk("fusion.leave", [weighted, mean, self.by.array(features.graphs[chosen])])

    def _sage(self, name: str, x: Array, edges: Codes) -> Array:
        mean = self.by.means(x[edges[0]], edges[1], len(x))
        return self._linear(f"{name}.lin_l", mean) + self.by.linear(x, self.arrays[f"{name}.lin_r.weight"])

    def _scale(self, name: str, values: NDArray[np.float32]) -> Array:
        scaled = (self.by.array(values) - self.arrays[f"{name}_mean"]) / self.arrays[f"{name}_std"]
        return self.by.clip(scaled, CLIP)

    def _codes(
        self, prefix: str, vocab: Mapping[str, Sequence[str]], features: Features, kernels: Codes
    ) -> dict[str, Codes]:
        """Places of the kernels' words in the tables; 0 is a word that was never seen."""
        found = {}
        for name in TEXTS:
            if f"{prefix}.tables.{name}.weight" in self.arrays:
                codes, spelled = features.texts[name]
                place = {word: code + 1 for code, word in enumerate(vocab[name])}
                table = np.array([*(place.get(word, 0) for word in spelled), 0], dtype=np.int64)
                found[name] = self.by.words(prefix, name, table[codes[kernels]])
        return found

    def _embed(self, prefix: str, codes: Mapping[str, Codes]) -> Array:
        return self.by.join(self.by.rows(self.arrays[f"{prefix}.tables.{name}.weight"], codes[name]) for name in codes)

    def _linear(self, name: str, x: Array) -> Array:
        return self.by.linear(x, self.arrays[f"{name}.weight"], self.arrays[f"{name}.bias"])

    def _normal(self, name: str, x: Array) -> Array:
        return self.by.normal(x, self.arrays[f"{name}.weight"], self.arrays[f"{name}.bias"])

    def _trunk(self, name: str, parts: Sequence[Array]) -> Array:
        """A residual perceptron over joined parts."""
        x, block = self._linear(f"{name}.enter", self.by.join(parts)), 0
        while (within := f"{name}.blocks.{block}") + ".0.weight" in self.arrays:
            inner = self._linear(f"{within}.1", self._normal(f"{within}.0", x))
            x, block = x + self._linear(f"{within}.3", self.by.silu(inner)), block + 1
        return self._linear(f"{name}.leave", self.by.silu(self._normal(f"{name}.norm", x)))


def kernels_of(start: Codes, chosen: Codes) -> tuple[Codes, Codes]:
    """Kernels of subgraphs, and which of ``chosen`` (by place) each is of."""
    counts = start[chosen + 1] - start[chosen]
    if len(chosen) and counts.max() == 1:
        return start[chosen], np.arange(len(chosen))
    place = np.repeat(np.arange(len(chosen)), counts)
    return np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts) + start[chosen][place], place


def module_name(device: str) -> str:
    """A device's name as torch takes it for a module."""
    return device.replace(".", "_")


def _edges_of(features: Features, chosen: Codes, kernels: Codes) -> Codes:
    """[2, e] of the chosen subgraphs, by place among ``kernels``."""
    edges, graph = features.edges, features.graph
    if edges.size == 0:
        return np.zeros((2, 0), dtype=np.int64)
    place = np.full(len(graph), -1, dtype=np.int64)
    place[kernels] = np.arange(len(kernels))
    found: Codes = place[edges[:, np.isin(graph[edges[0]], chosen)]]
    return found
