"""Workers, the controller, clusters and runs.

Nothing is re-exported here: worker processes import only their own half.
"""
