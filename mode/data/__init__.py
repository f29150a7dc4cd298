"""Data: sources -> packing (with a tokenizer) -> loader. `prepare_data` is the way in.

Nothing here knows the model, the engine or how many processes there are.
"""

from mode.data.baseline import bigram_loss
from mode.data.errors import DamagedCache, DataError
from mode.data.loader import Batch, TrainLoader, spread_rows, validation_batches
from mode.data.packing import PackedData, Split, SplitCounts, document_ids, pack_files, prepare_data
from mode.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "DamagedCache",
    "DataError",
    "PackedData",
    "Split",
    "SplitCounts",
    "Tokenizer",
    "TrainLoader",
    "bigram_loss",
    "document_ids",
    "pack_files",
    "prepare_data",
    "spread_rows",
    "validation_batches",
]
