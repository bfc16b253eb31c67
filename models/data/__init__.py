"""Training data: `corpus_from` reads files, and `Batches` iterates over batches."""

from models.data.batches import Batches as Batches
from models.data.batches import place_rows as place_rows
from models.data.batches import rows_here as rows_here
from models.data.corpus import Corpus as Corpus
from models.data.corpus import Part as Part
from models.data.corpus import Stream as Stream
from models.data.corpus import joined as joined
from models.data.sources import TEXT_FIELD as TEXT_FIELD
from models.data.sources import corpus_from as corpus_from
from models.data.sources import default_corpus as default_corpus
from models.data.tokenizers import Bytes as Bytes
from models.data.tokenizers import Tokenizer as Tokenizer
from models.data.tokenizers import TokenizerFile as TokenizerFile
