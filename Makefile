# Cadastre. `make` lists the targets; `make test` and `make run` set up everything they need.
#
# One cargo build runs at a time, in the order written here, because -j does not help on a small
# machine. Cargo chooses features by the packages and targets that a build names. So that no
# dependency is built twice, all builds name the whole workspace, even where one package would do.
# For the same reason, builds for tests name a test (`--test harness`).
.NOTPARALLEL:
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
PLUGIN := $(TARGET)/cadastre-ipam
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
SEED ?=
STEPS ?=
MINUTES ?= 10
FAULTS ?= 2
NODES ?= 5000
WHAT ?= all
MUTANT ?=
FILE ?= crates/node/src/ledger/choose.rs
# The tests of FILE's crate that have to find a mutant of FILE
TESTS ?= --lib
FAULT ?=
REPLICAS ?= 100
RESTARTS ?= 50
# The number of e2e suites that run at the same time. Most of them wait most of the time.
SUITES ?= 5

# Test binaries. The simulation is a step of its own; the others in tests/ and crates/*/tests need no cluster.
names = $(patsubst $(1)/%/main.rs,%,$(wildcard $(1)/*/main.rs)) $(patsubst $(1)/%.rs,%,$(wildcard $(1)/*.rs))
UNIT := $(filter-out sim,$(call names,tests)) $(foreach tests,$(wildcard crates/*/tests),$(call names,$(tests)))
E2E := $(call names,e2e/tests) $(call names,e2e/controller/tests)

# Announces a step, and records when it began, for the summary of `make test`.
say = @mkdir -p $(TARGET) && echo "$$(date +%s) $(1)" >>$(TARGET)/steps && printf '\n\033[1m== %s\033[0m\n' "$(1)"

.PHONY: help setup control-plane nodes services tools monitoring run test check unit sim soak exhaustive mutants generated-mutants e2e bench bench-scale bench-node statefulset many chaos torture linearizable plugin crd config image test-image metrics-doc pictures clean

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

run: first control-plane nodes ## the demo: a local control plane with everything running, until Ctrl-C
	$(call say,run: build)
	$(CARGO) build --workspace --bins --test harness
	@exec $(TARGET)/debug/cadastre-demo

.PHONY: first
first:
	@hack/setup run

test: no-steps setup check unit sim e2e ## everything that CI runs
	$(call say,test: all passed)
	@awk 'NR > 1 { printf "%5d s  %s\n", $$1 - since, step } { since = $$1; step = substr($$0, length($$1) + 2) }' $(TARGET)/steps

.PHONY: no-steps
no-steps:
	@rm -f $(TARGET)/steps

check: setup ## format, clippy and rustdoc, warnings denied
	$(call say,check)
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --lib
	@hack/deny

unit: setup ## unit and property tests
	$(call say,unit)
	@hack/run-tests 2 --workspace --lib --bins $(UNIT:%=--test %)
	$(CARGO) test --workspace --doc

# Each commit has seeds of its own. Without git, seeds are computed from the clock. A failure prints its seed.
sim: setup ## the deterministic simulation; SEED=n and STEPS=n replay or search
	$(call say,sim)
ifeq ($(SEED)$(STEPS),)
	COMMIT="$$(git rev-parse HEAD 2>/dev/null || true)" $(CARGO) test --workspace --test sim -- --nocapture
else
	$(if $(SEED),SEED=$(SEED)) $(if $(STEPS),STEPS=$(STEPS)) \
		$(CARGO) test --release -p cadastre --test sim -- --nocapture replay
endif

mutants: setup ## check that tests find deliberate bugs; MUTANT=name tries one
	$(call say,mutants)
	$(CARGO) test --workspace --lib -- --nocapture mutated::
	SEARCH=1 $(if $(MUTANT),MUTANT=$(MUTANT)) \
		$(CARGO) test --workspace --test sim -- --nocapture mutations::

# Needs cargo-mutants: cargo install --locked cargo-mutants
generated-mutants: setup ## all mutants that cargo-mutants makes of FILE=crates/node/src/ledger/choose.rs; lists those that TESTS="--lib" do not find
	$(call say,generated mutants)
	$(CARGO) mutants --workspace --file $(FILE) $(TESTS:%=--cargo-arg=%) --timeout 30 --output $(TARGET)/mutants

soak: setup ## the simulation for MINUTES=10, with seeds from the clock or from SEED=n on; lists the failures
	$(call say,soak)
	$(if $(SEED),SEED=$(SEED)) MINUTES=$(MINUTES) \
		$(CARGO) test --profile search -p cadastre --test sim -- --ignored --nocapture soak

