"""What planning costs: CPU-seconds and memory of `pdv optimize` on GPT-2, and of searching Llama-3-8B.

    python benchmarks/planning.py [--smoke] [--json OUT]

Each case runs in a process of its own and is charged all its CPU time, imports included. Llama is exported by one
process (which needs torch), searched and proved by another (which does not).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, Record, arguments, environment, table

TWO_BY_FOUR = """
nodes:
  - {count: 2, devices: 4, device: a100-80gb-sxm, link: nvlink3}
network: ib-hdr
"""


def main() -> None:
    """Run the cases; print CPU-seconds, wall time and peak memory of each."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="run one case in this process (what the others start)")
    parser.add_argument("--folder", type=Path, help="where cases leave graphs for each other")
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(CASES[options.case](options.folder, options.layers)))
        return
    record = Record()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        gpt2 = optimize_gpt2(folder, "small" if options.smoke else "full")
        record.rows.append({"case": "pdv optimize gpt2.onnx, 2x4", **gpt2})
        for case in CASES:
            layers = "2" if options.smoke else "32"
            found = measure([sys.executable, __file__, "--case", case, "--folder", scratch, "--layers", layers])
            found |= json.loads(str(found.pop("stdout")).splitlines()[-1])
            record.rows.append({"case": f"Llama-3-8B, 8x8: {case}", **found})
    llama = record.rows[-1]
    show(record)
    if not options.smoke:
        record.claim("GPT-2 ONNX on 2x4, pdv optimize in all", gpt2["cpu_s"], "CPU-s")
        record.claim("Llama-3-8B on 8x8, search", llama["search_cpu_s"], "CPU-s")
        record.claim("Llama-3-8B on 8x8, search and proof, process in all", llama["cpu_s"], "CPU-s")
        record.claim("Llama-3-8B on 8x8, search and proof, peak memory", llama["peak_bytes"] / 2**30, "GiB")
    record.print_summary()
    record.write(options.json)


def optimize_gpt2(scratch: Path, size: str) -> dict[str, Any]:
    """`pdv optimize gpt2.onnx` for 2 x 4 devices, command line to written package."""
    from benchmarks.models import build
    from pdv.frontend.onnx.export import export_onnx

    module, inputs = build("gpt2", "full" if size == "full" else "small", batch=16)
    model, cluster = scratch / "gpt2.onnx", scratch / "cluster.yaml"
    export_onnx(module, inputs, model)
    cluster.write_text(TWO_BY_FOUR)
    found = measure(
        [
            sys.executable,
            "-m",
            "pdv",
            "optimize",
            str(model),
            "-c",
            str(cluster),
            "-o",
            str(scratch / "out"),
            "--no-cache",
        ]
    )
    found.pop("stdout")
    return found


def export_llama(folder: Path, layers: int) -> dict[str, float]:
    """Llama-3-8B's shape through torch.export to a canonical graph, left in ``folder`` as text."""
    from benchmarks.models.shapes import llama
    from pdv.frontend import load_program
    from pdv.plan.source import write_source

    graph = load_program(*llama(64, 2048, num_hidden_layers=layers)).graph
    write_source(graph, folder)
    return {"nodes": float(len(graph.nodes))}


def search_llama(folder: Path, layers: int) -> dict[str, float]:
    """Search and proof on an 8 x 8 mesh, from the graph as text."""
    from ir.proof.exact import verify_equal
    from pdv.cluster import load_cluster
    from pdv.plan.source import read_source
    from pdv.planning.problems import plan_problems
    from pdv.search.meshes import search_meshes

    graph = read_source(folder)
    cluster = load_cluster(ROOT / "examples/clusters/8x8-h100.yaml").with_mesh({"node": 8, "gpu": 8})
    started = time.process_time()
    found = search_meshes(plan_problems(graph, cluster, mode="train"))
    searched = time.process_time()
    verify_equal(graph, found.pcg, found.solution.problem.mesh)
    return {
        "search_cpu_s": searched - started,
        "proof_cpu_s": time.process_time() - searched,
        "gap": found.gap,
        "step_s": found.cost.seconds,
    }


CASES = {"export": export_llama, "search": search_llama}


def measure(command: list[str]) -> dict[str, Any]:
    """CPU-seconds, wall time, peak memory and output of a process."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        sys.exit(f"{' '.join(command)} failed")
    return {
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.monotonic() - started,
        "peak_bytes": usage.ru_maxrss * 1024,
        "stdout": output,
    }


def show(record: Record) -> None:
    """The rows as a table."""
    lines = [
        (row["case"], f"{row['cpu_s']:.1f}", f"{row['wall_s']:.1f}", f"{row['peak_bytes'] / 2**30:.2f}",
         f"{row['search_cpu_s']:.1f}" if "search_cpu_s" in row else "-")
        for row in record.rows
    ]  # fmt: skip
    table(("case", "CPU-s in all", "wall s", "peak GiB", "CPU-s of search"), lines)


if __name__ == "__main__":
    main()
