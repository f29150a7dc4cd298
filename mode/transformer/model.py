"""The MoDE language model: a plain torch module that runs with or without a process group."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mode.config.settings import ModeConfig
from mode.layers import Initial, Linear
from mode.moe.experts import StackedExperts
from mode.moe.layer import LocalMoE
from mode.moe.router import ExpertRouter
from mode.records import BlockRouting, DepthRouting, ExpertRouting, LayerRecord, collect_routing
from mode.transformer.attention import Grid, rope_tables
from mode.transformer.block import ExpertLayer, RMSNorm, build_block
from mode.transformer.generation.generate import generate
from mode.transformer.losses import compute_losses
from mode.transformer.pretrained import read_config, read_weights


@dataclass(frozen=True)
class ModeOutput:
    """What a forward pass returns."""

    logits: Tensor  # [B, L, V]
    loss: Tensor | None  # the total to train on; None without labels
    losses: dict[str, Tensor]  # its terms, each before its weight; empty without labels
    routing: tuple[BlockRouting, ...]  # one record per block


class Embedding(nn.Embedding):
    """The table of token vectors, of size 1 / sqrt(D), so that it can serve as a head too."""

    def __init__(self, config: ModeConfig) -> None:
        self.config = config
        super().__init__(config.model.vocab_size, config.model.width)

    def reset_parameters(self) -> None:
        if self.config.model.tied_head:
            # At full size every token would predict itself: the logit of its own entry would be sqrt(D).
            Initial(self.config.seed, "head").fill(self.weight, self.config.model.width**-0.25)
        else:
            Initial(self.config.seed, "embedding").fill(self.weight)


class ModeTransformer(nn.Module):
    """Decoder-only transformer with dense or expert feed-forward and, if configured, depth routing."""

    def __init__(self, config: ModeConfig, expert_layer: ExpertLayer = LocalMoE) -> None:
        """`expert_layer` makes the expert feed-forward; the engine's one keeps only this rank's experts."""
        super().__init__()
        self.config = config
        model = config.model
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(build_block(config, layer, expert_layer) for layer in range(model.num_layers))
        self.norm = RMSNorm(model.width, eps=model.norm_eps)
        self.head = Linear(model.width, model.vocab_size, Initial(config.seed, "head"))
        if model.tied_head:
            self.head.weight = self.embedding.weight

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> ModeTransformer:
        """The model of an exported folder (`tools/export.py`), for evaluation. Unpickles nothing.

        `dtype` is that of the weights in use; by default the one they are stored in.
        """
        with torch.device("meta"):
            model = cls(_for_any_machine(read_config(folder)))
        model._take(read_weights(folder, model.weights(), device), assign=True)
        return (model if dtype is None else model.to(dtype)).eval()

    @classmethod
    def from_weights(cls, config: ModeConfig, weights: dict[str, Tensor]) -> ModeTransformer:
        """A model, for evaluation, with all of `weights` (as `weights()` names them) as its own."""
        with torch.device("meta"):
            model = cls(_for_any_machine(config))
        model._take(weights, assign=True)
        return model.eval()

    def load_pretrained(self, folder: str | Path) -> None:
        """Copies the weights of an exported folder into this model, of the experts those that it keeps."""
        with torch.device("meta"):
            whole = ModeTransformer(self.config)
        weights = read_weights(folder, whole.weights())
        for path, module in self.named_modules():
            if isinstance(module, StackedExperts):
                for name, part in module.named_parameters(path):
                    weights[name] = weights[name][module.first : module.first + len(part)]
        self._take(weights, assign=False)

    def weights(self) -> dict[str, Tensor]:
        """What an export holds: every parameter and buffer by name, a tied head left out."""
        tied = ("head.weight",) if self.config.model.tied_head else ()
        return {name: tensor for name, tensor in self.state_dict().items() if name not in tied}

    def _take(self, weights: dict[str, Tensor], assign: bool) -> None:
        self.load_state_dict(weights, strict=False, assign=assign)  # strictly checked when read
        if self.config.model.tied_head:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        sample_keys: Tensor | None = None,
        causal: bool | str = False,
        capacity_fraction: Fraction | None = None,
    ) -> ModeOutput:
        """Logits for every position and, given labels, the losses.

        `labels` are aligned with `input_ids` (usually the same tensor): position i is scored on label
        i + 1, and labels of -100 are left out. `documents` [B, L] numbers the documents packed into a
        row; tokens see their own only. `sample_keys` [B] keys the noise of stochastic routing; rows of equal
        keys, and all rows where none are given, draw the same.
        `causal` lets every token decide its depth routing for itself, as it must in sampling; training and
        top-k evaluation compare the tokens of a sequence, future ones included. True: as `depth.causal`
        says; "predictor" or "router": by that. `capacity_fraction` is the share of a sequence that routed blocks keep
        in a step of a warm-up; None: the configuration's.
        """
        method = self.causal_method(causal)
        self._check_input(input_ids)
        num_rows, length = input_ids.shape
        if sample_keys is None:
            sample_keys = torch.zeros(num_rows, dtype=torch.int64, device=input_ids.device)
        x_BLD = self.embed(input_ids)
        grid = self.place(num_rows, length, documents, x_BLD)
        with collect_routing(self) as records:
            for block in self.blocks:
                if self.config.model.activation_checkpointing:
                    # Forward runs again in backward instead of storing activations. It draws nothing from a generator.
                    x_BLD = checkpoint(
                        *(block, x_BLD, grid, sample_keys, method, capacity_fraction),
                        use_reentrant=False,
                        preserve_rng_state=False,
                    )
                else:
                    x_BLD = block(x_BLD, grid, sample_keys, method, capacity_fraction)
        logits_BLV = self.read_out(x_BLD)
        routing = self._by_block(records, grid)
        if labels is None:
            return ModeOutput(logits_BLV, None, {}, routing)
        # Routing terms belong to training: against causal decisions the predictor would be its own target.
        total, terms = compute_losses(logits_BLV, labels, list(records) if method is None else [])
        return ModeOutput(logits_BLV, total, terms, routing)

    def _by_block(self, records: Iterable[LayerRecord], grid: Grid) -> tuple[BlockRouting, ...]:
        depth: dict[int, DepthRouting] = {}
        experts: dict[int, ExpertRouting] = {}
        for record in records:
            layer = int(record.name.split(".")[1])  # blocks.<layer>...
            if isinstance(record.routing, DepthRouting):
                depth[layer] = record.routing
            else:
                experts[layer] = record.routing
        found = []
        for layer in range(self.config.model.num_layers):
            positions_BS = grid.positions_BS if layer not in depth else depth[layer].kept_BS
            found.append(BlockRouting(layer, positions_BS, depth.get(layer), experts.get(layer)))
        return tuple(found)

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        use_cache: bool = True,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        lengths: Tensor | None = None,
        stop_tokens: Collection[int] = (),
        seed: int = 0,
        causal: bool | str = True,
    ) -> Tensor:
        """`input_ids` [B, L] followed by the new tokens, [B, L + new], by causal routing and without dropping.

        Prompts of different lengths are padded on the left, with whatever ids; `lengths` [B] says how many tokens
        at the end of each row are the prompt. A row ends with the first of `stop_tokens`, which then fills it up;
        new is `max_new_tokens` or, where every row has ended before, less. Temperature 0 takes the likeliest token.
        Row b draws from `seed` + b. `mode.transformer.generation.stream` gives the tokens one by one and says more.
        """
        return generate(
            self,
            input_ids,
            max_new_tokens,
            temperature,
            use_cache,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            lengths=lengths,
            stop_tokens=stop_tokens,
            seed=seed,
            causal=causal,
        )

    def move_biases(self, choice_counts: dict[int, Tensor]) -> None:
        """Moves every selection bias by how often the global batch chose each column, per layer.

        To be called once per optimizer step. Without `balance_bias` there is nothing to move.
        """
        for layer, block in enumerate(self.blocks):
            for module in block.modules():
                if isinstance(module, ExpertRouter) and module.bias_J is not None:
                    module.move_bias(choice_counts[layer])

    def causal_method(self, causal: bool | str) -> str | None:
        """What tokens decide their depth routing by; None: they compete, as in training."""
        if causal is False:
            return None
        methods = ("router",) if self.config.depth is None else self.config.depth.causal_methods
        if causal is True:
            return methods[0]
        if causal not in methods:
            raise ValueError(f'causal is "{causal}"; this model can decide by {" or ".join(methods)}, or True or False')
        return causal

    def embed(self, ids: Tensor) -> Tensor:
        """Vectors of size 1, from the table's entries of size 1/sqrt(D)."""
        return self.embedding(ids) * self.config.model.width**0.5

    def read_out(self, x: Tensor) -> Tensor:
        """The logits of stream vectors."""
        return self.head(self.norm(x))

    def place(self, num_rows: int, length: int, documents: Tensor | None, x_BLD: Tensor) -> Grid:
        positions_1L = torch.arange(length, device=x_BLD.device).unsqueeze(0)
        model = self.config.model
        cos_1LH, sin_1LH = rope_tables(positions_1L, model.head_width, model.rope_theta, x_BLD.dtype)
        return Grid.of_sequence(
            positions_1L.expand(num_rows, -1),
            cos_1LH.expand(num_rows, -1, -1),
            sin_1LH.expand(num_rows, -1, -1),
            documents,
        )

    def _check_input(self, input_ids: Tensor) -> None:
        longest = self.config.model.sequence_length
        if input_ids.ndim != 2 or input_ids.shape[1] < 1:
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)}; it must be [rows, tokens] with tokens >= 1"
            )
        if input_ids.shape[1] > longest:
            raise ValueError(
                f"input_ids has {input_ids.shape[1]} tokens a row, more than mode.model.sequence_length = {longest}; "
                "cut the rows, or raise that setting"
            )


def _for_any_machine(config: ModeConfig) -> ModeConfig:
    """The same model where the package or the device that it was trained with may be missing."""
    bound = config.experts is not None and config.experts.backend in ("megablocks", "native")
    return config.with_backend("auto") if bound else config