exhaustive: setup ## every order of events in small clusters, every fault in short runs, with at most FAULTS=2 faults, MINUTES=10 for each; ONLY=name
	$(call say,exhaustive)
	FAULTS=$(FAULTS) MINUTES=$(MINUTES) \
		$(CARGO) test --profile search -p cadastre --test sim -- --ignored --exact --nocapture \
		exhaustive::every_order deviations::every_deviation

e2e: setup control-plane nodes services tools monitoring test-image ## tests against a real control plane and, as root, real nodes; SUITES=5 at a time
	$(call say,e2e)
	$(CARGO) build --workspace --bins --test harness
	@hack/run-tests $(SUITES) --workspace $(E2E:%=--test %) -- --test-threads=2

# The image for the tests of the installation, with debug executables. Needs root, and buildah or docker.
test-image: setup
	$(call say,image for tests)
	@if [ -n "$${CADASTRE_IMAGE:-}" ]; then echo "$$CADASTRE_IMAGE is taken"; \
	elif [ "$$(id -u)" != 0 ]; then echo "left out: nodes need root, so nobody would run it"; \
	elif command -v buildah >/dev/null || docker version >/dev/null 2>&1; then \
		PROFILE=dev hack/image cadastre.dev/cadastre:$(VERSION) $(TARGET)/cadastre-image.tar; \
	else echo "left out: no builder: apt-get install buildah, or install docker"; fi

bench: setup ## micro-benchmarks of the core
	$(call say,bench)
	$(CARGO) bench -p cadastre-core -p cadastre-node

# GOGC=100 is Go's default. Tests start the control plane with a larger value, to save processor time.
bench-scale: setup control-plane ## WHAT=podcidrs, blocks, claims, claim-adds, pods, routes, takeover, status, stand-in or all, for NODES=5000, compared with raw requests and kube-controller-manager
	$(call say,bench-scale: release build)
	$(CARGO) build --release --workspace --bin cadastre --bin cadastre-bench
	@GOGC=100 exec $(TARGET)/release/cadastre-bench $(WHAT) $(NODES)

statefulset: setup control-plane ## a StatefulSet with fixed addresses through restarts, drains and dead nodes: REPLICAS=100 RESTARTS=50
	$(call say,statefulset)
	$(CARGO) build --workspace --bins --test harness
	REPLICAS=$(REPLICAS) RESTARTS=$(RESTARTS) $(CARGO) test --workspace --test statefulset -- --nocapture

many: setup control-plane nodes ## NODES=8 real nodes on one link, with the controller away for MINUTES=10
	$(call say,many)
	$(CARGO) build --workspace --bins --test harness
	NODES=$(if $(filter command line,$(origin NODES)),$(NODES),8) MINUTES=$(MINUTES) \
		$(CARGO) test --workspace --test nodes -- --nocapture many::

# SEED=n repeats the random choices of a run, but not its timing. FAULT=name,name causes only these faults.
chaos: setup control-plane ## three API servers and etcd members under faults of every layer for MINUTES=10; SEED=n, FAULT=name
	$(call say,chaos)
	$(CARGO) build --workspace --bins --test harness
	$(if $(SEED),CADASTRE_SEED=$(SEED)) $(if $(FAULT),FAULT=$(FAULT)) MINUTES=$(MINUTES) \
		$(CARGO) test --workspace --test chaos -- --nocapture

# Programs in Go speak HTTP/1.1, as Cadastre does, so that a lost answer breaks one request and not all.
torture: setup control-plane ## the same joins, deaths and faults for Cadastre and others: WHAT=podcidrs, addresses or all; counts duplicates and leaks
	$(call say,torture)
	$(CARGO) build --workspace --bins --test harness
	@DISABLE_HTTP2=1 exec $(TARGET)/debug/cadastre-torture $(WHAT) $(SEED)

linearizable: setup control-plane tools ## the CNI plugin under faults for MINUTES=10: an order must explain all answers
	$(call say,linearizable)
	$(CARGO) build --workspace --bins --test harness
	MINUTES=$(MINUTES) $(CARGO) test --workspace --test agent -- --nocapture linearizable::

