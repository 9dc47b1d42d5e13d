#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU checks, on a machine without network:
#   run.sh [--all] [PART|STAGE]...   runs what is stale, of these parts and stages if any are named; --all: also the rest
#   run.sh --list                    prints the parts (parts.py), current or stale, and how long each took last time
#   run.sh --dry-run ...             prints the commands
# Each stage of a part is merged into record.json as it ends, so a run may be cut short and begun again. The record names
# the sources by hashes. In a checkout the hash of all is asked of git; elsewhere, also in a copy that lies in another
# commit's checkout, pass CUATTN_SOURCE_HASH, printed by `tests/gpu/record.py hash` where git is.
# CUATTN_GPU_OUT: folder for record.json and the ends of the logs. CUATTN_GPU_SECONDS: the whole run ends by then; a stage
# that took longer last time, on several GPUs twice as long, is not begun.
# CUATTN_GPU_WIDTH: stages side by side; default 4 for each of several GPUs, else 1.
# Where several GPUs are visible the stages run side by side, each beginning at a GPU of its own, and what a stage runs in
# parallel goes round the GPUs. The Python tests begin first and the tools when they are done, of each the longest first.
set -uo pipefail
cd "$(dirname "$0")/../.."
work=$PWD/build/gpu
out=${CUATTN_GPU_OUT:-tests/gpu}
python=${PYTHON:-python3}
record="$python tests/gpu/record.py"
limit=530  # seconds a stage may take
seconds=${CUATTN_GPU_SECONDS:-1000000}
dry="" every="" words=()
for word in "$@"; do
  case $word in
    --list) exec $record list --logs "$work/logs" --out "$out" ;;
    --dry-run) dry=1 ;;
    --all) every=--every ;;
    *) words+=("$word") ;;
  esac
done
# A line for each stage of a part: part, stage, the seconds it took last time, what it is told.
stale() { $record jobs $every $longest --logs "$work/logs" --out "$out" -- "${words[@]}"; }
several_gpus() { [[ $gpus == *,* ]]; }

cores=$(nproc)
gpus=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, -)}
gpus=${gpus:-0}
several_gpus && longest=--longest-first || longest=""
jobs=$(stale) || exit 2
[ -n "$jobs" ] || { echo "run.sh: all of it is current" && exit 0; }

mkdir -p "$work/logs" "$out"
[ -n "$dry" ] || export CUATTN_SOURCE_HASH=${CUATTN_SOURCE_HASH:-$($record hash)}
export PYTHONPATH=$work/site:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}
tests=$work/tests/cuattn_tests

# Prints a command instead, in a dry run.
go() { if [ -n "$dry" ]; then echo "  $*" >&3; else "$@"; fi; }

