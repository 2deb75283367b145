"""All generated pages, by their path below docs/reference."""

from reference_docs.commands import commands_page
from reference_docs.json_schemas import json_page, json_schemas
from reference_docs.openapi import openapi_text
from reference_docs.python_api import api_pages
from reference_docs.settings import settings_page


def generated_pages() -> dict[str, str]:
    """The text of each page, by its path."""
    return {
        "commands.md": commands_page(),
        "json.md": json_page(),
        "openapi.json": openapi_text(),
        "settings.md": settings_page(),
        **json_schemas(),
        **api_pages(),
    }
