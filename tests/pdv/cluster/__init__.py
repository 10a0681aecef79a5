"""Tests, by the layout of the code they test."""