# on_gpu I COMMAND...: on the I-th of $gpus, counted round and round.
on_gpu() {
  local list
  IFS=, read -ra list <<<"$gpus"
  CUDA_VISIBLE_DEVICES=${list[$1 % ${#list[@]}]} go "${@:2}"
}

# shards LOG N COMMAND...: the command N times side by side, over all GPUs, with SHARD replaced by I/N; output to LOG.I.
shards() {
  local log=$1 count=$2 status=0 pids=() i
  shift 2
  [ -z "$dry" ] || { go "$count times:" "$@" && return; }
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
  CMAKE_BUILD_PARALLEL_LEVEL=$cores go $python -m pip install --no-index --no-build-isolation --no-deps --no-compile \
    --disable-pip-version-check --quiet --upgrade --target "$work/site" -C build-dir="$work/lib" \
    -C cmake.define.CUATTN_CUDA=ON . &&
    go cmake -G Ninja -S tests/cpp -B "$work/tests" -DCUATTN_TESTS_CUDA=ON \
      -Dcuattn_DIR="$([ -n "$dry" ] || $python -c 'import cuattn; print(cuattn.cmake_dir())')" &&
    go cmake --build "$work/tests" -j "$cores" && go $python -c 'import cuattn; print(cuattn.info())'
}

# The stages, of the part $part. $arguments: its Python files, or which cases of cuattn_tests are its own.

pytest() {
  local workers=()
  # The parts side by side share the cores, of which core takes half, of 32 or fewer all, for most of the tests are its.
  # A worker holds half a gigabyte of its GPU before it has run a test. Its libraries must not start a thread for every
  # core each.
  local share=1 count
  if [ "$width" != 1 ] && [ "$(grep -c " pytest " <<<"$jobs")" != 1 ]; then
    if [ "$part" != core ]; then share=8; elif [ "$cores" -gt 32 ]; then share=2; fi
  fi
  count=$((cores / share > 4 ? cores / share : 4))
  $python -c 'import xdist' 2>/dev/null && workers=(-n $count --dist worksteal) &&
    export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 CUATTN_NUM_THREADS=2
  # Each worker takes its GPUs from the list (tests/conftest.py).
  CUDA_VISIBLE_DEVICES=$gpus CUATTN_REQUIRE_CUDA=1 XLA_PYTHON_CLIENT_PREALLOCATE=false \
    go $python -m pytest "${workers[@]}" -v -rf -p told -p no:cacheprovider \
    --no-cpu-cases --durations 10 --junitxml "$log.xml" $arguments
}

# Arrays of gigabytes, 45 GiB at most in use: one process, so that no two tests share the memory.
limits() {
  on_gpu 0 env CUATTN_REQUIRE_CUDA=1 $python -m pytest -m slow -v -rf -p told -p no:cacheprovider \
    --durations 10 --junitxml "$log.xml" $arguments
}

cpp() {
  local status=0 pids=() first
  on_gpu 0 "$tests" test $arguments >"$log.seed1" 2>&1 &
  first=$!
  several_gpus || wait $first || status=1  # the cases of streams and threads want a quiet GPU
  if [[ $part == forward-* ]]; then
    # The references are computed on the host, one thread each: the seeds run side by side.
    for seed in 2 3 4 5 6; do
      on_gpu $((seed - 1)) "$tests" test $arguments --filter instance/ --seed "$seed" >"$log.seed$seed" 2>&1 &
      pids+=($!)
    done
  fi
  for pid in $first "${pids[@]}"; do wait "$pid" || status=1; done
  cat "$log.seed"*
  case $part in
    forward-sm90) on_gpu 0 "$tests" perf --filter sm90 || status=1 ;;
    forward-portable) on_gpu 0 "$tests" perf --filter sm80 || status=1 ;;
  esac
  return $status
}

# One tool over every case of the part, spread over processes: the tools are bound by the host. Before that the tool must
# report an error made on purpose; otherwise its silence means nothing.
sanitize() {
  local tool=$1 exclude=$2
  shift 2
  on_gpu 0 compute-sanitizer --tool "$tool" --error-exitcode 1 "$@" "$tests" plant "$tool" >"$log.planted" 2>&1
  if [ -z "$dry" ] && ! grep -Eq 'SUMMARY: [1-9][0-9]* (error|hazard)' "$log.planted"; then
    echo "$tool did not report the planted error"
    return 1
  fi
  shards "$log" 8 compute-sanitizer --tool "$tool" --error-exitcode 1 "$@" \
    "$tests" --sanitize $arguments --exclude "$exclude" --shard SHARD
}

memcheck() {
  local status=0
  sanitize memcheck /cublas/ --padding 512 --leak-check full || status=1
  # cuBLAS keeps its handle's memory until the process ends, so its cases run without the leak check. Its kernels are
  # not ours to check for races or initialisation.
  [ "$part" != forward-portable ] || on_gpu 1 compute-sanitizer --tool memcheck --error-exitcode 1 --padding 512 \
    "$tests" --sanitize --filter /cublas/ || status=1
  return $status
}

# racecheck does not know copies that the TMA makes nor all that mbarriers order: who waits for whom in forward_sm90, in the
# fused backward pass and in the test of rings is left to synccheck, the watchdog and bit-equal repetition. Groups that keep
# columns at once write the same bytes side by side, as they are meant to; it looks at one after the other.
racecheck() {
  local prefill=instance/sm90/,prefill_over_pages_auto,prefill_over_pages_sm90,sm90_ring,sm90_columns_are_kept_by_groups_at_once
  sanitize racecheck "/cublas/,$prefill,cuda_backward_sm90_fused" --racecheck-report all
}
# Nor does initcheck know what a TMA or bulk store has written.
initcheck() { sanitize initcheck /cublas/,sm90_stmatrix_and_tma_store,cuda_backward_sm90_fused_in_order; }
# At head_dim 96 the two groups of the fused backward pass meet at a named barrier from two places, which synccheck takes for
# divergence: there the watchdog and repetition are left.
synccheck() { sanitize synccheck /cublas/,float16_d96_heads,float16_d96_groups; }

# A second build, whose mbarrier waits trap after two seconds. Only 90a code waits so.
watched() {
  go cmake -G Ninja -S . -B "$work/watchdog" -DCUATTN_CUDA=ON -DCUATTN_CUDA_ARCHS=90-real -DCUATTN_WATCHDOG=ON \
    -DCUATTN_TESTS=ON && go cmake --build "$work/watchdog" -j "$cores" --target cuattn_tests
}

# The first stage that asks for that build makes it; before its cases it must end a wait in vain.
watchdog() {
  local watched=$work/watchdog/tests/cpp/cuattn_tests
  { flock 9 && watched 9>&-; } 9>"$work/watchdog.lock" && on_gpu 0 "$watched" plant watchdog &&
    shards "$log" 8 "$watched" test $arguments --filter sm90 --shard SHARD
}

# timed NAME SECONDS FUNCTION: its output goes to NAME.log; leaves its exit status in $status and its time in $took.
timed() {
  local begin=$SECONDS nice=0
  ! several_gpus || case $1 in build | core.pytest) ;; *.pytest | *.limits) nice=4 ;; *) nice=10 ;; esac
  log=$work/logs/$1 nice -n $nice timeout --kill-after 10 "$2" bash -o pipefail -c "$3" >"$work/logs/$1.log" 2>&1
  status=$? took=$((SECONDS - begin))
}
where() { echo --status "$status" --seconds "$took" --gpus "$gpus" --logs "$work/logs" --out "$out"; }

