#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that need an NVIDIA device, on a machine that has one and nothing else: root, no
# network, no BCC. From a copy of the tree:
#
#     tests/device/nvidia.sh carry [PYTHON_VERSION]   # here, with a network: build/device, 25 MB
#     tests/device/nvidia.sh run [OUT]                # there: answers in OUT/answers.{txt,json}
#     tests/device/nvidia.sh rehearse [OUT]           # here: as far as it goes with the stand-in
#
# What is carried: the compiled kernel programs, the helper, the stand-in, and packages as wheels,
# for the Python that is there (3.12 unless said).
set -euo pipefail
cd "$(dirname "$0")/../.."
CARRIED=build/device

# Of the lock file, without those for older Pythons, and without numpy, which PyTorch brings.
packages() {
	sed -n -E -e "/< '3\.12'|^numpy|^setuptools/d" -e 's/^([a-z0-9_-]+==[^ ]+).*/\1/p' requirements.lock
}

carry() {
	local python=${1:-3.12}
	make --no-print-directory setup-test
	rm -rf $CARRIED
	mkdir -p $CARRIED/wheels $CARRIED/standin
	cp bpf/programs.bin gpu/nvidia/libaiflame-nvidia.so $CARRIED
	make --silent -C tests/standin OUT="$PWD/$CARRIED/standin"
	local platforms=() glibc
	for glibc in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
	.venv/bin/python -m pip download -q --no-deps --only-binary :all: \
		--python-version "$python" --implementation cp \
		"${platforms[@]}" --platform manylinux2014_x86_64 \
		-d $CARRIED/wheels -r <(packages)
	du -sh $CARRIED
}

unpack() {
	site=$(mktemp -d)
	cp $CARRIED/programs.bin bpf/
	cp $CARRIED/libaiflame-nvidia.so gpu/nvidia/
	python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" $CARRIED/wheels/*.whl
	mkdir -p "$site/aiflame"
	for init in */__init__.py; do ln -sfn "$PWD/${init%/*}" "$site/aiflame/${init%/*}"; done
	export PYTHONPATH=$site:$PWD/tests
}

case ${1:-} in
carry) carry "${2:-}" ;;
run)
	unpack
	python3 tests/device/nvidia.py --out "${2:-$CARRIED/out}"
	;;
rehearse)
	export PYTHONPATH=$PWD/tests
	.venv/bin/python tests/device/nvidia.py --standin $CARRIED/standin --out "${2:-$CARRIED/out}"
	;;
*)
	sed -n '3,12s/^# \{0,1\}//p' "$0" >&2
	exit 2
	;;
esac
