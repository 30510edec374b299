"""Why a prompt does not extend the call before it: the first different id, its cause, and the remedy."""
