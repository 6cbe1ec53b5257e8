#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Unpacks Debian's CPython 3.14 and 3.15, with the C library that they need, for tests to run them
# (tests/interpreters.py). No package manager of this machine hears of it, and nothing is installed.
#
#     tests/python/fetch.sh [FOLDER]
#
# FOLDER, build/pythons by default, is there as a whole or not at all.
set -euo pipefail

# The first release of Debian that has both. What is fetched is checked against its signatures.
MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
SUITE=forky
KEYS=/usr/share/keyrings/debian-archive-keyring.gpg

packages=(libc6 libgcc-s1 zlib1g libexpat1 libffi8 libzstd1)
for version in 3.14 3.15; do
	# -dev has the headers that layouts are compared with.
	packages+=("python$version-minimal" "libpython$version"{,-minimal,-stdlib,-dev})
done

folder=$(realpath -m "${1:-$(dirname "$0")/../../build/pythons}")
mkdir -p "${folder%/*}"
work=$(mktemp -d "${folder%/*}/pythons.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/apt/{lists/partial,cache/archives/partial} "$work/debs" "$work/pythons"
: >"$work/apt/status"
echo "deb [signed-by=$KEYS] $MIRROR $SUITE main" >"$work/apt/sources.list"

# As whoever runs this, not as _apt: who may not look into the folder of a checkout.
apt=(-qq -o Dir::Etc::SourceList="$work/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
	-o Dir::State="$work/apt" -o Dir::State::Lists="$work/apt/lists" -o Dir::State::Status="$work/apt/status"
	-o Dir::Cache="$work/apt/cache" -o APT::Sandbox::User="$(id -un)" -o APT::Architecture=amd64
	-o APT::Architectures=amd64 -o Acquire::Retries=3 -o Acquire::Languages=none
	-o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false)
apt-get "${apt[@]}" update
(cd "$work/debs" && apt-get "${apt[@]}" download "${packages[@]}")
for deb in "$work"/debs/*.deb; do
	dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$work/pythons" --exclude=./usr/share
done
[[ -x $work/pythons/usr/bin/python3.14 && -x $work/pythons/usr/bin/python3.15 ]]

rm -rf "$folder"
mv "$work/pythons" "$folder"
