.PHONY: install test lint

install:
	pip install -c constraints.txt -e ".[dev]"

test:
	pytest

lint:
	ruff check .
	ruff format --check .
	mypy
