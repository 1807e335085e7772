from test_store_artifacts import *  # noqa: F403
