"""Running a model for requests: cache, forward passes, sampling. Knows tensors and token ids, no text and no files."""
