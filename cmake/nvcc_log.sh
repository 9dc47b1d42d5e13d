#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# nvcc_log.sh [ccache] nvcc ARGUMENTS: runs nvcc and keeps its stderr, where ptxas reports registers
# and spills, in OBJECT.ptxas beside the object, with the seconds it took. Warnings are still shown.
# ccache repeats the stderr of the compilation that filled its entry, so a hit leaves the same log.
object=
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
case $object in
  *.o) ;;
  *) exec "$@" ;;
esac
# Note: by default ccache preprocesses for one architecture alone. A change inside
# `#if __CUDA_ARCH__ >= 900` or in a header included there would bring the old object back. In depend
# mode it hashes whole files, those of nvcc's own dependency file.
export CCACHE_DEPEND=1
begin=$(date +%s)
"$@" 2> "$object.ptxas"
status=$?
grep -v -E '^(ptxas|nvlink) info|bytes stack frame,|^[[:space:]]*$' "$object.ptxas" >&2
echo "seconds $(($(date +%s) - begin))" >> "$object.ptxas"
exit $status
