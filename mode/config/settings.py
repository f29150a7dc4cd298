"""The `"mode"` section of the configuration: one validated tree of frozen dataclasses.

It describes the model, its routing, the data and the run. `mode.config.section` says how a setting is checked;
this file says which settings there are and how they must agree; `mode.config.file` reads the file.

This file knows names and numbers only. It imports the standard library and nothing else.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction

from mode.config.section import ConfigError, Section, choice, flag, integer, number, section, text, texts

# ---------------------------------------------------------------------------------------------------
# The sections


def exact(value: float | Fraction) -> Fraction:
    """The decimal number the user wrote, not its binary neighbour: 0.07 is 7/100."""
    return value if isinstance(value, Fraction) else Fraction(repr(value))


ROUNDING = Fraction(1, 10**12)  # a share such as 1/3 cannot be written exactly
# Beyond any model: what is larger is a slip, and would end in torch's overflow or in hours of counting.
MOST_WIDE, MOST_TOKENS, MOST_ROWS = 2**20, 2**20, 2**24


@dataclass(frozen=True)
class ModelConfig(Section):
    """The transformer itself, without its routing."""

    vocab_size: int = integer(low=2, high=MOST_ROWS)
    num_layers: int = integer(high=10_000)
    width: int = integer(low=2, high=MOST_WIDE)
    num_heads: int = integer()
    num_kv_heads: int = integer()
    ffn_width: int = integer(high=MOST_ROWS)  # of the dense feed-forward; unused where `experts` is set
    sequence_length: int = integer(low=2, high=MOST_TOKENS)
    rope_theta: float = number(10_000.0, above=0)
    norm_eps: float = number(1e-5, above=0)
    qkv_bias: bool = flag(False)  # with it a head of every block begins by looking at the previous token
    tied_head: bool = flag(True)
    activation_checkpointing: bool = flag(False)

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def qkv_width(self) -> int:
        """Of all queries, keys and values of a token."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_width

    def check(self) -> None:
        if self.width % self.num_heads:
            raise ConfigError(
                "num_heads", f"is {self.num_heads}, which does not divide width = {self.width}; use a divisor of it"
            )
        if self.head_width % 2:
            raise ConfigError(
                "num_heads",
                f"is {self.num_heads}, which makes a head width / num_heads = {self.head_width} wide; "
                "rotary positions need an even width",
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "num_kv_heads",
                f"is {self.num_kv_heads}, which does not divide num_heads = {self.num_heads}; use a divisor of it",
            )


@dataclass(frozen=True)
class BalanceLossConfig(Section):
    """A loss that is smallest where every column has its target share of the choices."""

    weight: float = number(0.01, above=0)
    scope: str = choice("sequence", of=("sequence", "global"))


@dataclass(frozen=True)
class BalanceBiasConfig(Section):
    """A bias on the selection logits, moved toward the targets once per optimizer step."""

    rate: float = number(0.05, above=0)


@dataclass(frozen=True)
class ExpertsConfig(Section):
    """The expert feed-forward: E real experts beside Z no-op columns, K choices per token."""

    num_experts: int = integer(high=100_000)
    top_k: int = integer()
    width: int = integer(high=MOST_ROWS)
    num_no_ops: int = integer(0, low=0, high=100_000)
    no_op_fraction: float = number(0.0, at_least=0, below=1)
    capacity_factor: float | None = number(None, above=0, at_most=1e6, null=True)
    renormalize: bool = flag(False)
    num_shared: int = integer(0, low=0, high=100_000)
    balance_loss: BalanceLossConfig | None = section(BalanceLossConfig, None, null=True)
    balance_bias: BalanceBiasConfig | None = section(BalanceBiasConfig, None, null=True)
    z_loss_weight: float = number(0.0, at_least=0)
    backend: str = choice("auto", of=("auto", "megablocks", "native", "grouped_mm", "loop"))
    ep_size: int = integer(1)

    @property
    def num_columns(self) -> int:
        return self.num_experts + self.num_no_ops

    def check(self) -> None:
        if self.top_k > self.num_columns:
            raise ConfigError(
                "top_k",
                f"is {self.top_k}, more than the {self.num_columns} columns there are "
                "(num_experts + num_no_ops); choose at most that many",
            )
        if (self.num_no_ops > 0) != (self.no_op_fraction > 0):
            raise ConfigError(
                "no_op_fraction",
                f"is {self.no_op_fraction:g} while num_no_ops is {self.num_no_ops}; "
                "no-op columns and a target share go together: set both above 0, or both to 0",
            )
        most_no_op = min(Fraction(1), Fraction(self.num_no_ops, self.top_k))
        most_real = min(Fraction(1), Fraction(self.num_experts, self.top_k))
        share = exact(self.no_op_fraction)
        if share > most_no_op + ROUNDING or 1 - share > most_real + ROUNDING:
            lowest, highest = float(1 - most_real), float(most_no_op)
            raise ConfigError(
                "no_op_fraction",
                f"is {self.no_op_fraction:g}, which {self.top_k} distinct choices among {self.num_experts} experts and "
                f"{self.num_no_ops} no-ops cannot reach; it must be between {lowest:g} and {highest:g}",
            )
        if self.renormalize and self.top_k == 1:
            raise ConfigError(
                "renormalize",
                "is true with top_k = 1, so every gate would be 1 and no language-model gradient would reach the "
                "router; set it to false, or choose more columns",
            )
        if self.num_experts % self.ep_size:
            raise ConfigError(
                "ep_size", f"is {self.ep_size}, which does not divide num_experts = {self.num_experts}; use a divisor"
            )


