"""The resource manager: which devices there are, and who may use which."""

from timelyml.ml.resources.groups import DeviceGroups, Split

__all__ = ["DeviceGroups", "Split"]
