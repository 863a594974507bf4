# `make demo` refreshes a tiny model from end to end; `make test` runs every check and test.
# Both create what is missing: .venv (the pipeline) and .venv-serve (vLLM), which cannot share one environment. Tests, and
# recipes that serve by llama.cpp, also need .venv-llama-cpp: `make llama-cpp`; those that learn Reasoning Gym's tasks
# .venv-reasoning-gym: `make reasoning-gym`.

PYTHON ?= python3
PINS := deploy/requirements
UV := .venv/bin/uv
DEVICE ?= $(if $(shell command -v nvidia-smi),cuda,cpu)

# uv does not read pip's settings: a folder of wheels that pip is told of is passed on. Where there is none, uv picks
# the build of torch (CPU or CUDA) that suits the machine.
comma := ,
space := $() $()
PIP_WHEELS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
export UV_FIND_LINKS ?= $(subst $(space),$(comma),$(strip $(PIP_WHEELS)))
TORCH_BACKEND ?= $(if $(UV_FIND_LINKS),,--torch-backend=$(if $(filter cpu,$(DEVICE)),cpu,auto))

# Pins only bind: CUDA's libraries, several GiB, are installed where the build of torch wants them. uv verifies the hashes
# that pins have, also those of constraints, and ends where a registry or a folder of wheels has another file.
PINNED = --constraints $(PINS)/$(1).txt --requirement $(PINS)/$(1).in
INSTALL := $(UV) pip install --quiet --compile-bytecode $(TORCH_BACKEND)
COMPILE := $(UV) pip compile --quiet --python-version 3.11 --no-header --no-emit-index-url --no-emit-find-links \
	--annotation-style line --generate-hashes

# Tests start Python hundreds of times, which compiles every module again where a shell forbids to keep bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo azurite bfcl buildah evalscope llama-cpp mcp media openenv ray reasoning-gym shared-store skypilot trackers verifiers test check style unit faults nightly docs environments benchmarks gpu-kit lock upgrade release clean

demo: environments
	.venv/bin/lifecycle run configs/quickstart.yaml
	.venv/bin/lifecycle status

# Many tests wait, for a server or a time limit: four files at a time use 1.4 of two cores. Files stay whole, and are begun
# in the order of tests/conftest.py: the longest first.
FILES_AT_A_TIME ?= 4
BESIDE_EACH_OTHER = --numprocesses $(FILES_AT_A_TIME) --dist loadfile --no-loadscope-reorder
# Named after the commit, so that tests/matrix.py can say what it proved.
REPORT = --junitxml build/test.xml --override-ini junit_family=xunit1 \
	--override-ini junit_suite_name=$$(git describe --always --dirty --abbrev=40 --exclude '*')
# Types are checked beside the tests. What is wrong with them is shown at once, and again below the tests' results.
test: style llama-cpp reasoning-gym
	@mkdir -p build
	@{ nice .venv/bin/mypy > build/types.txt 2>&1 || { cat build/types.txt >&2; exit 1; }; } & types=$$!; \
	.venv/bin/pytest tests/unit tests/fake_gpu tests/parity tests/faults tests/pipeline tests/gpu --durations 15 $(REPORT) \
		$(BESIDE_EACH_OTHER); tests=$$?; \
	wait $$types || { cat build/types.txt >&2; exit 1; }; exit $$tests
	@.venv/bin/python tests/nightly/parts.py --stale

unit: environments llama-cpp reasoning-gym .venv/.test-ready
	.venv/bin/pytest tests/unit $(BESIDE_EACH_OTHER)

# Every injected fault, and a table: how fast it was noticed and mended, and what was lost.
faults: environments .venv/.test-ready
	.venv/bin/pytest -m "" tests/faults --ignore tests/faults/test_year.py

# What takes too long for `make test`, in parts, a year of nightly refreshes first; and when each part last passed.
nightly: environments .venv/.test-ready
	.venv/bin/python tests/nightly/parts.py

# Write the tables and cheap outputs in all README.md again; unit tests hold that they are current.
docs: environments .venv/.test-ready
	.venv/bin/python tests/pages.py

check: style
	.venv/bin/mypy

style: environments .venv/.test-ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports --no-logo --no-cache

