"""The error for data that cannot be used. It knows nothing of where data comes from."""

from mode.section import InputError


class DataError(InputError):
    """The user's data is wrong or out of reach. One line that names the file and what to do."""
