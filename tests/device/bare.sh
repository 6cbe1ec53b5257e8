#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command in the root of a machine that has next to nothing: `bare.sh ROOT TREE COMMAND...`.
#
# ROOT is an empty folder. There are the C library, the shell's tools and the distribution's Python
# without any package, the folder TREE as /tree, where the command runs, and the kernel's file
# systems; no network, no compiler, no BCC, no virtual environment. As root; what it mounts is gone
# with it.
set -euo pipefail
if [[ -z ${IS_INSIDE:-} ]]; then
	IS_INSIDE=1 exec unshare --mount --net --propagation private "$0" "$@"
fi
unset IS_INSIDE
root=$1 tree=$2
mount -t tmpfs none "$root"
mkdir -p "$root"/{usr,etc,proc,sys,dev,run,root,tree,var/lib,tmp}
chmod 1777 "$root/tmp"
for link in bin sbin lib lib64; do ln -s "usr/$link" "$root/$link"; done
mount --rbind /usr "$root/usr"
# Packages of Python, and what was installed beside the distribution's.
for folder in /usr/lib/python3/dist-packages /usr/local /usr/lib/gcc; do
	mount -t tmpfs none "$root$folder"
done
cp /etc/{passwd,group,ld.so.cache} "$root/etc"
for folder in proc sys dev; do mount --rbind "/$folder" "$root/$folder"; done
mount --bind "$tree" "$root/tree"
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
	chroot "$root" sh -c 'cd /tree && exec "$@"' sh "${@:3}"
