#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Unpacks speedscope's release, a page and its code, for tests to open our files with it.
#
#     tests/readers/fetch_speedscope.sh [FOLDER]
#
# FOLDER, build/speedscope by default, is there as a whole or not at all.
set -euo pipefail

VERSION=1.25.0
# Of the file that the registry has.
SHA256=2831f1e0d26df914b477e522d78b8485511495a6af81a0b88158f8b48f9e0d03
REGISTRY=${NPM_REGISTRY:-https://registry.npmjs.org}

folder=$(realpath -m "${1:-$(dirname "$0")/../../build/speedscope}")
mkdir -p "${folder%/*}"
work=$(mktemp -d "${folder%/*}/speedscope.XXXXXX")
trap 'rm -rf "$work"' EXIT
# No curl: a fresh Debian has none, and Python is what all else here runs on.
python3 -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' \
	"$REGISTRY/speedscope/-/speedscope-$VERSION.tgz" "$work/package.tgz"
echo "$SHA256  $work/package.tgz" | sha256sum --check --quiet
tar -xzf "$work/package.tgz" -C "$work" package/dist/release package/LICENSE
[[ -f $work/package/dist/release/index.html ]]
rm -rf "$folder"
mv "$work/package" "$folder"
