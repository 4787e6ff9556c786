#!/usr/bin/env bash
# Checks and measures everything on a machine with GPUs, in less than eight minutes:
#
#   benchmarks/gpu.sh [FOLDER]     results, by default benchmarks/results
#   FAKE_GPU=build/editable/libfake_gpu.so benchmarks/gpu.sh FOLDER     without a GPU: checks that it runs
#
# Needs torch for CUDA and Python (PYTHON, else python3); hororun starts several ranks. The script
# builds what is missing, in place, without a download. It reports a part that fails, runs out of
# time or lacks something, and continues; the exit code is then 1.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

readonly MOST_SECONDS=470
results=$(mkdir -p "${1:-benchmarks/results}" && cd "${1:-benchmarks/results}" && pwd) || exit 2
log=$results/gpu_log.txt
: > "$log"
failed=0
python=${PYTHON:-$(command -v python3 || command -v python)}
quick=()
soak_s=8
worlds=(2 4)
if [[ -n "${FAKE_GPU:-}" ]]; then
  FAKE_GPU=$(realpath "$FAKE_GPU")
  export FAKE_GPU HORORING_CUDA_LIBRARY=$FAKE_GPU HORORING_NCCL_LIBRARY=$FAKE_GPU
  quick=(--quick)
  soak_s=2
  worlds=(2)
fi
# Use the hororing of this folder, even if another one is installed.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=1 HORORING_DYNAMIC_PROCESS_SETS=1
# A rank that hangs reports it before its part runs out of time.
export HORORING_TIMEOUT_S=${HORORING_TIMEOUT_S:-30} NCCL_DEBUG=${NCCL_DEBUG:-WARN}
command -v make > /dev/null || export CMAKE_GENERATOR=${CMAKE_GENERATOR:-Ninja}

# lacks NAME WHAT: reports a part that cannot run here.
lacks() {
  echo "-- $1: left out, $2" | tee -a "$log"
  failed=1
}

# part NAME SECONDS COMMAND... shows the output when the command has ended, because processes that it
# leaves behind may keep a pipe open.
part() {
  local name=$1 seconds=$2 begin=$SECONDS left=$((MOST_SECONDS - SECONDS)) code=0 lines
  shift 2
  if ((left < 10)); then
    lacks "$name" "the time is over"
    return
  fi
  echo "== $name: $*" | tee -a "$log"
  lines=$(wc -l < "$log")
  timeout --kill-after=5 $((seconds < left ? seconds : left)) "$@" >> "$log" 2>&1 < /dev/null || code=$?
  tail -n +$((lines + 1)) "$log"
  echo "-- $name: exit code $code after $((SECONDS - begin)) s" | tee -a "$log"
  [[ $code -eq 0 ]] || failed=1
}

tells() {
  timeout $((SECONDS < MOST_SECONDS ? MOST_SECONDS - SECONDS : 1)) "$python" -c "$1" 2> /dev/null
}
can() { tells "$1" > /dev/null; }

part machine 30 bash -c 'date -u; nvidia-smi; free -g; nproc; true'

if ! can 'import hororing.numpy'; then
  part build 150 "$python" setup.py --quiet build_ext --inplace
fi
if ! can 'import hororing.numpy'; then
  lacks python "hororing cannot be imported: $("$python" -c 'import hororing.numpy' 2>&1 | tail -n 1)"
  exit 1
fi
part info 30 "$python" -m hororing info
if ! can 'import torch, os; assert torch.cuda.is_available() or "FAKE_GPU" in os.environ'; then
  lacks torch "there is no torch for CUDA in $python"
  exit 1
fi
part versions 60 "$python" -c \
  'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
part check-1-nccl 60 env HORORING_GPU=nccl "$python" benchmarks/gpu_check.py \
  "$results/gpu_check_1.json"
part step 120 env HORORING_GPU=nccl "$python" benchmarks/gpu_step.py ${quick[@]+"${quick[@]}"} \
  --json "$results/gpu_step.json"
launch=("$python" -m hororing.hororun --no-tag-output -np)
for ranks in "${worlds[@]}"; do
  part "check-$ranks-staged" 60 env HORORING_GPU=staged "${launch[@]}" "$ranks" \
    "$python" benchmarks/gpu_check.py "$results/gpu_check_$ranks.json"
done
# Several ranks over NCCL: one per GPU, or two on one GPU, which NCCL supports from 2.30 on.
gpus=$(tells 'import torch; print(torch.cuda.device_count())')
version=$(tells 'from hororing._api import built; print(built.nccl_built())')
by_nccl=(env HORORING_GPU=nccl)
if ((${gpus:-0} < 2)); then
  gpus=2
  by_nccl+=(NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4)
  if ((${version:-0} < 23000)); then
    echo "-- several ranks by NCCL: left out, NCCL ${version:-0} is older than 2.30" | tee -a "$log"
    exit $failed
  fi
fi
part "check-$gpus-nccl" 60 "${by_nccl[@]}" "${launch[@]}" "$gpus" \
  "$python" benchmarks/gpu_check.py "$results/gpu_check_${gpus}_nccl.json"
part "step-$gpus-nccl" 90 "${by_nccl[@]}" "${launch[@]}" "$gpus" "$python" benchmarks/gpu_step.py \
  ${quick[@]+"${quick[@]}"} --json "$results/gpu_step_$gpus.json"
part "soak-$gpus-nccl" 60 "${by_nccl[@]}" "${launch[@]}" "$gpus" \
  "$python" benchmarks/gpu_soak.py --seconds "$soak_s"
if can 'import jax; jax.devices("gpu")'; then
  part "jax-$gpus-nccl" 60 "${by_nccl[@]}" "${launch[@]}" "$gpus" \
    "$python" benchmarks/jax_gpu_check.py
fi
[[ -n "${FAKE_GPU:-}" ]] || part faults 180 "${by_nccl[@]}" "$python" benchmarks/gpu_faults.py
exit $failed
