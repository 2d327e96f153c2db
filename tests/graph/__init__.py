"""Tests of the graph package; a package, so that its files share helpers."""
