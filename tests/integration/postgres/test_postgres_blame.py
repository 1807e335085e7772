from test_store_blame import *  # noqa: F403
