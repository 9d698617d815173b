# One command for each daily thing; CONTRIBUTING.md says what each does.

MINUTES ?= 5
ROUNDS ?= 100
PRESET ?= dev
PYTHON ?=

.PHONY: demo test check bench wheel docs format stubs soak fuzz setup clean

demo:
	@tools/demo

test:
	@tools/test

check:
	@tools/check "$(LAYER)" $(PRESET)

bench:
	@tools/bench

wheel:
	@tools/wheel $(PYTHON)

docs:
	@tools/docs

format:
	@tools/setup
	@tools/check_format --fix

stubs:
	@.venv/bin/python tools/check_stubs --fix
	@.venv/bin/python tools/options --fix

soak:
	@tools/soak $(ROUNDS)

fuzz:
	@tools/fuzz $(MINUTES)

setup:
	@tools/setup

clean:
	rm -rf build demo-out .pytest_cache .hypothesis .mypy_cache
