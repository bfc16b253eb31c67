"""These are the blocks of decoders whose weights come from elsewhere; `models.architectures` says how they fit."""
