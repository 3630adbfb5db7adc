"""The command line: `foveal ask`, `fit`, `verify` and `env`. Only this package prints."""
