"""Training data: `sources.corpus_from` reads files, and `batches.Batches` iterates over batches."""
