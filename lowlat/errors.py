"""Every error that lowlat raises on purpose.

LowlatError
├── ConfigError      the model directory, the head or an option is wrong; nothing was loaded
├── RequestError     one request is wrong; that request alone fails
├── CapacityError    the request is right but there is no room for it now; try later
└── DeviceError      the device failed; the process cannot go on

A message names the value, the limit it broke and the knob that moves the limit. This module imports nothing,
so that every folder may use it.
"""

__all__ = ["CapacityError", "ConfigError", "DeviceError", "LowlatError", "RequestError", "ShapeError"]


class LowlatError(Exception):
    """Base of all errors that lowlat raises on purpose."""


class ConfigError(LowlatError):
    """The model directory, the head or an option cannot be used; nothing half-loaded stays behind."""


class ShapeError(ConfigError):
    """Arrays handed to an operation do not have the shapes that its bucket fixes."""


class RequestError(LowlatError):
    """The caller's request cannot be served; other requests are unaffected."""


class CapacityError(LowlatError):
    """The request is valid but the queue is full now; it may be sent again later."""


class DeviceError(LowlatError):
    """The device failed; its context is lost and the process must end."""
