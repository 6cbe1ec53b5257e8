#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that need an NVIDIA device, on a machine that has one and nothing else: root, no
# network, no BCC. From a copy of the tree:
#
#     tests/device/nvidia.sh carry [PYTHON_VERSION]   # here, with a network: build/device, 50 MB
#     tests/device/nvidia.sh run [OUT [OPTION...]]    # there: answers in OUT/answers.{txt,json}
#     tests/device/nvidia.sh rehearse [OUT [OPTION...]]  # anywhere: as far as it goes with the stand-in
#
# What is carried: the compiled kernel programs, the helper, the stand-in, a program of nvcc's where
# there is an nvcc, and packages as wheels, for the Python that is there (3.12 unless said). Nothing
# is compiled or fetched there. All is over within 8 minutes; options are those of nvidia.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
CARRIED=build/device
# Of 8 minutes, and of these what unpacking may take.
WHOLE_S=475 UNPACKING_S=60

carry() {
	local python=${1:-3.12} wanted
	make --no-print-directory setup-test
	wanted=$(.venv/bin/python tests/device/packages.py "$python" requirements.lock)
	rm -rf $CARRIED/standin $CARRIED/plain
	mkdir -p $CARRIED/standin
	cp bpf/programs.bin gpu/nvidia/libaiflame-nvidia.so $CARRIED
	make --silent -C tests/standin OUT="$PWD/$CARRIED/standin"
	if command -v nvcc >/dev/null; then
		local source=tests/workloads/cudatruth.cu
		local build=(nvcc -O2 -g -std=c++17 -lineinfo "$source")
		"${build[@]}" -cudart static -arch=all-major -o $CARRIED/plain
		"${build[@]}" -cudart shared -arch=sm_90 --no-compress -o $CARRIED/standin/plain
	fi
	# They are fetched once.
	if [[ $(cat $CARRIED/wheels/.wanted 2>&1) != "$python $wanted" ]]; then
		rm -rf $CARRIED/wheels
		local platforms=() glibc
		for glibc in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
		.venv/bin/python -m pip download -q --no-deps --only-binary :all: \
			--python-version "$python" --implementation cp \
			"${platforms[@]}" --platform manylinux2014_x86_64 \
			-d $CARRIED/wheels $wanted
		echo "$python $wanted" >$CARRIED/wheels/.wanted
	fi
	du -sh $CARRIED
}

# Without pip, which bare machines do not have: a wheel is an archive of what is to be there.
unpack() {
	local site=$1 wheel init
	cp $CARRIED/programs.bin bpf/
	cp $CARRIED/libaiflame-nvidia.so gpu/nvidia/
	for wheel in $CARRIED/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$site"; done
	mkdir -p "$site/aiflame"
	for init in */__init__.py; do ln -sfn "$PWD/${init%/*}" "$site/aiflame/${init%/*}"; done
}

# Else its packages are found and cannot be imported, which nobody would understand.
check_python() {
	local wanted here
	read -r wanted _ <$CARRIED/wheels/.wanted
	here=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	[[ $here == "$wanted" ]] && return
	echo "tests/device/nvidia.sh: packages for Python $wanted are carried, and here is $here: carry $here" >&2
	exit 2
}

ask() {
	local out=${1:-$CARRIED/out}
	check_python
	SITE=$(mktemp -d)
	trap 'rm -rf "$SITE"' EXIT
	timeout --kill-after=5 $UNPACKING_S tests/device/nvidia.sh unpack "$SITE"
	# The second deadline is for the case that the program that has the first does not get on.
	PYTHONPATH=$SITE:$PWD/tests timeout --kill-after=5 $((WHOLE_S - SECONDS)) python3 tests/device/nvidia.py \
		--out "$out" --budget-s $((WHOLE_S - SECONDS - 15)) "${@:2}"
}

case ${1:-} in
carry) carry "${2:-}" ;;
unpack) unpack "$2" ;;
run) ask "${@:2}" ;;
rehearse) ask "${2:-$CARRIED/out}" --standin $CARRIED/standin "${@:3}" ;;
*)
	sed -n '3,13s/^# \{0,1\}//p' "$0" >&2
	exit 2
	;;
esac