benchmarks: environments .venv/.test-ready
	for benchmark in $(BENCHMARKS); do .venv/bin/python $$benchmark || exit 1; done

# Without what they share, the trainer that some compare with, and what needs a model from outside.
BENCHMARKS := $(filter-out %/workload.py %/real_model.py %/planner_runs.py %/published_runs.py %/predict_table.py %/trl_sft.py $(wildcard tests/benchmarks/gpu*.py),$(wildcard tests/benchmarks/*.py))

# For a machine with a GPU, Python 3.12, torch and NumPy, but no network: what it lacks, in one folder. With the checkout
# it must not be larger than what such machines take.
GPU_KIT := .gpu-kit
GPU_KIT_BYTES := 50000000
GPU_PLATFORMS := $(foreach tag,2_28 2_27 2_24 2_17 2_12 2014 1,--platform manylinux$(if $(findstring _,$(tag)),_)$(tag)_x86_64)

gpu-kit:
	rm -rf $(GPU_KIT)
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		$(GPU_PLATFORMS) --require-hashes --requirement $(PINS)/gpu-kit.txt --dest $(GPU_KIT)
	@git describe --always --dirty --abbrev=40 --exclude '*' > $(GPU_KIT)/commit  # for tests/matrix.py
	@bytes=$$({ git ls-files -z | xargs -0 cat; cat $(GPU_KIT)/*.whl; } | wc -c); echo "$$bytes bytes with the checkout"; \
		[ $$bytes -le $(GPU_KIT_BYTES) ] || { echo "these are more than $(GPU_KIT_BYTES)" >&2; exit 1; }
	@echo "Take $(GPU_KIT) and the checkout along, and run there, again and again, until it has nothing left to do:"
	@echo "    deploy/gpu-kit.sh"

environments: .venv/.ready .venv-serve/.ready

.venv/bin/uv:
	@$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 13), sys.version' || \
		{ echo "Python 3.11 or 3.12 is needed: make PYTHON=python3.11 …" >&2; exit 1; }
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --quiet uv==0.13.8

# PyPI's torchvision is built for CUDA; this lets a CPU build of torch import it (PyTorch's own registry has builds for both).
HOOK := deploy/torchvision-without-cuda
HOOK_FILES := $(addprefix $(HOOK)/,pyproject.toml torchvision_without_cuda.py torchvision_without_cuda.pth)

.venv/.ready: $(PINS)/pipeline.in $(PINS)/pipeline.txt $(PINS)/fp8.in $(HOOK_FILES) pyproject.toml | .venv/bin/uv
	@echo "Installing the pipeline environment into .venv ($(DEVICE)) …"
	@$(INSTALL) --python .venv/bin/python $(call PINNED,pipeline)
	@$(if $(filter cuda,$(DEVICE)),$(INSTALL) --python .venv/bin/python --no-deps --requirement $(PINS)/fp8.in)
	@$(if $(filter cpu,$(DEVICE)),$(INSTALL) --python .venv/bin/python --no-deps ./$(HOOK))
	@$(INSTALL) --python .venv/bin/python --no-deps --editable .
	@.venv/bin/python -m compileall -q flows stages
	@touch $@

.venv/.test-ready: $(PINS)/test.in $(PINS)/media.in $(PINS)/shared-store.in $(PINS)/test.txt .venv/.ready
	@$(INSTALL) --python .venv/bin/python $(call PINNED,test)
	@touch $@

# Only for rows with videos or sound: 110 MB that nothing else needs. The tests' packages have them, too.
media: .venv/.media-ready

# Only for LIFECYCLE_TRACKERS: TensorBoard, Weights & Biases, SwanLab.
trackers: .venv/.ready
	@$(INSTALL) --python .venv/bin/python $(call PINNED,trackers)

# Only for homes whose store is shared through a bucket (`store.yaml`).
shared-store: .venv/.ready
	@$(INSTALL) --python .venv/bin/python $(call PINNED,shared-store)

# Only for `lifecycle mcp`.
mcp: .venv/.ready
	@$(INSTALL) --python .venv/bin/python $(call PINNED,mcp)

.venv/.media-ready: $(PINS)/media.in $(PINS)/media.txt .venv/.ready
	@$(INSTALL) --python .venv/bin/python $(call PINNED,media)
	@touch $@

.venv-serve/.ready: $(wildcard $(PINS)/serve-*.txt) $(addprefix deploy/vllm-metadata/,pyproject.toml vllm_portable_int4.py) $(HOOK_FILES) | .venv/bin/uv
	@echo "Installing vLLM into .venv-serve ($(DEVICE)) …"
	@$(PYTHON) -m venv .venv-serve
	@$(INSTALL) --python .venv-serve/bin/python $(SERVE_$(DEVICE))
	@touch $@

# Only for recipes with `harness: evalscope`, the first of which makes it, too: 1.2 GB that nothing else needs.
evalscope: .venv-evalscope/.ready

# As the first stage that asks for it does.
.venv-evalscope/.ready: $(PINS)/evalscope.txt | .venv/.ready
	@.venv/bin/python -m stages.harnesses.installation evalscope

# Only for recipes with `harness: bfcl`, likewise: 550 MB.
bfcl: .venv-bfcl/.ready

.venv-bfcl/.ready: $(PINS)/bfcl.txt $(PINS)/bfcl-overrides.txt | .venv/.ready
	@.venv/bin/python -m stages.harnesses.installation bfcl

llama-cpp: .venv-llama-cpp/.ready

.venv-llama-cpp/.ready: $(PINS)/llama-cpp.txt | .venv/bin/uv
	@echo "Installing llama.cpp into .venv-llama-cpp …"
	@$(PYTHON) -m venv .venv-llama-cpp
	@$(INSTALL) --python .venv-llama-cpp/bin/python --requirement $<
	@touch $@

# Only for recipes with the environment `reasoning_gym`, and tests: 230 MB. It pins another tabulate than the pipeline has.
reasoning-gym: .venv-reasoning-gym/.ready

.venv-reasoning-gym/.ready: $(PINS)/reasoning-gym.txt | .venv/bin/uv
	@echo "Installing Reasoning Gym into .venv-reasoning-gym …"
	@$(PYTHON) -m venv .venv-reasoning-gym
	@$(INSTALL) --python .venv-reasoning-gym/bin/python --requirement $<
	@touch $@

# Only for the nightly part `deployment`.
skypilot: .venv-skypilot/.ready

.venv-skypilot/.ready: $(PINS)/skypilot.txt | .venv/bin/uv
	@echo "Installing SkyPilot into .venv-skypilot …"
	@$(PYTHON) -m venv .venv-skypilot
	@$(INSTALL) --python .venv-skypilot/bin/python --requirement $<
	@touch $@

# Only for nightly tests of the environment `openenv`: 350 MB.
openenv: .venv-openenv/.ready

.venv-openenv/.ready: $(PINS)/openenv.txt | .venv/bin/uv
	@echo "Installing OpenEnv into .venv-openenv …"
	@$(PYTHON) -m venv .venv-openenv
	@$(INSTALL) --python .venv-openenv/bin/python --requirement $<
	@touch $@

# Only for the nightly part `ray`.
ray: .venv-ray/.ready

.venv-ray/.ready: $(PINS)/ray.txt | .venv/bin/uv
	@echo "Installing Ray into .venv-ray …"
	@$(PYTHON) -m venv .venv-ray
	@$(INSTALL) --python .venv-ray/bin/python --requirement $<
	@touch $@

# Only for the nightly part `harnesses`: OpenAI's client and verifiers, as agent programs have them.
verifiers: .venv-verifiers/.ready

.venv-verifiers/.ready: $(PINS)/verifiers.txt | .venv/bin/uv
	@echo "Installing verifiers into .venv-verifiers …"
	@$(PYTHON) -m venv .venv-verifiers
	@$(INSTALL) --python .venv-verifiers/bin/python --requirement $<
	@touch $@

# Only for the nightly part `object storage`: Azure's storage on this machine, which needs Node.js.
azurite: build/azurite/node_modules/.bin/azurite-blob

build/azurite/node_modules/.bin/azurite-blob:
	@npm install --silent --no-fund --no-audit --ignore-scripts --prefix build/azurite azurite@3.35.0

# Only for the nightly part `images`, which runs as root on Debian.
buildah:
	@command -v buildah debootstrap >/dev/null || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends buildah debootstrap crun netavark; }

SERVE_cpu := -r $(PINS)/serve-cpu.txt --overrides $(PINS)/serve-cpu-overrides.txt ./deploy/vllm-metadata ./$(HOOK)
SERVE_cuda := -r $(PINS)/serve-cuda.txt

# The pins name neither registries nor the CPU build of torch, so that the same files serve every machine. For the same
# reason packages that PyTorch's own registry has builds of, one for each device, have no hashes: uv takes them from
# there (--torch-backend), or from a folder of wheels, and those files are none of PyPI's.
BUILT_FOR_A_DEVICE := torch|torchvision|torchaudio|torchcodec|torchao|triton|xformers

lock: .venv/bin/uv
	$(COMPILE) $(PINS)/pipeline.in -o $(PINS)/pipeline.txt
	$(COMPILE) $(PINS)/media.in -o $(PINS)/media.txt
	$(COMPILE) $(PINS)/trackers.in -o $(PINS)/trackers.txt
	$(COMPILE) $(PINS)/shared-store.in -o $(PINS)/shared-store.txt
	$(COMPILE) $(PINS)/mcp.in -o $(PINS)/mcp.txt
	$(COMPILE) $(PINS)/test.in -o $(PINS)/test.txt
	$(COMPILE) $(PINS)/evalscope.in -o $(PINS)/evalscope.txt
	$(COMPILE) --override $(PINS)/bfcl-overrides.txt $(PINS)/bfcl.in -o $(PINS)/bfcl.txt
	$(COMPILE) --override $(PINS)/serve-cpu-overrides.txt $(PINS)/serve-cpu.in -o $(PINS)/serve-cpu.txt
	$(COMPILE) $(PINS)/reasoning-gym.in -o $(PINS)/reasoning-gym.txt
	$(COMPILE) $(PINS)/llama-cpp.in -o $(PINS)/llama-cpp.txt
	$(COMPILE) $(PINS)/openenv.in -o $(PINS)/openenv.txt
	$(COMPILE) $(PINS)/skypilot.in -o $(PINS)/skypilot.txt
	$(COMPILE) $(PINS)/ray.in -o $(PINS)/ray.txt
	$(COMPILE) $(PINS)/verifiers.in -o $(PINS)/verifiers.txt
	env -u UV_FIND_LINKS $(COMPILE) --python-platform x86_64-manylinux_2_28 $(PINS)/serve-cuda.in -o $(PINS)/serve-cuda.txt
	sed -i -E '/^($(BUILT_FOR_A_DEVICE))==/,/^    # via/ { s/^(torch==[0-9.]*)\+cpu/\1/; s/ \\$$//; /--hash=/d }' $(PINS)/*.txt
	$(subst 3.11,3.12,$(COMPILE)) --no-deps $(addprefix --constraint $(PINS)/,pipeline.txt test.txt) \
		$(PINS)/gpu-kit.in -o $(PINS)/gpu-kit.txt

# The newest versions that resolve, what holds others back, and what they break, by family, in build/upgrade/report.md.
# No pin changes, but with APPLY=1. RESOLVE=1 proves nothing, in a minute. WITHOUT="NAME …" leaves out what holds others back.
upgrade: environments .venv/.test-ready
	.venv/bin/python tests/upgrade.py $(if $(RESOLVE),--resolve) $(if $(APPLY),--apply) $(WITHOUT:%=--without %)

# The wheel of a tagged version, in dist/.
release: .venv/bin/uv
	@version=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml); \
		[ "$$(sed -n 's/^## //p' CHANGELOG.md | head -1)" = "$$version" ] || \
			{ echo "pyproject.toml has version $$version, which is not the first of CHANGELOG.md" >&2; exit 1; }; \
		found=$$(git describe --tags --exact-match --dirty --match 'v*' 2>&1); [ "$$found" = "v$$version" ] || \
			{ echo "the wheel of version $$version is built of a clean checkout of v$$version; found $$found" >&2; exit 1; }
	$(UV) build --wheel --clear

clean:
	rm -rf .venv .venv-serve .venv-llama-cpp .venv-evalscope .venv-bfcl .venv-reasoning-gym .venv-openenv .venv-skypilot .venv-ray .venv-verifiers