@dataclass(frozen=True)
class PredictorConfig(Section):
    """A small MLP that learns, behind a stop-gradient, which tokens top-k will keep."""

    width: int = integer(64, high=MOST_ROWS)
    weight: float = number(0.01, above=0)


@dataclass(frozen=True)
class AuxLossConfig(Section):
    """Binary cross-entropy on the router's own logits against top-k membership."""

    weight: float = number(0.01, above=0)


@dataclass(frozen=True)
class DepthConfig(Section):
    """Depth routing: which tokens of a sequence enter a block."""

    capacity_fraction: float = number(above=0, at_most=1)
    warmup_fraction: float = number(0.0, at_least=0, below=1)  # of the steps: from all tokens to the capacity
    every: int = integer(2)
    selection: str = choice("learned", of=("learned", "stochastic", "token_choice"))
    gate: str = choice("raw", of=("raw", "sigmoid", "tanh", "one"))
    predictor: PredictorConfig | None = section(PredictorConfig, None, null=True)
    aux_loss: AuxLossConfig | None = section(AuxLossConfig, None, null=True)
    balance_weight: float = number(0.0, at_least=0)  # token_choice only: holds the kept share
    causal: str | None = choice(None, of=("predictor", "router"), null=True)  # null: the predictor if there is one

    @property
    def causal_methods(self) -> tuple[str, ...]:
        """What a token can decide by without its sequence, the way in use first."""
        methods = ("router",) if self.predictor is None else ("predictor", "router")
        return tuple(sorted(methods, key=lambda method: method != self.causal))  # a stable sort

    def check(self) -> None:
        if self.causal == "predictor" and self.predictor is None:
            raise ConfigError(
                "causal", 'is "predictor", but predictor is null; set depth.predictor, or use "router" or null'
            )
        if self.selection == "stochastic":
            if self.gate not in ("one", "raw"):
                raise ConfigError(
                    "gate",
                    f'is "{self.gate}" with selection "stochastic"; it must be "one" or "raw" (the noise itself)',
                )
            for name in ("predictor", "aux_loss"):
                if getattr(self, name) is not None:
                    raise ConfigError(name, 'has nothing to learn with selection "stochastic"; set it to null')
        elif self.gate == "one":
            raise ConfigError(
                "gate",
                f'is "one" with selection "{self.selection}", so no language-model gradient would reach the router; '
                'use "raw", "sigmoid" or "tanh"',
            )
        if self.selection == "token_choice":
            if self.warmup_fraction:
                raise ConfigError(
                    "warmup_fraction",
                    f'is {self.warmup_fraction:g} with selection "token_choice", whose balance is about one share of '
                    "the tokens; set it to 0",
                )
            for name in ("predictor", "aux_loss"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        name,
                        'has nothing to learn with selection "token_choice", which decides by each '
                        "token's own logit; set it to null",
                    )
            if self.balance_weight and self.capacity_fraction == 1:
                raise ConfigError(
                    "balance_weight",
                    f"is {self.balance_weight:g} with capacity_fraction = 1: nobody is to skip, so there is nothing to "
                    "balance; set it to 0, or keep fewer tokens",
                )
        elif self.balance_weight:
            raise ConfigError(
                "balance_weight",
                f'is {self.balance_weight:g} with selection "{self.selection}", which keeps exactly the capacity; '
                'it is for "token_choice"; set it to 0',
            )


@dataclass(frozen=True)
class FilesConfig(Section):
    """Local text: txt, md, jsonl, json, csv or parquet files, also as gz, named by paths, folders or globs."""

    paths: tuple[str, ...] = texts()
    text_column: str = text("text")


