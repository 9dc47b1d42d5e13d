#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU checks, on a machine without network:
#   run.sh [build|pytest|limits|cpp|memcheck|racecheck|initcheck|synccheck|watchdog]...
# No argument runs all stages. Each stays under nine minutes and merges its counts into record.json, which names the
# sources it ran on by their hash. In a checkout the hash is asked of git; elsewhere, also in a copy that lies in another
# commit's checkout, pass CUATTN_SOURCE_HASH, printed by `tests/gpu/record.py hash` where git is.
# CUATTN_GPU_OUT: folder for record.json and the ends of the logs.
# Where several GPUs are visible the stages after the build run side by side, each beginning at a GPU of its own, and what
# a stage runs in parallel goes round the GPUs.
set -uo pipefail
all="build pytest limits cpp memcheck racecheck initcheck synccheck watchdog"
stages=("$@")
[ $# -gt 0 ] || read -ra stages <<<"$all"
for stage in "${stages[@]}"; do
  if [[ " $all " != *" $stage "* ]]; then
    echo "run.sh: unknown stage '$stage'; stages: $all" >&2
    exit 2
  fi
done
cd "$(dirname "$0")/../.."
work=$PWD/build/gpu
out=${CUATTN_GPU_OUT:-tests/gpu}
python=${PYTHON:-python3}
cores=$(nproc)
limit=530  # seconds a stage may take
mkdir -p "$work/logs" "$out"
gpus=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, -)}
gpus=${gpus:-0}
export CUATTN_SOURCE_HASH=${CUATTN_SOURCE_HASH:-$($python tests/gpu/record.py hash)}
export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
tests=$work/tests/cuattn_tests

