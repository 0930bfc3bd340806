"""The notebook magics: `%%copies`, `%memory`, `%%memory`."""
