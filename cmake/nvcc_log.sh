#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# nvcc_log.sh nvcc ARGUMENTS: runs nvcc and keeps its stderr, where ptxas reports registers and
# spills, in OBJECT.ptxas beside the object, with the seconds it took. Warnings are still shown.
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
begin=$(date +%s)
"$@" 2> "$object.ptxas"
status=$?
grep -v -E '^(ptxas|nvlink) info|bytes stack frame,|^[[:space:]]*$' "$object.ptxas" >&2
echo "seconds $(($(date +%s) - begin))" >> "$object.ptxas"
exit $status
