"""Decoder blocks and models, from which `models.architectures` builds published architectures."""
