from test_store_transactions import *  # noqa: F403
