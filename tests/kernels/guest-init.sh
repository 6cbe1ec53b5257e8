#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# PID 1 of a guest: mounts what a distribution's systemd mounts and the other two disks, runs the
# command of the third one, and switches the machine off. Where the kernel's command line has
# systemd.run="/guest-init job", PID 1 is systemd, of which `job` is then a service.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root LANG=C.UTF-8 TERM=dumb
if [[ ${1:-} != job ]]; then
	[[ $(< /proc/cmdline) != *systemd.run=* ]] || exec /lib/systemd/systemd
	mount -t tmpfs none /tmp
	mount -t tmpfs none /run
	mount -t cgroup2 none /sys/fs/cgroup
	mount -t bpf none /sys/fs/bpf
	mount -t tracefs none /sys/kernel/tracing
	mount -t securityfs none /sys/kernel/security
	mkdir -p /dev/pts /dev/shm
	mount -t devpts none /dev/pts
	mount -t tmpfs none /dev/shm
	ln -s /proc/self/fd /dev/fd
	hostname guest
	ip link set lo up
fi

mkdir -p /job
mount -t ext4 /dev/vdc /job
checkout=$(cat /job/checkout)
mkdir -p "$checkout"
mount -t ext4 -o ro /dev/vdb "$checkout"
cd "$checkout" || exit
stty -F /dev/ttyS1 raw -echo
bash /job/command < /dev/null > /dev/ttyS1 2>&1
echo $? > /job/status
sync
umount /job
busybox poweroff -f