@dataclass(frozen=True)
class HubConfig(Section):
    """A dataset of the Hugging Face hub."""

    name: str = text()
    config: str | None = text(None, null=True)
    split: str = text("train")
    text_column: str = text("text")


@dataclass(frozen=True)
class DataConfig(Section):
    """Where the text comes from and how it becomes tokens."""

    source: str = choice("python_stdlib", of=("python_stdlib", "python_packages", "files", "hub"))
    files: FilesConfig | None = section(FilesConfig, None, null=True)
    hub: HubConfig | None = section(HubConfig, None, null=True)
    tokenizer: str = choice("bpe", of=("bpe", "bytes", "pretrained"))
    pretrained: str | None = text(None, null=True)  # a path or hub name, for tokenizer "pretrained"
    validation_fraction: float = number(0.05, above=0, below=1)
    max_documents: int | None = integer(None, low=2, null=True)
    document_masking: bool = flag(False)
    cache_dir: str | None = text(None, null=True)

    def check(self) -> None:
        for name in ("files", "hub"):
            if (self.source == name) != (getattr(self, name) is not None):
                raise ConfigError(
                    name, f'must be set when source is "{name}" and null otherwise; source is "{self.source}"'
                )
        if (self.tokenizer == "pretrained") != (self.pretrained is not None):
            raise ConfigError(
                "pretrained",
                'must name a tokenizer when tokenizer is "pretrained" and be null otherwise; '
                f'tokenizer is "{self.tokenizer}"',
            )


RUN_LENGTHS = ("steps", "tokens", "flops")


@dataclass(frozen=True)
class TrainConfig(Section):
    """How long a run is, and what it does on the way."""

    steps: int | None = integer(None, null=True)
    tokens: int | None = integer(None, null=True)
    flops: float | None = number(None, above=0, null=True)
    log_every: int = integer(10)
    eval_every: int = integer(100)
    eval_sequences: int = integer(64)
    save_every: int = integer(100)
    keep_last: int = integer(3)
    stop_after: int | None = integer(None, null=True)
    monitor: str = choice("brief", of=("brief", "detailed"))
    init_from: str | None = text(None, null=True)  # an exported folder whose weights a new run starts with
    watchdog_seconds: float | None = number(300.0, at_least=1, at_most=1e6, null=True)
    compile: bool = flag(False)  # torch.compile of the dense parts

    def check(self) -> None:
        given = [name for name in RUN_LENGTHS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                "steps",
                f"a run's length is exactly one of steps, tokens and flops; {' and '.join(given) or 'none'} given; "
                "set one and leave the others null",
            )


@dataclass(frozen=True)
class ModeConfig(Section):
    """The whole `"mode"` section."""

    model: ModelConfig = section(ModelConfig)
    experts: ExpertsConfig | None = section(ExpertsConfig, None, null=True)
    depth: DepthConfig | None = section(DepthConfig, None, null=True)
    data: DataConfig = section(DataConfig, DataConfig())
    train: TrainConfig = section(TrainConfig, TrainConfig(steps=1000))
    seed: int = integer(0, low=0)
    description: str = text("a MoDE model")

    def check(self) -> None:
        self._check_grouped_widths()
        if self.depth is None:
            return
        if self.depth.every > self.model.num_layers:
            raise ConfigError(
                "depth.every",
                f"is {self.depth.every}, beyond model.num_layers = {self.model.num_layers}, so no block would be "
                "routed; use a smaller number, or set depth to null",
            )
        kept = exact(self.depth.capacity_fraction) * self.model.sequence_length
        if kept < 1:
            raise ConfigError(
                "depth.capacity_fraction",
                f"is {self.depth.capacity_fraction:g}, which keeps {float(kept):g} of model.sequence_length = "
                f"{self.model.sequence_length} tokens; it must keep at least one: use "
                f"{1 / self.model.sequence_length:g} or more",
            )

    def _check_grouped_widths(self) -> None:
        if self.experts is None or self.experts.backend != "grouped_mm":
            return
        for path, width in (("model.width", self.model.width), ("experts.width", self.experts.width)):
            if width % 8:
                raise ConfigError(
                    path,
                    f'is {width}; with experts.backend "grouped_mm" it must be a multiple of 8; '
                    'change it, or use the backend "auto" or "loop"',
                )

    def with_backend(self, backend: str) -> ModeConfig:
        """The same model, its experts computed by `backend`."""
        if self.experts is None:
            return self
        return dataclasses.replace(self, experts=dataclasses.replace(self.experts, backend=backend))

    def is_routed(self, layer: int) -> bool:
        """Whether block `layer`, counted from 0, is depth-routed: with `every: 2`, blocks 1, 3, 5, ..."""
        return self.depth is not None and (layer + 1) % self.depth.every == 0
