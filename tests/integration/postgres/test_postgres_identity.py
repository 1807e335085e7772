from test_store_identity import *  # noqa: F403
