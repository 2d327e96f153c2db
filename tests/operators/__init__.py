"""Tests of the operators; a package, so that its files share helpers."""
