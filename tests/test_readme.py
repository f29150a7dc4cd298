"""The README tells the truth: its commands name things that exist, its code runs, its table is complete."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from mode.config.section import Section
from mode.config.settings import ModeConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_it_opens_with_the_install_and_test_lines_and_ci_runs_the_test_line():
    first = blocks("")[0].splitlines()
    assert first[0].startswith("pip install -c constraints.txt -e . && deepspeed train.py")
    assert first[1] == 'pip install -c constraints.txt -e ".[dev]" && pytest'
    without_quiet = (ROOT / ".ci" / "run").read_text().replace("--quiet ", "")
    assert first[1] in without_quiet


def test_every_file_it_names_exists():
    named = set(re.findall(r"(?:ds_configs|tools|docs)/[\w./]+\w", README))
    assert "ds_configs/mode.json" in named and "tools/plan.py" in named
    for name in named:
        assert (ROOT / name).exists(), name


def test_every_shipped_config_is_listed():
    for path in (ROOT / "ds_configs").rglob("*.json"):
        name = str(path.relative_to(ROOT / "ds_configs").with_suffix(""))
        assert f"`{name}`" in README, name


def settings(section: type[Section], prefix: str = "") -> list[str]:
    names = []
    for field in dataclasses.fields(section):
        inner = field.metadata["rule"].section
        names += [prefix + field.name] + (settings(inner, f"{prefix}{field.name}.") if inner is not None else [])
    return names


def test_the_table_of_settings_names_every_setting():
    table = README[README.index("| setting |") :]
    missing = [name for name in settings(ModeConfig) if not re.search(rf"\b{name.split('.')[-1]}\b", table)]
    assert not missing


def test_the_python_examples_run_in_a_new_interpreter():
    (model,) = (block for block in blocks("python") if "ModeTransformer(" in block)
    (sampling,) = (block for block in blocks("python") if "import stream" in block)
    fresh = "from mode.transformer.generation import stream"  # before anything else can have imported it
    given = "import torch; input_ids = padded = torch.zeros(1, 8, dtype=torch.int64); lengths = torch.tensor([8])"
    tokenizer = "from mode.data.tokenizer import byte_tokenizer; tokenizer = byte_tokenizer()"
    code = "\n".join((fresh, given, model, "assert out.loss.isfinite()", tokenizer, sampling))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
