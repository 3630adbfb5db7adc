"""Model families: configuration, modules, names of tensors, loading. No text, no pictures, no requests."""
