from test_store_jobs import *  # noqa: F403
