"""Whether the Hugging Face hub answers. This file knows nothing of what is asked of it."""

from __future__ import annotations

PATIENCE = 5.0  # seconds


def go_offline_if_unreachable() -> None:
    """Switches Hugging Face's libraries to their offline mode if the hub does not answer.

    Left alone they retry every file for half a minute. Offline they use their own cache, or fail at once.
    """
    import datasets
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # of the HTTP client, which differs between versions; any answer at all is none
        constants.HF_HUB_OFFLINE = True  # what HF_HUB_OFFLINE=1 sets; there is no other way once they are imported
        datasets.config.HF_HUB_OFFLINE = True
