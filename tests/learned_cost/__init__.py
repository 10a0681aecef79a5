"""Tests of the learned cost model."""
