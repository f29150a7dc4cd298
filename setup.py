"""Packaging of `mode`. Tested versions are in constraints.txt; tool settings in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

TRANSFORMERS = "transformers>=5,<6"  # whose decoder layers mode.DepthRouted knows the arguments of

setup(
    name="deepspeed-mode",
    version="0.1.0",
    description="MoDE, Mixture-of-Depths-and-Experts, for DeepSpeed",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["mode", "mode.*"]),
    package_data={"mode.ops": ["cpu/*.h", "cpu/*.cpp"]},
    install_requires=[
        "torch>=2.10",  # torch.nn.functional.grouped_mm
        "deepspeed>=0.19.8,<0.20",  # the expert layer builds on internals of this series
        "datasets>=3",
        "tokenizers>=0.20",
        "tensorboard>=2.16",
        "numpy>=1.26",
        "safetensors>=0.4",
        "filelock",
        "huggingface_hub",
        "tqdm",
        "pillow>=10.1",  # labels of any size without a font file
    ],
    extras_require={
        "plots": ["matplotlib>=3.8"],
        "hf": [TRANSFORMERS],  # our layers inside models of transformers: docs/own_model.md
        "dev": ["pytest>=8", "pytest-xdist>=3", "hypothesis>=6", "ruff", "mypy", "matplotlib>=3.8", TRANSFORMERS],
        # What MegaBlocks 0.10 needs. It pins torch 2.7.0, which we cannot use, so it is installed
        # after this with --no-deps: see docs/gpu.md.
        "megablocks": ["stanford-stk==0.7.1", "setuptools>=70.1,<79"],
    },
)
