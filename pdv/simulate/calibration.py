"""Constants of real programs that no kernel table shows: of frameworks, and of emitted programs. Entry: ``constants``.

Those of frameworks are one set of numbers for all models and clusters, fitted on published runs (benchmarks/fidelity.py
fits them on half of the groups of runs and reports the other half). Those of emitted programs differ where one was
measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pdv.cluster import Device
from pdv.problem.workload import Execution


@dataclass(frozen=True, slots=True)
class Calibration:
    """What running a step costs beside kernels and links.

    Attributes:
        host_forward_s: host time to issue one kernel of forward (Python, dispatch, launch), of emitted programs one
            call; on a GPU the host runs ahead, and only where kernels are shorter than this does the device wait.
        host_backward_s: the same in backward, which runs from C++; what it runs again of forward, runs from Python.
        host_read_s, host_gradient_s: host time of an emitted program for each trained parameter that an operator reads:
            to take its leaf in forward; in backward autograd's node, and what the program does with its gradient.
        host_kept_s: host time for each call of a layer that runs again in backward, either time: hooks take, and give
            back, what it would keep.
        host_update_s: host time of the optimizer for each parameter.
        host_add_s: host time to add a parameter's gradient to that of the micro-batches before, a kernel of its own.
        host_pass_s: host time of each pass of a micro-batch through a stage before its first kernel (schedule, data,
            waiting for what was received).
        pass_cpu_s: the same of a pipeline on a CPU, which computes nothing else meanwhile, of a whole core.
        host_step_s: host time outside the graph in each step (data, loss scale, logging).
        step_cpu_s: the same of a training step on a CPU (the loss's and the optimizer's Python), of a whole core.
        products_gpu: time of products within a step over that of the same kernels alone in a loop (clocks fall under
            sustained load).
        scaled_products: products in 8 or 4 bits within a step over the same alone, beside `products_gpu`.
        attention_gpu: the same of FlashAttention.
        traffic_gpu: the same of all other kernels, which move memory.
        kernels_cpu: the same of every kernel on a CPU.
        copies_cpu: copies beside a collective on a CPU, over reading and writing memory at its full speed: results are
            new memory each time, whose pages the system has yet to give.
        unaligned: how much slower than the cost model says a product in two-byte types is where rows are an odd number
            of elements.
        half_aligned: the same of an even number that is no multiple of 16 bytes.
        overlap_slowdown: how much slower compute runs while a collective runs beside it (shared SMs and memory).
        overlap_slowdown_light: the same where collectives take little of a device (`Overlap.light`).
        pieces_hidden: share of what moving activations in pieces could hide at best that it does hide: products in
            pieces are slower, and pieces wait for each other.
        straggler_std: relative deviation of one device's time of a step.
        std_gain, std_most: a step's relative deviation over what those of its kernels add up to, and the most that it
            comes to: errors of different kinds of work do not all share a sign (`pdv.simulate.uncertainty`).
        std_gain_cpu: the same gain of a step on CPUs, which does not level off.
        collective_efficiency: share of a described link's bandwidth that collectives reach.
    """

    host_forward_s: float = 1.165e-4
    host_backward_s: float = 1.77e-5
    host_read_s: float = 0.0
    host_gradient_s: float = 0.0
    host_kept_s: float = 0.0
    host_update_s: float = 0.0
    host_add_s: float = 1.77e-5
    host_pass_s: float = 1e-4
    pass_cpu_s: float = 1e-3
    host_step_s: float = 9.4e-4
    step_cpu_s: float = 1.2e-3
    products_gpu: float = 1.10
    scaled_products: float = 1.0
    attention_gpu: float = 0.89
    traffic_gpu: float = 0.79
    kernels_cpu: float = 1.35
    copies_cpu: float = 10.0
    unaligned: float = 2.2
    half_aligned: float = 4.7
    overlap_slowdown: float = 2.0
    overlap_slowdown_light: float = 1.2
    pieces_hidden: float = 0.6
    straggler_std: float = 0.005
    std_gain: float = 1.15
    std_most: float = 0.12
    std_gain_cpu: float = 0.7
    collective_efficiency: float = 0.86

    def outside_s(self, devices: Iterable[Device], *, train: bool) -> float:
        """Seconds of a step outside the graph, which no device computes in."""
        kinds = [*devices]
        if any(device.kind == "gpu" for device in kinds):
            return self.host_step_s
        return self.step_cpu_s / min(device.share for device in kinds) if train else 0.0


OF_FRAMEWORKS = Calibration()
# Emitted programs, PyTorch 2.11 on an H100 SXM (CUDA 13.0), 2026-11-23. Unaligned rows are as the cost model has them;
# published runs, with the libraries of 2022, fit more. Hosts: of steps that wait for them. Blocks of GPT-2 (10 calls,
# 12 parameters) and of Llama (21, 9) take 0.40 and 0.82 ms forward, 0.87 and 0.85 backward, which tells calls from
# parameters; layers of BERT in `mixed` precision, what rounding their parameters takes; those of GPT-2 and BERT that
# run again, what hooks take. Autograd adds gradients up without Python: GPT-2 in four micro-batches
# (benchmarks/results/gpu_steps_h100.json, 2026-11-28).
# Too few of their steps were measured on GPUs to say that deviations level off. On CPUs 75 were
# (benchmarks/ranking.py), and 35 on shaped networks (benchmarks/cluster.py): errors of kernels average out more there
# than correlations say.
CALIBRATION = replace(
    OF_FRAMEWORKS, host_forward_s=3.8e-5, host_backward_s=1.5e-5, host_read_s=2e-6, host_gradient_s=6e-5,
    host_kept_s=3.5e-5, host_update_s=9.5e-6, host_add_s=9e-6, unaligned=1.0, half_aligned=1.0,
    std_gain=1.0, std_most=math.inf,
)  # fmt: skip


def constants(execution: Execution) -> Calibration:
    """Of the program that a step is run by."""
    return CALIBRATION if execution.eager else OF_FRAMEWORKS
