"""The tiny engine over HTTP with SGLang's native API, so that tests can use it instead of SGLang."""

from rolltape.tiny.server.app import EngineServer

__all__ = ["EngineServer"]
