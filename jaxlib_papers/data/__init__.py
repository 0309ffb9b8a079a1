"""Domain-labelled text: sources, tokenizers, packing, mixture and a checkpointable pipeline.

The usual path is `open_corpus` -> `make_tokenizer` -> `make_pipeline`, and `heldout_batches` for
evaluation. Importing this package needs only numpy; TFDS, Grain and tokenizers are imported when
they are first used.
"""

from jaxlib_papers.data.corpus import Corpus, open_corpus
from jaxlib_papers.data.documents import Document
from jaxlib_papers.data.errors import DataError
from jaxlib_papers.data.heldout import heldout_batches
from jaxlib_papers.data.packing import Batch
from jaxlib_papers.data.pipeline import Pipeline, PipelineConfig, PipelineIterator, make_pipeline
from jaxlib_papers.data.tokenizers import ByteTokenizer, Tokenizer, check_vocabulary, make_tokenizer

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "DataError",
    "Document",
    "Pipeline",
    "PipelineConfig",
    "PipelineIterator",
    "Tokenizer",
    "check_vocabulary",
    "heldout_batches",
    "make_pipeline",
    "make_tokenizer",
    "open_corpus",
]
