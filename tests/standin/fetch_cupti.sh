#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Unpacks NVIDIA's CUPTI from wheels of PyPI, headers and libraries, for tests to compare with what
# the helper declares, and to load (tests/unit/test_nvidia_abi.py). Nothing is installed.
#
#     tests/standin/fetch_cupti.sh [FOLDER]
#
# FOLDER, build/cupti by default, is there as a whole or not at all: VERSION/{include,lib}. Wheels are
# 80 MB. PYTHON has pip, and is python3 by default.
set -euo pipefail

# Each with its digest. Compilers and the driver's header change little within a major version.
wheels=(
	nvidia-cuda-cupti-cu12==12.1.105:e54fde3983165c624cb79254ae9818a456eb6e87a7fd4d56a2352c24ee542d7e
	nvidia-cuda-cupti-cu12==12.4.127:9dec60f5ac126f7bb551c055072b69d85392b13311fcc1bcda2202d172df30fb
	nvidia-cuda-cupti-cu12==12.9.79:096bcf334f13e1984ba36685ad4c1d6347db214de03dbb6eebb237b41d9d934f
	nvidia-cuda-cupti==13.0.85:4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8
	nvidia-cuda-cupti==13.1.115:2c76d91807cf76fc0e4b08ad71c4dff0e8e9f678fc8dbbbc43ec55125a70b553
	nvidia-cuda-cupti==13.5.25:9dcca41c12a734192b14e7128ae116bc9ce1b9da686e2ebf48ae7a4415f76650
	nvidia-cuda-runtime-cu12==12.9.79:25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3
	nvidia-cuda-runtime==13.5.37:df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d
	nvidia-cuda-crt==13.5.37:e898b7f73d3035fa89915a3f7bf3b54a73e90249746111aed295822c4729bb29
)

folder=$(realpath -m "${1:-$(dirname "$0")/../../build/cupti}")
mkdir -p "${folder%/*}"
work=$(mktemp -d "${folder%/*}/cupti.XXXXXX")
trap 'rm -rf "$work"' EXIT

platforms=()
for libc in manylinux1 manylinux2014 manylinux_2_17 manylinux_2_25 manylinux_2_27; do
	platforms+=(--platform "${libc}_x86_64")
done
for wheel in "${wheels[@]}"; do
	name=${wheel%%:*}
	echo "$name --hash=sha256:${wheel##*:}" >"$work/wanted"
	"${PYTHON:-python3}" -m pip download -q --disable-pip-version-check --no-deps --require-hashes \
		--only-binary :all: "${platforms[@]}" -d "$work/$name" -r "$work/wanted"
	"${PYTHON:-python3}" -m zipfile -e "$work/$name"/*.whl "$work/$name"
done

for cupti in "$work"/nvidia-cuda-cupti*; do
	version=${cupti##*==}
	major=${version%%.*}
	place=$work/cupti/$version
	mkdir -p "$place/lib"
	# The first that has a header wins: CUPTI's own.
	for part in "$cupti" "$work"/nvidia-cuda-runtime{,-cu12}=="$major".* "$work"/nvidia-cuda-crt==*; do
		for include in "$part"/nvidia/*/include; do
			[[ ! -d $include ]] || cp -rn "$include" "$place/"
		done
	done
	cp "$cupti"/nvidia/*/lib/libcupti.so."$major" "$place/lib/"
done

rm -rf "$folder"
mv "$work/cupti" "$folder"
