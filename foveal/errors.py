"""Every error that a user can meet.

    FovealError
    ├── RequestError            what was asked cannot be answered as it stands (exit code 2, HTTP 400)
    │   ├── PromptError         messages, roles, placeholders, sampling parameters
    │   ├── PromptTooLongError  more tokens than the model's context
    │   ├── MediaError          a picture that cannot be read, or that a limit refuses
    │   └── ModelNotFoundError  no such folder, hub id or shipped model
    ├── ResourceError           the machine cannot hold it (exit code 3, HTTP 503)
    └── EngineError             the model or its files are at fault (exit code 4, HTTP 500)
        └── CheckpointError     missing, extra, misshapen or corrupt tensors; unknown settings

Each message names the value, the limit and the next step. `code` is the stable word that programs match on.
"""

from __future__ import annotations


class FovealError(Exception):
    """Base of all errors that Foveal raises on purpose."""

    code = "error"
    exit_code = 1


class RequestError(FovealError):
    """The request is at fault; another request is not disturbed."""

    code = "invalid_request"
    exit_code = 2


class PromptError(RequestError):
    """Messages, roles, placeholders or sampling parameters do not fit together."""

    code = "invalid_prompt"


class PromptTooLongError(PromptError):
    """The prompt with its pictures has more tokens than the model's context."""

    code = "context_length_exceeded"


class MediaError(RequestError):
    """A picture cannot be decoded or is over a limit."""

    code = "invalid_image"


class ModelNotFoundError(RequestError):
    """No folder, hub id or shipped model has this name."""

    code = "model_not_found"


class ResourceError(FovealError):
    """The machine cannot hold what was asked for."""

    code = "insufficient_resources"
    exit_code = 3


class EngineError(FovealError):
    """The engine or the model's files are at fault."""

    code = "engine_error"
    exit_code = 4


class CheckpointError(EngineError):
    """A checkpoint cannot be loaded: its tensors, files or settings are wrong."""

    code = "invalid_checkpoint"
