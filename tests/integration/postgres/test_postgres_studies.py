from test_store_studies import *  # noqa: F403
