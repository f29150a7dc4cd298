"""The errors for data that cannot be used. They know nothing of where data comes from."""

from mode.config.section import InputError


class DataError(InputError):
    """The user's data is wrong or out of reach. One line that names the file and what to do."""


class DamagedCache(DataError):
    """The packed copy of the data is not what was written. Its source may be all right."""
