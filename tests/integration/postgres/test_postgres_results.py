from test_store_results import *  # noqa: F403
