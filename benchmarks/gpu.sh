#!/bin/sh
# Everything that needs a GPU, in one command of at most eight minutes: tests (programs of the set in several dtypes, float8,
# what is drawn, what the host's memory holds), modules as people write them trained on it, whole steps beside what was
# predicted, a profile.
#
#     sh benchmarks/gpu.sh [--smoke] [STEP...]      steps: tests strangers steps profile; all of them, if none is named
#
# Installs nothing and needs no network. Environment: OUT, a folder for what it writes (default ./gpu-out); PYTHON (python3);
# PACKAGES, where `gpu_steps.py --prepare` has put packages before, which saves two minutes.
# Writes strangers.json, steps.json, profile/ (docs/profiles.md: library, Triton and inductor kernels, forward and backward),
# a log of each step, environment.txt and summary.txt. Run again with the same OUT, the profile goes on. A step that fails
# does not stop the others; the exit status is 1 if any did, 2 if something it needs is missing.
# --smoke runs the smallest cases, on a CPU too.

set -u
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}
SMOKE=
if [ "${1-}" = --smoke ]; then SMOKE=$1 && shift; fi
STEPS="tests strangers steps profile"
for name in ${*:-$STEPS}; do
    case " $STEPS " in
    *" $name "*) ;;
    *)
        echo "usage: [OUT=DIR] [PYTHON=PROGRAM] [PACKAGES=DIR] sh benchmarks/gpu.sh [--smoke] [STEP...]" >&2
        exit 2
        ;;
    esac
done
WANTED=" ${*:-$STEPS} "
if [ -z "${OUT-}" ]; then
    OUT=gpu-out
    mkdir -p "$OUT" && echo '*' >"$OUT/.gitignore"
fi
mkdir -p "$OUT" || exit 2
PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1

# ---- What is here ----

"$PYTHON" - >"$OUT/environment.txt" 2>&1 <<'PROGRAM'
import importlib
import platform
import sys

NEEDED = "torch numpy ml_dtypes networkx pydantic yaml safetensors transformers onnx pytest pyarrow typer rich".split()
USEFUL = {"onnx_ir": "models as ONNX", "triton": "our kernels"}

print("python", platform.python_version())
missing = []
for name in [*NEEDED, *USEFUL]:
    try:
        module = importlib.import_module(name)
        print(name, getattr(module, "__version__", "(no version)"))
    except ImportError as error:
        print(name, f"MISSING ({error})", f"- only for {USEFUL[name]}, not for this script" if name in USEFUL else "")
        missing += [name] if name in NEEDED else []
if not missing:
    import torch

    for index in range(torch.cuda.device_count()):
        print("device", index, torch.cuda.get_device_properties(index))
    print("cuda", torch.version.cuda, "available" if torch.cuda.is_available() else "not available: CPU cases only")
if missing:
    print("missing:", *missing, "- install them, or unpack their wheels into a folder and name it in PYTHONPATH")
    sys.exit(1)
PROGRAM
checked=$?
cat "$OUT/environment.txt"
[ "$checked" -eq 0 ] || exit 2

# ---- The steps ----

failed=0
: >"$OUT/summary.txt"

# step NAME LIMIT_S COMMAND...: run it within its time, keep its output, note how it ended
step() {
    name=$1 limit=$2
    shift 2
    case $WANTED in *" $name "*) ;; *) return ;; esac
    echo "== $name"
    started=$(date +%s)
    if command -v timeout >/dev/null; then
        timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
    else
        "$@" >"$OUT/$name.log" 2>&1
    fi
    status=$?
    tail -n 60 "$OUT/$name.log"
    case $status in
    0) verdict=ok ;;
    124) verdict="failed: not done after $limit s" ;;
    *) verdict="failed: exit status $status" ;;
    esac
    [ "$status" -eq 0 ] || failed=1
    echo "$name: $verdict, $(($(date +%s) - started)) s" >>"$OUT/summary.txt"
}

# The limits add up to less than eight minutes. -W: another torch than the one developed on may warn of other things.
# A GPU takes its record by the driver's name; the CPU of a smoke test is called cpu-core, and its rows are for nothing.
JOBS=$(($(getconf _NPROCESSORS_ONLN) * 3 / 4 + 1))
DEVICE=cuda
[ -n "$SMOKE" ] && DEVICE=cpu
step tests 150 "$PYTHON" -m pytest -q -rs -s tests/gpu -m "not distributed" -W default -o minversion=7 -p no:cacheprovider
step strangers 70 "$PYTHON" benchmarks/strangers.py $SMOKE --devices 1 --device $DEVICE --jobs $JOBS --json "$OUT/strangers.json"
step steps 200 "$PYTHON" benchmarks/gpu_steps.py $SMOKE --folder "${PACKAGES:-$OUT/packages}" --seconds 170 --json "$OUT/steps.json"
if [ -n "$SMOKE" ]; then
    step profile 60 "$PYTHON" -m pdv profile --device cpu --record cpu-core --budget 5s -o "$OUT/profile"
else
    step profile 50 "$PYTHON" -m pdv profile --device cuda --budget 30s -o "$OUT/profile"
fi

echo "== summary"
cat "$OUT/summary.txt"
exit "$failed"
