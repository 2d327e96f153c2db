"""What a cluster does, for people to look at."""

from timelyml.observe.tables import objects_table, show, usage_table

__all__ = ["objects_table", "show", "usage_table"]
