# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` need nothing but a fresh Debian or Ubuntu and root: both install what
# is missing first, and take no time for it when nothing is.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help setup setup-demo setup-test setup-bench demo fleet-demo test unit lint format bench wheel
.PHONY: setup-kernels kernels programs image lock clean

# The distribution's own interpreter, whatever comes first in PATH: only it finds the bcc package.
PYTHON := /usr/bin/python3
VENV := .venv
DEMO := build/demo

APT_RUN := python3-bpfcc python3-venv gcc libc6-dev
# PoCL is an OpenCL device that needs no hardware.
APT_DEMO := $(APT_RUN) pocl-opencl-icd python3-pyopencl
APT_TEST := $(APT_DEMO) g++ binutils nodejs ocl-icd-opencl-dev openssl
# The tools that OVERHEAD.md compares with, and the browser that it measures pages in, which Ubuntu has
# as a snap only; perf's package has another name in each distribution.
APT_BENCH := $(APT_TEST) bpftrace \
	$(if $(shell grep -x ID=ubuntu /etc/os-release),linux-tools-generic,linux-perf chromium)
# To fetch kernels, make disks of them, and boot these.
APT_KERNELS := $(APT_TEST) busybox-static debootstrap e2fsprogs kmod qemu-system-x86 zstd

# Where it is set, as in many container images, each start of Python would compile all that it
# imports: 0.4 of the 1.6 s of CPU time that a short recording takes, and 4 s to collect the tests.
unexport PYTHONDONTWRITEBYTECODE
export DEBIAN_FRONTEND := noninteractive
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# By another name, which make does not look for: it would run whole recipes that have it also when it
# is asked to print them only (make -n).
MAKE_TARGET := $(MAKE) --no-print-directory

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 23

# At a recipe's end, also a bad one: what root made in a user's clone belongs to that user.
define hand_back
hand_back() {
	if [[ -n $${SUDO_UID:-} ]]; then
		find . -name .git -prune -o -user root -exec chown -h "$$SUDO_UID:$$SUDO_GID" {} +
	fi
}
trap hand_back EXIT
endef

# What is loaded into targets; only where its sources changed.
HELPER := $(MAKE) --no-print-directory -s -C gpu/nvidia/helper

# Where they changed. Not root: the first recording compiles them, and keeps them in its cache.
define compile_programs
	if ! $(VENV)/bin/python -m aiflame.agent.kernel.compile --check; then
		echo "compiling the kernel programs"
		mkdir -p build
		$(VENV)/bin/python -m aiflame.agent.kernel.compile > build/programs.new
		mv build/programs.new bpf/programs.bin
	fi
endef

setup: APT := $(APT_RUN)
setup: LOCK := requirements.lock
setup-demo: APT := $(APT_DEMO)
setup-demo: LOCK := requirements.lock
setup-test: APT := $(APT_TEST)
setup-test: LOCK := requirements-test.lock
setup-bench: APT := $(APT_BENCH)
setup-bench: LOCK := requirements-test.lock
setup-kernels: APT := $(APT_KERNELS)
setup-kernels: LOCK := requirements-test.lock

