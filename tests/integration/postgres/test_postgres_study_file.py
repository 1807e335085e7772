from test_store_study_file import *  # noqa: F403
