#!/usr/bin/env bash
# All that there is to know on a machine with GPUs, in one call of less than eight minutes:
#
#   benchmarks/gpu.sh [FOLDER]     results, by default benchmarks/results
#   FAKE_GPU=build/dev/libfake_gpu.so benchmarks/gpu.sh FOLDER     only that it runs, without a GPU
#
# Needs hororing as installed by `make dev`, and torch for CUDA in the same environment. A part that
# fails or runs out of time is reported, and the rest goes on; the exit code is then 1.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

results=$(mkdir -p "${1:-benchmarks/results}" && cd "${1:-benchmarks/results}" && pwd)
log=$results/gpu_log.txt
: > "$log"
failed=0
quick=()
worlds=(2 4)
driver=libcuda.so.1
if [[ -n "${FAKE_GPU:-}" ]]; then
  FAKE_GPU=$(realpath "$FAKE_GPU")
  export FAKE_GPU HORORING_CUDA_LIBRARY=$FAKE_GPU HORORING_NCCL_LIBRARY=$FAKE_GPU
  driver=$FAKE_GPU
  quick=(--quick)
  worlds=(2)
fi
# As tests/python/mpirun.py: as root, more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
export PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe
export PRTE_MCA_hwloc_default_binding_policy=none OMPI_MCA_btl=self,sm,tcp OMPI_MCA_pml=ob1

# part NAME SECONDS COMMAND...
part() {
  local name=$1 seconds=$2 begin=$SECONDS code=0
  shift 2
  echo "== $name: $*" | tee -a "$log"
  timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee -a "$log"
  code=${PIPESTATUS[0]}
  echo "-- $name: exit code $code after $((SECONDS - begin)) s" | tee -a "$log"
  [[ $code -eq 0 ]] || failed=1
}

part machine 10 bash -c 'date -u; nvidia-smi || true'
part versions 20 python -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
part info 30 python -m hororing info
part verbs-1-nccl 60 env HORORING_GPU=nccl python benchmarks/gpu_check.py "$results/gpu_verbs_1.json"
for ranks in "${worlds[@]}"; do
  part "verbs-$ranks-staged" 60 env HORORING_GPU=staged mpirun -np "$ranks" \
    python benchmarks/gpu_check.py "$results/gpu_verbs_$ranks.json"
done
# Several ranks on one GPU: NCCL 2.30 and later, where it is told so.
part verbs-2-one-gpu 60 env HORORING_GPU=nccl NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 \
  NCCL_MAX_CTAS=4 HORORING_TIMEOUT_S=30 mpirun -np 2 \
  python benchmarks/gpu_check.py "$results/gpu_verbs_2_one_gpu.json"
part step 120 python benchmarks/gpu_step.py ${quick[@]+"${quick[@]}"} --json "$results/gpu_step.json"
pack=$(find build -name bench_gpu_pack -type f 2>/dev/null | head -n 1)
if [[ -n "$pack" ]]; then
  part pack 30 "$pack" "$driver" ${quick[@]+"${quick[@]}"}
else
  echo "== pack: not built; cmake --preset dev && cmake --build --preset dev --target bench_gpu_pack"
fi
exit $failed