setup:       ## install what `aiflame` needs: distribution packages, then .venv
setup-demo:  ## the same, and an OpenCL device made of the CPU
setup-test:  ## the same, and what the checks and tests need
setup-bench: ## the same, and the profilers to compare with
setup-kernels: ## the same as for tests, and what boots other kernels
setup setup-demo setup-test setup-bench setup-kernels:
	@$(hand_back)
	complain() { echo "make $@: $$1" >&2; exit 3; }
	missing=()
	for package in $(APT); do
		[[ $$(dpkg-query -W -f '$${db:Status-Status}' $$package 2>&1) == installed ]] \
			|| missing+=($$package)
	done
	if (( $${#missing[@]} )); then
		[[ -x /usr/bin/apt-get ]] || complain "only Debian and Ubuntu are known here; install: $${missing[*]}"
		[[ $$(id -u) == 0 ]] || complain "not root, and packages are missing ($${missing[*]}); run it with sudo"
		echo "installing $${missing[*]}"
		apt-get update -qq || { sleep 5; apt-get update -qq; }
		apt-get install -y -qq --no-install-recommends "$${missing[@]}" >/dev/null
	fi
	base=$$(realpath $(PYTHON))
	if [[ $$(cat $(VENV)/.base 2>&1) != "$$base $(CURDIR)" ]]; then
		echo "making $(VENV) from $$base"
		$(PYTHON) -m venv --clear --system-site-packages $(VENV)
		echo "$$base $(CURDIR)" > $(VENV)/.base
	fi
	key=$$(sha256sum pyproject.toml $(LOCK))
	if [[ $$(cat $(VENV)/.$(LOCK) 2>&1) != "$$key" ]]; then
		echo "installing $(LOCK) into $(VENV)"
		$(VENV)/bin/python -m pip install -q --require-hashes --only-binary :all: -r $(LOCK)
		$(VENV)/bin/python -m pip install -q --no-deps --no-build-isolation --editable .
		echo "$$key" > $(VENV)/.$(LOCK)
	fi
	# For who may not write here later, or is told not to.
	$(VENV)/bin/python -m compileall -q agent bpf gpu
	if [[ $$(id -u) == 0 ]]; then $(compile_programs); fi
	$(HELPER)
	# mypy cannot follow setuptools' map from folders to packages; it follows links.
	mkdir -p $(VENV)/src/aiflame
	for init in */__init__.py; do
		ln -sfn "../../../$${init%/*}" "$(VENV)/src/aiflame/$${init%/*}"
	done

programs: setup  ## compile the kernel programs, for every kernel, and what is loaded into targets
	@$(hand_back)
	$(compile_programs)

define needs_root
@$(hand_back)
[[ $$(id -u) == 0 ]] || { echo "make $@: loading BPF programs needs root: sudo make $@" >&2; exit 3; }
endef

demo:  ## record the bundled OpenCL program: a capture and two pages in build/demo
	$(needs_root)
	$(MAKE_TARGET) setup-demo
	mkdir -p $(DEMO)
	$(VENV)/bin/aiflame record --force -F 499 -o $(DEMO)/demo.aiflame \
		-- $(PYTHON) tests/workloads/inference.py
	$(VENV)/bin/aiflame report $(DEMO)/demo.aiflame --force --view gpu --color-by frame \
		-o $(DEMO)/demo-gpu.html
	echo
	echo "Open in a browser:"
	echo "  $(DEMO)/demo-gpu.html  what the device did, and which code launched it"
	echo "  $(DEMO)/demo.html      where the program's threads spent their time"

# The engine of a store in a directory: 181 MB, which nothing else needs.
CHDB := chdb==4.4.0
FLEET_DEMO := build/fleet-demo
SECONDS_OF_DEMO := 60

fleet-demo:  ## record four services by the agent for a minute, into a store: pages in build/fleet-demo
	$(needs_root)
	$(MAKE_TARGET) setup-demo
	if [[ $$($(VENV)/bin/python -m pip freeze) != *$(CHDB)* ]]; then
		echo "installing $(CHDB) into $(VENV)"
		$(VENV)/bin/python -m pip install -q --only-binary :all: $(CHDB)
	fi
	$(VENV)/bin/python tests/fleet_demo.py $(FLEET_DEMO) --seconds $(SECONDS_OF_DEMO)

# They compare times of a recording with the truth, and want the processors for themselves.
ALONE := $(wildcard tests/bpf/test_truth_*.py)
# These compare names, stacks and numbers, or have bounds for chance. The longest are the first.
BESIDE := injection_often unwind sleepers launches helpers opencl chains groups python_names \
	calls_hostile short_processes serialised namespaces python_chains cuda python jit graph_ids go \
	graphs python_hostile python_threads python_perf ends namings greenlets windows
BESIDE := $(wildcard $(foreach name, $(BESIDE), tests/bpf/test_$(name).py tests/bpf/test_truth_$(name).py))
ALONE := $(filter-out $(BESIDE), $(ALONE))
# Others that have nothing to do with what else is recorded.
BESIDE += $(addprefix tests/bpf/test_, $(addsuffix .py, help_examples descriptors hostile_files \
	record_options output_attacks injection_python least_rights hostile_maps injection_live \
	doctor_real dump stuck_files stuck_memory kernel_tables unwind_memory))

# With chDB, where it is installed: it keeps threads, handlers and much memory wherever it is loaded.
STORES := $(addprefix tests/, $(addsuffix .py, unit/test_store_engine unit/test_store_page \
	unit/test_sink_clickhouse bpf/test_fleet_demo))

OTHERS := $(filter-out $(ALONE) $(BESIDE) $(STORES), $(wildcard tests/bpf/test_*.py))
# They compute, and wait for little.
COMPUTING := $(STORES:%=--ignore=%) $(addprefix tests/, unit golden python readers browser)

# BREADTH=1, as in CI: also the tests that repeat, with each interpreter or a hundred times, what
# others have shown.
BREADTH :=

# Kernels to boot after the tests: it needs the network, which tests do not. Emulated machines want
# the processors for themselves as well.
BOOT :=

test:  ## all checks and tests; BREADTH=1 BOOT="5.10 6.1" as CI runs them, which boots two kernels
	$(needs_root)
	$(if $(BOOT),$(MAKE_TARGET) setup-kernels)
	$(MAKE_TARGET) setup-test
	rm -rf build/shared build/again
	mkdir -p build/again
	run() {
		$(VENV)/bin/python -m pytest $(if $(BREADTH),,-m "not breadth") "$$@" $(PYTEST)
	}
	run_series() {
		local code=0
		run -o cache_dir=build/failed-$$1 $$share "$${@:2}" || code=$$?
		case $$code in
		0 | 5) ;;  # 5: none was chosen
		1) echo "$${@:2}" > build/again/$$1 ;;  # tests failed
		*) return $$code ;;
		esac
	}
	# What a crowded second spoils gets a second try, with a new recording, once the crowd is gone.
	run_failed() {
		local series
		for series in build/again/*; do
			[[ -e $$series ]] || continue
			echo "A second try:"
			run -o cache_dir=build/failed-$${series##*/} --last-failed --last-failed-no-failures=none \
				-r a $$(< $$series) || status=1
			rm $$series
		done
	}
	# Recordings wait about as long as they compute: with four at a time two processors are busy. Each
	# run begins with other modules, and goes on with what is left; those of OTHERS, which look at the
	# whole host, are of one run only, and what computes is of the one that began with lint, too.
	run_stores() {
		local code=0
		{ $(MAKE_TARGET) lint && share= run_series stores $(STORES); } || code=$$?
		run_series rest $(COMPUTING) || code=$$?
		return $$code
	}
	status=0 share="--share-modules build/shared"
	run_stores > build/stores.log 2>&1 & stores=$$!
	run_series unit $(COMPUTING) $(BESIDE) > build/unit.log 2>&1 & unit=$$!
	run_series beside $(BESIDE) $(COMPUTING) > build/beside.log 2>&1 & beside=$$!
	run_series others $(OTHERS) $(COMPUTING) $(BESIDE) || status=1
	wait $$beside || status=1
	wait $$unit || status=1
	wait $$stores || status=1
	cat build/stores.log build/unit.log build/beside.log
	share=
	run_failed
	run_series alone $(ALONE) || status=1
	run_failed
	$(if $(BOOT),$(BOOT_KERNELS) --tries 2 $(BOOT) || status=1)
	exit $$status

