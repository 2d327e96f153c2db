"""What a cluster does, for people to look at."""

from timelyml.observe.tables import hosts_table, objects_table, show, usage_table

__all__ = ["hosts_table", "objects_table", "show", "usage_table"]
