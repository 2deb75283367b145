"""The shared types: immutable records, validated when they are made, and enums."""