# Which of tests/kernels/catalogue.py; none is all.
KERNELS :=
BOOT_KERNELS := $(VENV)/bin/python tests/kernels/run.py

# ENVIRONMENTS=1: one kernel on machines on which something is missing; SYSTEMD=1: one in which
# systemd runs the agent; WITH_BCC=1: the kernel
# programs are compiled inside.
kernels:  ## boot distributions' kernels (KERNELS="5.10 6.1"; default: all) and record in each
	$(needs_root)
	$(MAKE_TARGET) setup-kernels
	$(BOOT_KERNELS) $(if $(ENVIRONMENTS),--environments) $(if $(SYSTEMD),--systemd) $(if $(WITH_BCC),--with-bcc) $(KERNELS)

unit: setup-test  ## the tests that need no root
	@$(VENV)/bin/python -m pytest -m "not bpf" $(PYTEST)

C_OF_GPU := gpu/helper/*.[ch] gpu/nvidia/helper/*.[ch] tests/standin/*.[ch]

lint: setup-test  ## style and types
	@$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/clang-format --dry-run -Werror bpf/*.[ch] tests/workloads/*.[ch] tests/walkers/*.[ch] tests/kernels/*.c $(C_OF_GPU)
	$(VENV)/bin/mypy

format: setup-test  ## rewrite the sources in the project's style
	@$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	$(VENV)/bin/clang-format -i bpf/*.[ch] tests/workloads/*.[ch] tests/walkers/*.[ch] tests/kernels/*.c $(C_OF_GPU)

bench:  ## measure the cost of recording, beside bpftrace, perf and py-spy
	$(needs_root)
	$(MAKE_TARGET) setup-bench
	$(VENV)/bin/python tests/bench/run.py

wheel:  ## build a wheel into dist/, with the kernel programs compiled
	$(needs_root)
	$(MAKE_TARGET) programs
	rm -rf build/lib build/bdist.*  # setuptools would ship what is left over there
	rm -f dist/aiflame-*.whl  # of two versions pip installs neither
	$(VENV)/bin/python -m pip wheel -q --no-deps --no-build-isolation -w dist .
	ls dist/*.whl

# For what a builder needs besides, as behind a proxy.
IMAGE_FLAGS :=

image: wheel  ## build a container image of the wheel, by podman or docker
	@builder=$$(command -v podman || command -v docker) \
		|| { echo "make $@: neither podman nor docker is here" >&2; exit 3; }
	$$builder build $(IMAGE_FLAGS) -f deploy/Dockerfile -t aiflame .
	$$builder image inspect -f "{{.Size}}" aiflame | awk '{ printf "aiflame: %.0f MB\n", $$1 / 1e6 }'

# Needs uv. One set of versions for all interpreters: captures made on one are read on another.
UV_COMPILE := uv pip compile --quiet --universal --fork-strategy fewest --python-version 3.10 \
	--generate-hashes --no-annotate --custom-compile-command "make lock"

lock:  ## write the lock files anew from pyproject.toml
	@$(UV_COMPILE) $(UPGRADE) pyproject.toml --group build -o requirements.lock
	$(UV_COMPILE) $(UPGRADE) pyproject.toml --group build --group test --group bench \
		-c requirements.lock -o requirements-test.lock

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) build dist *.egg-info bpf/programs.bin gpu/nvidia/*.so
