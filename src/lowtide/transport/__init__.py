"""Moves payloads between replicas; knows ranks and bytes, not training."""
