"""The files of a training run: checkpoints, metrics, reports and trackers."""
