"""The embedded engine over HTTP, in the form of SGLang's native API, so that it can stand in for it."""

from rolltape.tiny.server.app import make_app

__all__ = ["make_app"]
