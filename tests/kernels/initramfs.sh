#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# /init of the initramfs: loads what the disk needs, and goes on from there.
mount -t devtmpfs none /dev
mount -t proc none /proc
mount -t sysfs none /sys
while read -r module; do insmod "/modules/$module"; done < /modules/order
# The disks appear a moment after their driver; the last of them last.
tries=0
until [ -b /dev/vdc ] || [ $((tries += 1)) -gt 100 ]; do sleep 0.1; done
mount -t ext4 /dev/vda /disk
for folder in dev proc sys; do mount --move /$folder /disk/$folder; done
exec switch_root /disk /guest-init
