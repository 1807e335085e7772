from test_store_jobs_machine import *  # noqa: F403