# Linked with musl if its target is or can be installed, otherwise with a static glibc, which is larger.
plugin: setup ## the CNI plugin cadastre-ipam as one small static executable
	$(call say,plugin)
	@arch=$$(uname -m) flags=() target=$$(uname -m)-unknown-linux-musl limit=1572864; \
	if [ ! -d "$$(rustc --print target-libdir --target $$target)" ] && ! rustup target add $$target; then \
		target=$$arch-unknown-linux-gnu flags=(-C target-feature=+crt-static) limit=2359296; \
	fi; \
	RUSTFLAGS="$${flags[*]}" $(CARGO) build -p cadastre-node --bin cadastre-ipam \
		--profile plugin --target $$target; \
	file=$(TARGET)/$$target/plugin/cadastre-ipam size=$$(stat -c %s $(TARGET)/$$target/plugin/cadastre-ipam); \
	echo "$$file: $$size bytes"; \
	[ $$size -le $$limit ] || { echo "more than $$limit bytes" >&2; exit 1; }; \
	install -m 755 $$file $(PLUGIN)

bench-node: setup control-plane nodes plugin ## ADD and DEL as whole processes, compared with host-local
	$(call say,bench-node: release build)
	$(CARGO) build --release --workspace --bin cadastre --bin cadastre-bench
	@CADASTRE_IPAM=$(PLUGIN) exec $(TARGET)/release/cadastre-bench node

crd: setup ## generate the CRDs of the chart
	$(CARGO) build --workspace --bin cadastre
	$(TARGET)/debug/cadastre crd > $(TARGET)/cadastre.dev.yaml
	cp $(TARGET)/cadastre.dev.yaml charts/cadastre/crds/

config: setup tools ## generate config and docs/values.md from the chart
	UPDATE=1 $(CARGO) test --workspace --test chart -- --quiet generated::config values

image: setup ## the image from Dockerfile, by buildah or docker; PREBUILT=1 builds the executables outside
	$(call say,image)
	@hack/image cadastre.dev/cadastre:$(VERSION) $(TARGET)/cadastre-image.tar

metrics-doc: ## generate docs/metrics.md from the code
	$(CARGO) build --workspace --bin cadastre
	$(TARGET)/debug/cadastre metrics > docs/metrics.md.new
	mv docs/metrics.md.new docs/metrics.md

pictures: setup control-plane ## generate docs/pictures, in headless Chromium
	$(CARGO) build --workspace --bins --test harness
	mkdir -p docs/pictures
	PICTURES=$(CURDIR)/docs/pictures $(CARGO) test --workspace --test map

setup: ## check the tools; name packages to install
	@hack/setup

control-plane: setup ## download or build etcd and Kubernetes if missing (up to 8 minutes, once)
	$(call say,control-plane)
	$(CARGO) build --workspace --bin cadastre-assets --test harness
	@$(TARGET)/debug/cadastre-assets

tools: setup ## build helm 4 and 3, code generators for gRPC clients and the checker of histories, if missing (6 minutes, once)
	$(call say,tools)
	$(CARGO) build --workspace --bin cadastre-assets --test harness
	@$(TARGET)/debug/cadastre-assets tools

nodes: setup ## build kubelet, containerd, CNI plugins and Multus if missing (about 5 minutes, once)
	$(call say,nodes)
	$(CARGO) build --workspace --bin cadastre-assets --test harness
	@$(TARGET)/debug/cadastre-assets nodes

services: setup ## build kube-proxy and CoreDNS if missing (about 3 minutes, once)
	$(call say,services)
	$(CARGO) build --workspace --bin cadastre-assets --test harness
	@$(TARGET)/debug/cadastre-assets services

monitoring: setup ## build Prometheus and promtool if missing (about 3 minutes, once)
	$(call say,monitoring)
	$(CARGO) build --workspace --bin cadastre-assets --test harness
	@$(TARGET)/debug/cadastre-assets monitoring

# Targets for releases, which `make test` does not run. docs/versioning.md describes how to release.
.PHONY: cross-check deny dist release-check sbom

deny: ## check advisories and bans of dependencies, with cargo-deny if installed
	@hack/deny

cross-check: ## check that the kubectl plugin compiles for macOS and Windows
	@hack/cross-check

sbom: ## a bill of materials, into target/cadastre.cdx.json
	@mkdir -p $(TARGET)
	@hack/sbom > $(TARGET)/cadastre.cdx.json
	@echo "$(TARGET)/cadastre.cdx.json: $$(jq '.components | length' $(TARGET)/cadastre.cdx.json) crates"

release-check: setup ## check that this checkout can be released; TAG=v1.2.3 as that tag
	$(call say,release-check)
	@MAKE="$(MAKE)" CARGO="$(CARGO)" TAG="$(TAG)" hack/release-check

dist: setup tools ## the files of a release except its image, into target/dist
	$(call say,dist)
	@hack/dist

clean: ## remove build output; the cached control plane stays
	$(CARGO) clean