# run_stage PART STAGE LIMIT: records what came of it as soon as it ends.
run_stage() {
  timed "$1.$2" "$3" "$2"
  [ -z "$dry" ] || return 0
  if [ "$took" -ge "$3" ] && [ "$3" -lt "$limit" ]; then
    echo "$1 $2: cut short by CUATTN_GPU_SECONDS, not recorded; it said last:"
    tail -qn 2 "$work/logs/$1.$2.log"* | cut -c1-200
  elif ! flock "$work/lock" $record stage "$1" "$2" $(where); then
    tail -n 40 "$work/logs/$1.$2.log"
    echo "$1 $2" >>"$work/failed"
  fi
}

several_gpus && IFS=, read -ra list <<<"$gpus" && width=$((4 * ${#list[@]})) || width=1
width=${CUATTN_GPU_WIDTH:-$width}

exec 3>&1
export -f build pytest limits cpp sanitize memcheck racecheck initcheck synccheck watchdog watched go on_gpu several_gpus shards
export dry jobs work tests python cores gpus width part arguments
rm -f "$work/failed"
timed build "$limit" build
if [ -z "$dry" ]; then
  $record build $(where) --deps "$work/lib" "$work/tests" || { tail -n 40 "$work/logs/build.log" && exit 1; }
  jobs=$(stale)  # by what this build says of who includes what
fi
later="" tests_at_work=()
while read -r part stage last arguments; do
  # Kernels under a tool hold a GPU for long: beside them the Python tests of core took 420 s and were not done.
  case $stage in
    pytest | limits) ;;
    *) for pid in "${tests_at_work[@]}"; do wait "$pid"; done; tests_at_work=() ;;
  esac
  while [ "$(jobs -rp | wc -l)" -ge "$width" ]; do wait -n; done
  left=$((seconds - SECONDS))
  # Side by side a stage took as long as those beside it, of which fewer are left now.
  several_gpus && last=$((last / 2))
  if [ "$left" -lt 20 ] || [ "$last" -gt "$left" ]; then
    later+=" $part/$stage"
    continue
  fi
  [ -z "$dry" ] || echo "$part $stage"
  run_stage "$part" "$stage" $((left < limit ? left : limit)) </dev/null &
  [ "$stage" != pytest ] || tests_at_work+=($!)
  several_gpus && gpus=${gpus#*,},${gpus%%,*}  # the next stage begins at the next GPU
done <<<"$jobs"
wait
[ -n "$dry" ] || $record list --logs "$work/logs" --out "$out"
[ -z "$later" ] || echo "run.sh: no time was left for$later; run it again"
[ ! -e "$work/failed" ] || { echo "run.sh: FAILED" $(paste -sd, "$work/failed") && exit 1; }
