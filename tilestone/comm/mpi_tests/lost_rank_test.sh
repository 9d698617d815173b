#!/bin/sh
# lost_rank_test.sh <mpirun> <lost_rank program> kill|stop
#
# Passes if every other rank reports the number of the lost rank within seconds.
# --enable-recovery keeps mpirun from killing the survivors. mpirun would wait for a stopped rank
# forever, so this script ends it after all survivors have reported, or after 60 s.
set -u
ranks=4
lost=$((ranks - 1))
output=$(mktemp)
trap 'rm -f "$output"' EXIT

"$1" --enable-recovery --oversubscribe --allow-run-as-root -n $ranks "$2" "$3" >"$output" 2>&1 &
job=$!
reports() { grep -c "^survivor .* waiting for rank $lost" "$output"; }
tenths=0
while [ "$(reports)" -lt $lost ] && [ $tenths -lt 600 ]; do
  sleep 0.1
  tenths=$((tenths + 1))
done
[ "$3" = stop ] && kill -TERM $job
wait $job
status=$?
cat "$output"
[ "$(reports)" -eq $lost ] || exit 1
# If the rank was stopped, the signal above set the status. Otherwise the survivors' status counts.
[ "$3" = stop ] || exit $status