# on_gpu I COMMAND...: on the I-th of $gpus, counted round and round.
on_gpu() {
  local list
  IFS=, read -ra list <<<"$gpus"
  CUDA_VISIBLE_DEVICES=${list[$1 % ${#list[@]}]} "${@:2}"
}
several_gpus() { [[ $gpus == *,* ]]; }

# shards LOG N COMMAND...: the command N times side by side, over all GPUs, with SHARD replaced by I/N; output to LOG.I.
shards() {
  local log=$1 count=$2 status=0 pids=() i
  shift 2
  rm -f "$log."[0-9]*
  for ((i = 0; i < count; ++i)); do
    on_gpu "$i" "${@//SHARD/$i/$count}" >"$log.$i" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  cat "$log."[0-9]*
  return $status
}

build() {
  CMAKE_BUILD_PARALLEL_LEVEL=$cores $python -m pip install --no-index --no-build-isolation --no-deps --no-compile \
    --disable-pip-version-check --quiet --upgrade --target "$work/site" -C build-dir="$work/lib" \
    -C cmake.define.CUATTN_CUDA=ON . &&
    cmake -G Ninja -S tests/cpp -B "$work/tests" -DCUATTN_TESTS_CUDA=ON \
      -Dcuattn_DIR="$($python -c 'import cuattn; print(cuattn.cmake_dir())')" &&
    cmake --build "$work/tests" -j "$cores" &&
    $python -c 'import cuattn; print(cuattn.info())'
}

pytest() {
  local workers=()
  # One worker a core: their libraries must not start a thread for every core each.
  $python -c 'import xdist' 2>/dev/null && workers=(-n "$cores" --dist worksteal) &&
    export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 CUATTN_NUM_THREADS=2
  # test_cpp.py builds what the build stage has built; the cpp stage runs it.
  # Each worker takes its GPUs from the list (tests/conftest.py).
  CUDA_VISIBLE_DEVICES=$gpus CUATTN_REQUIRE_CUDA=1 XLA_PYTHON_CLIENT_PREALLOCATE=false \
    $python -m pytest "${workers[@]}" -q -rf -p no:cacheprovider --ignore tests/test_cpp.py \
    --durations 10 --junitxml "$work/logs/pytest.xml" tests
}

# Arrays of gigabytes, 45 GiB at most in use: one process, so that no two tests share the memory.
limits() {
  on_gpu 0 env CUATTN_REQUIRE_CUDA=1 $python -m pytest -m slow -q -rf -p no:cacheprovider \
    --durations 10 --junitxml "$work/logs/limits.xml" tests/test_limits*.py
}

cpp() {
  local status=0 pids=() first
  on_gpu 0 "$tests" test >"$work/logs/cpp.seed1" 2>&1 &
  first=$!
  several_gpus || wait $first || status=1  # its cases of streams and threads want a quiet GPU
  # The references are computed on the host, one thread each: the seeds run side by side.
  for seed in 2 3 4 5 6; do
    on_gpu $((seed - 1)) "$tests" test --filter instance/ --seed "$seed" >"$work/logs/cpp.seed$seed" 2>&1 &
    pids+=($!)
  done
  for pid in $first "${pids[@]}"; do wait "$pid" || status=1; done
  cat "$work/logs/cpp.seed"*
  on_gpu 0 "$tests" perf --filter sm || status=1
  return $status
}

# One tool over every kernel instance, spread over processes: the tools are bound by the host. Before that the tool must
# report an error made on purpose; otherwise its silence means nothing.
sanitize() {
  local tool=$1 exclude=$2
  shift 2
  on_gpu 0 compute-sanitizer --tool "$tool" --error-exitcode 1 "$@" "$tests" plant "$tool" >"$work/logs/$tool.planted" 2>&1
  if ! grep -Eq 'SUMMARY: [1-9][0-9]* (error|hazard)' "$work/logs/$tool.planted"; then
    echo "$tool did not report the planted error"
    return 1
  fi
  shards "$work/logs/$tool" 8 compute-sanitizer --tool "$tool" --error-exitcode 1 "$@" \
    "$tests" --sanitize --exclude "$exclude" --shard SHARD
}

memcheck() {
  local status=0
  sanitize memcheck /cublas/ --padding 512 --leak-check full || status=1
  # cuBLAS keeps its handle's memory until the process ends, so its cases run without the leak check. Its kernels are
  # not ours to check for races or initialisation.
  on_gpu 1 compute-sanitizer --tool memcheck --error-exitcode 1 --padding 512 \
    "$tests" --sanitize --filter /cublas/ || status=1
  return $status
}

# racecheck does not know copies that the TMA makes nor all that mbarriers order: who waits for whom in prefill_sm90 and in
# the test of its rings is left to synccheck, the watchdog and bit-equal repetition.
racecheck() {
  local prefill=instance/sm90/,prefill_over_pages_auto,prefill_over_pages_sm90,sm90_ring
  sanitize racecheck "/cublas/,$prefill" --racecheck-report all
}
# Nor does initcheck know what a TMA store has written.
initcheck() { sanitize initcheck /cublas/,sm90_stmatrix_and_tma_store; }
synccheck() { sanitize synccheck /cublas/; }

# A build whose mbarrier waits trap after two seconds; first it must end a wait in vain. Only 90a code waits so.
watchdog() {
  local build=$work/watchdog
  cmake -G Ninja -S . -B "$build" -DCUATTN_CUDA=ON -DCUATTN_CUDA_ARCHS=90-real -DCUATTN_WATCHDOG=ON \
    -DCUATTN_TESTS=ON >/dev/null && cmake --build "$build" -j "$cores" --target cuattn_tests || return 1
  on_gpu 0 "$build/tests/cpp/cuattn_tests" plant watchdog &&
    shards "$work/logs/watchdog" 8 "$build/tests/cpp/cuattn_tests" test --filter sm90 --shard SHARD
}

# Its output goes to its log and to stdout.
run_stage() {
  local begin=$SECONDS
  timeout --kill-after 10 "$limit" bash -o pipefail -c "$1" 2>&1 | tee "$work/logs/$1.log"
  echo "${PIPESTATUS[0]} $((SECONDS - begin))" >"$work/logs/$1.end"
}

record_stage() {
  local status seconds
  read -r status seconds <"$work/logs/$1.end"
  $python tests/gpu/record.py stage "$1" --status "$status" --seconds "$seconds" --gpus "$gpus" \
    --logs "$work/logs" --out "$out"
}

export -f $all on_gpu several_gpus shards sanitize
export work tests python cores gpus
failed=0 later=()
for stage in "${stages[@]}"; do
  printf '\n== %s\n' "$stage"
  if [ "$stage" != build ] && several_gpus; then
    run_stage "$stage" >/dev/null &
    later+=("$stage")
    gpus=${gpus#*,},${gpus%%,*}  # the next stage begins at the next GPU
  else
    run_stage "$stage"
    record_stage "$stage" || failed=1
  fi
done
wait
for stage in "${later[@]}"; do
  record_stage "$stage" && continue
  failed=1
  tail -n 40 "$work/logs/$stage.log"
done
exit $failed
