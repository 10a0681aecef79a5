"""Configurations: read, checked, and run as the published techniques say, collective by collective."""

from __future__ import annotations

from collections import Counter

import pytest

from ir.errors import UsageError
from ir.sharding import Shard, format_sharding, local_shape
from ir.types import DType
from ir.verify import check_outputs, infer_shardings
from pdv.cluster import Cluster, load_cluster
from pdv.cost.compute import ComputeModel
from pdv.cost.stage_links import stage_links
from pdv.frontend.arch.description import arch
from pdv.frontend.arch.graph import graph
from pdv.manual.configuration import Configuration, complete, configuration, workload
from pdv.problem.precision import MIXED
from pdv.problem.workload import Workload

GPT = "gpt:layers=3,hidden=64,heads=8,seq=16,vocab=128"
LLAMA = "llama:layers=3,hidden=64,heads=8,kv_heads=4,ffn=128,seq=16,vocab=128"
MIXTRAL = "mixtral:layers=3,hidden=64,heads=8,kv_heads=4,ffn=64,seq=16,vocab=128,experts=4,topk=2"
LAYERS = 3


def cluster(devices: int, nodes: int = 1) -> Cluster:
    node = {"count": nodes, "devices": devices // nodes, "device": "a100-80gb-sxm", "link": "nvlink3"}
    return load_cluster({"nodes": [node], **({"network": "ib-hdr"} if nodes > 1 else {})})


def made(model: str, text: str, devices: int, nodes: int = 1) -> Workload:
    given = configuration(text)
    described = arch(model)
    work = workload(
        lambda batch: graph(described, batch, DType.BF16, tp=given.tp),
        given,
        cluster(devices, nodes),
        lambda device: ComputeModel((device,)),
        stage_links,
    )
    check_outputs(work.pcg, infer_shardings(work.pcg, work.problem.mesh))
    return work


def moves(work: Workload, *, weights: bool = False) -> Counter[tuple[str, str]]:
    """Parallel operators on activations, or on parameters, by kind and axis."""
    fixed = set()
    found: Counter[tuple[str, str]] = Counter()
    for node in work.pcg.nodes:
        if not node.is_input and all(operand in fixed for operand in node.operands):
            fixed.add(node)
        if node.op.kind == "parallel" and (node in fixed) == weights and (weights or node.needs_grad):
            found[node.op.name, node.attr("axis")] += 1
    return found


def test_data_parallelism_moves_gradients_alone() -> None:
    work = made(GPT, "dp=4,batch=8", 4)
    assert not moves(work)
    assert moves(work, weights=True) == {("replicate", "dp"): len(work.pcg.params)}
    assert work.execution.micro_batches == 2
    assert work.execution.data_axes == ("dp",)


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_megatron_takes_two_sums_a_layer_each_way(model: str) -> None:
    """Shoeybi et al., section 3: g in forward (reduce), f in backward (replicate); one more for embedding and head."""
    work = made(model, "tp=2,dp=2", 4)
    assert moves(work) == {("reduce", "tp"): 2 * LAYERS + 1, ("replicate", "tp"): 2 * LAYERS + 1}
    shardings = infer_shardings(work.pcg, work.problem.mesh)
    (_, logits), *_ = work.pcg.outputs
    assert format_sharding(shardings[logits]) == "S0,S2"  # each rank has its part of the vocabulary
    products = [node for node in work.pcg.nodes if node.op.name == "linear"]
    kinds = Counter(format_sharding(shardings[node]) for node in products)
    rows = 2 * LAYERS
    assert kinds == {"S0,P": rows, "S0,S2": len(products) - rows}
    assert all(shardings[node][1] == Shard(1) for node in work.pcg.nodes if node.op.name == "attention")


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_sequence_parallelism_gathers_and_scatters(model: str) -> None:
    """Korthikanti et al., section 4.2.2: an all-gather and a reduce-scatter in place of each sum."""
    work = made(model, "tp=2,sp=1", 2)
    found = moves(work)
    assert (found["reduce_scatter", "tp"], found["all_gather", "tp"]) == (2 * LAYERS + 1, 2 * LAYERS + 1)
    assert not found["reduce", "tp"]
    assert not found["combine", "tp"]
    shardings = infer_shardings(work.pcg, work.problem.mesh)
    norms = [node for node in work.pcg.nodes if node.op.name in ("layer_norm", "rms_norm")]
    assert all(shardings[node] == (Shard(1),) for node in norms)


def test_zero_3_gathers_weights_and_drops_them() -> None:
    work = made(GPT, "dp=2,zero=3", 2)
    assert all(node.attr("stored") and node.attr("regather") for node in work.pcg.params)
    assert moves(work, weights=True) == {("all_gather", "dp"): len(work.pcg.params)}
    assert work.execution.zero == 0


def test_zero_3_rests_on_the_dims_that_tensor_parallelism_leaves() -> None:
    work = made(LLAMA, "dp=4,tp=2,zero=3", 8)
    shardings = infer_shardings(work.pcg, work.problem.mesh)
    for node in work.pcg.params:
        if node.type.rank == 2:
            assert local_shape(node.type, shardings[node], work.problem.mesh) != node.type.shape
            assert isinstance(shardings[node][0], Shard)


def test_context_parallelism_gathers_keys_and_values() -> None:
    work = made(LLAMA, "cp=2", 2)
    assert moves(work) == {("all_gather", "cp"): 2 * LAYERS}


@pytest.mark.parametrize("text", ["dp=4,ep=4", "dp=4,ep=2", "dp=4,ep=2,cp=2", "tp=2,dp=4,ep=4,sp=1"])
def test_expert_parallelism_sends_tokens_there_and_back(text: str) -> None:
    given = configuration(text)
    work = made(MIXTRAL, text, given.tp * given.cp * given.data)
    assert moves(work)["all_to_all", "ep"] == 2 * LAYERS
    shardings = infer_shardings(work.pcg, work.problem.mesh)
    experts = [node for node in work.pcg.params if node.type.rank == 4]
    position = work.problem.mesh.index("ep")
    assert len(experts) == 2 * LAYERS
    assert all(shardings[node][position] == Shard(0) for node in experts)
    assert all(shardings[node][position] != Shard(0) for node in work.pcg.params if node.type.rank == 2)


def test_stages_are_whole_layers() -> None:
    work = made("gpt:layers=8,hidden=64,heads=8,seq=16,vocab=128", "tp=2,pp=2,dp=2,vp=2,batch=8", 8)
    assert (work.stages.count, work.stages.virtual, work.stages.layers) == (2, 2, (2, 2, 2, 2))
    by_chunk = Counter(work.stages.chunk_of[n] for n in work.pcg.nodes if n.op.name == "attention")
    assert by_chunk == {0: 2, 1: 2, 2: 2, 3: 2}
    (_, logits), *_ = work.pcg.outputs
    assert work.stages.chunk_of[logits] == 3
    assert all(
        work.stages.chunk_of[operand] <= work.stages.chunk_of[node]
        for node in work.stages.chunk_of
        for operand in node.operands
        if operand in work.stages.chunk_of
    )
    assert len(work.axes) == 2
    assert work.execution.order == "interleaved"


def test_layers_own_what_a_recomputation_repeats() -> None:
    work = made(GPT, "tp=2", 2)
    inside = Counter(
        (node.op.name, work.stages.layer_of[node]) for node in work.stages.layer_of if node.op.kind == "parallel"
    )
    assert inside == {(name, layer): 2 for name in ("reduce", "replicate") for layer in range(LAYERS)}


def test_ranks_lie_as_megatron_counts_them() -> None:
    """tp inside a node, dp across: with 8 GPUs a node, dp=2 of tp=4 stays inside too."""
    links = [[axis.link.name for axis in made(GPT, text, 16, 2).axes[0]] for text in ("tp=8", "tp=4,pp=2", "tp=4")]
    assert links == [["ib-hdr", "nvlink3"], ["nvlink3", "nvlink3"], ["ib-hdr", "nvlink3"]]


def test_settings_read_back() -> None:
    given = configuration(
        "tp=8, pp=4,zero=1,recompute=full,schedule=1F1B,mbs=2,gbs=64,partition=4-4-5-3,sp=true,flash=0"
    )
    assert given == Configuration(
        tp=8, pp=4, zero=1, recompute="full", micro_batch=2, batch=64, partition=(4, 4, 5, 3), sp=True, flash=False
    )
    assert configuration(given.text()) == given
    assert complete(given, 64).data == 2
    assert complete(given, 64).execution().precision == MIXED


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pp=2,tp", "'tp' has no value. Write for instance tp=8"),
        ("tp=2,reconpute=full", "'reconpute=full' is no setting.*Did you mean 'recompute'"),
        ("tp=x", "tp='x' is no number"),
        ("tp=2,tp=4", "tp is given twice"),
        ("zero=4", "zero=4"),
        ("recompute=some", "recompute=some"),
        ("tp=3", "take 3 devices, which do not divide 8.*1, 2, 4, 8"),
        ("tp=2,dp=2", "is 4 devices of 8. dp=4 would take all"),
        ("dp=8,ep=3", "ep=3 does not divide dp=8"),
        ("dp=4,tp=2,batch=6", "a batch of 6 does not divide by dp=4 x micro_batch=1. Multiples of 4"),
        ("pp=2,dp=4,schedule=interleaved,batch=16", "nothing to interleave"),
        ("pp=2,dp=4,schedule=gpipe,vp=2,batch=16", "vp above 1 is for schedule=interleaved"),
        ("pp=2,dp=4,vp=2,batch=12", "3 micro-batches do not divide by pp=2"),
        ("pp=8", "has 3 layers, too few for 8"),
        ("pp=2,partition=2-2", "has 2 chunks and 4 layers.*together have 3"),
        ("pp=2,partition=2;1", "partition='2;1'"),
        ("cp=8,tp=1", None),
    ],
)
def test_nonsense_is_told(text: str, said: str | None) -> None:
    if said is None:
        made(GPT, text, 8)
        return
    with pytest.raises(UsageError, match=said):
        made(GPT, text, 8)


def test_experts_must_be_there_and_divide() -> None:
    with pytest.raises(UsageError, match="ep=2: gpt has no experts"):
        made(GPT, "dp=2,ep=2", 2)
    with pytest.raises(UsageError, match=r"ep=3 does not divide 4 experts. Allowed: 1, 2, 4"):
        made(MIXTRAL, "dp=3,ep=3", 3)


def test_heads_must_divide() -> None:
    with pytest.raises(UsageError, match=r"tp=3 does not divide 8 heads\. Allowed: 1, 2, 4, 8"):
        made(GPT, "tp=3", 3)
    with pytest.raises(UsageError, match="cp=3 does not divide a sequence of 16"):
        made(GPT, "cp=3", 3)
