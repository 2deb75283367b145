"""The tiny engine over HTTP with SGLang's native API, so that it can replace SGLang in tests."""

from rolltape.tiny.server.app import EngineServer

__all__ = ["EngineServer"]
