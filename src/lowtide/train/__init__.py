"""Model, data, inner optimizer, method and transport together."""
