"""Errors as both OpenAI APIs word them."""

from typing import Any

from rolltape.records.jsonable import encode_json

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_object(status: int, message: str) -> dict[str, Any]:
    """The `error` of a body or event."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": None, "code": None}


def error_body(status: int, message: str) -> bytes:
    """The body of a refusal."""
    return encode_json({"error": error_object(status, message)}, "an error")[0]
