#!/bin/bash
# One GPU of several, as if the machine had no other: lane.sh GPU COMMAND ARGS…   (needs root and util-linux)
#
# So scripts for one GPU can run side by side on a machine of several; or on one GPU, with LAB_SHARED=1. The command has a session, a cgroup and
# a /dev of its own, in which that GPU's node alone is there, and the driver's libraries are told not to make the others anew. Host memory, its
# bandwidth and the CPUs are shared.
# This script takes the name of an init: what one of those started is not taken for one job, and so the lanes have nothing in common.
set -e
gpu=$1
shift
printf tini > "/proc/$$/comm"
trap 'kill "$lane"' TERM INT
setsid -w unshare --mount --propagation private bash -e -c '
gpu=$1; shift
dev=$(mktemp -d); mount -t tmpfs -o mode=755 lane "$dev"
for path in /dev/*; do
    name=${path##*/}
    case $name in nvidia[0-9]*) [ "$name" = "nvidia$gpu" ] || continue ;; esac
    if [ -L "$path" ]; then cp -P "$path" "$dev/"
    elif [ -d "$path" ]; then mkdir "$dev/$name"; mount --rbind "$path" "$dev/$name"
    else touch "$dev/$name"; mount --bind "$path" "$dev/$name"; fi
done
mount --rbind "$dev" /dev
parameters=$(mktemp); sed "s/ModifyDeviceFiles: 1/ModifyDeviceFiles: 0/" /proc/driver/nvidia/params > "$parameters"
mount --bind "$parameters" /proc/driver/nvidia/params
echo +memory > /sys/fs/cgroup/cgroup.subtree_control 2> /dev/null || true
if mkdir -p "/sys/fs/cgroup/lane$gpu-$$" 2> /dev/null; then echo $$ > "/sys/fs/cgroup/lane$gpu-$$/cgroup.procs"; fi
exec "$@"' lane "$gpu" "$@" &
lane=$!
wait "$lane"
