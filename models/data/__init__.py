"""Training data: `sources.corpus_from` reads files, and `corpus.Batches` iterates over batches."""
